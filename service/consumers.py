"""Consumer instances, v2: every endpoint of REST.md section 1.4, in whichever dialect is spoken.

Plain ASGI in front of the application, as produce and fetch are: thousands of instances read and
commit all the time. An instance is nobody's: it lives in the cluster state, and any broker serves
it; what a read returned counts as read once its answer is sent, and what answers nobody took is
returned again (storage.consumers).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qsl, quote

import msgspec

from service import wire_arrow, wire_consumers, wire_out
from service.caller import check_found, check_topics, rights_of
from service.errors import check_printable
from service.fetch import FORMATS as ACCEPTED
from service.fetch import Fetch, until_gone
from service.group_forwarding import Forwarded, ForwardedCall, Forwarder, Unreached
from service.http import (
    ARROW,
    JSON_V2,
    Answer,
    Call,
    InvalidParameter,
    NotAcceptable,
    Receive,
    UnsupportedMediaType,
    integer,
    media_type,
)
from service.paths import clean_path, origin
from service.security import Security
from service.settings import Settings
from service.wire_text import Undecodable
from storage.access import CONSUMER_BYTE_RATE
from storage.acls import DESCRIBE, READ
from storage.consumers import Consumers, Read, portion_bytes
from storage.coordinator import Heard
from storage.errors import AssignedOtherwise, InvalidRequest, LogError, UnknownMember
from storage.groups import OFFSET_MAX, check_group_id
from storage.log import Log
from storage.model import TopicPartition

log = logging.getLogger("tidelog.groups")

BODY_BYTES_MAX = 4 * 1024 * 1024
"""20,000 partitions with their offsets fit."""
CLIENT_GONE = 499
"""What is counted, as nginx does: nobody is there to be told."""
NO_CONTENT = Answer(204, b"")
READ_NOTHING = Answer(200, b"[]")
READABLE = ("json", "binary", "text")
GENERIC = frozenset({b"", b"*/*", b"application/*", JSON_V2, b"application/json"})
SCHEMA_TYPES = {
    f"application/vnd.kafka.{name}{version}+json".encode(): name
    for name in ("avro", "jsonschema", "protobuf")
    for version in (".v2", ".v1", "")
}

Handler: TypeAlias = Callable[[Call], Awaitable[Answer | None]]


class ConsumerNotFound(LogError):
    """No such instance: it was deleted, has expired, or never was."""

    status = 404
    code = 40403

    def __init__(self) -> None:
        super().__init__("Consumer instance not found.")


class NotConfigured(InvalidRequest):
    """A read before anything was chosen to be read."""

    status = 409
    code = 40903


class ConsumerRoutes:
    """The routes. One per broker."""

    def __init__(
        self,
        broker: Log,
        settings: Settings,
        consumers: Consumers,
        fetch: Fetch,
        forwarder: Forwarder | None = None,
        security: Security | None = None,
    ) -> None:
        self.forwarded = Forwarded(self._serve_here)
        """For peers: calls that they hand over."""
        self._forwarder = forwarder
        self._security = security
        if security is not None:
            consumers.may_see = security.may_see
        self._log = broker
        self._settings = settings
        self._consumers = consumers
        self._fetch = fetch

    def route(self, method: str, parts: list[str]) -> tuple[str, Handler] | None:
        """What serves a path below /consumers, as its parts after that; None: nothing does."""
        found = self._route(method, parts)
        if found is None:
            return None
        name, handler = found
        coordinator = self._elsewhere(parts[0])
        if coordinator is None:
            return name, handler
        return name, lambda call: self._forward(call, parts[0], coordinator, handler)

    def _elsewhere(self, group: str) -> str | None:
        """The group's coordinator, if that is another broker."""
        if self._forwarder is None:
            return None
        held = self._log.state.members.get(group)
        coordinators = self._consumers.coordinators
        coordinator = coordinators.of(group, "" if held is None else held.coordinator)
        return None if coordinator == coordinators.me else coordinator

    async def _forward(
        self, call: Call, group: str, coordinator: str, handler: Handler
    ) -> Answer | None:
        """Have the call served where the group's coordinator is; here, if nobody is there."""
        assert self._forwarder is not None, "nobody else could be asked"
        body = await call.body(BODY_BYTES_MAX)
        gone = asyncio.create_task(until_gone(call))
        forwarding = asyncio.create_task(self._forwarder.forward(call, coordinator, body))
        try:
            await asyncio.wait({gone, forwarding}, return_when=asyncio.FIRST_COMPLETED)
            if not forwarding.done():
                call.status = call.status or CLIENT_GONE
                return None
            forwarding.result()
        except Unreached as error:
            log.info("group %s: its coordinator cannot be reached: %s", group, error)
            call.receive = _once(body, call.receive)
            return await handler(call)
        finally:
            gone.cancel()
            forwarding.cancel()
        return None

    async def _serve_here(self, call: Call) -> Answer | None:
        parts = [part for part in call.scope["path"].split("/") if part]
        found = self._route(call.scope["method"], parts[1:])
        if found is None:
            raise InvalidRequest("no such route of consumers")
        if self._security is not None and isinstance(call, ForwardedCall):
            call.scope["rights"] = self._security.of_peer(*call.caller)
        return await found[1](call)

    def _route(self, method: str, parts: list[str]) -> tuple[str, Handler] | None:
        match parts:
            case [group]:
                if method == "POST":
                    return "consumers", lambda call: self._create(call, group)
            case [group, "instances", name, *rest]:
                found = self._handlers.get((method, *rest))
                if found is not None:
                    label, handler = found
                    return label, lambda call: self._of(handler, call, group, name)
            case _:
                pass
        return None

    async def _of(
        self,
        handler: "OfInstance",
        call: Call,
        group: str,
        name: str,
    ) -> Answer | None:
        """For an instance: any request of it is a heartbeat, and one that is not there is told so
        in the dialects' words."""
        if call.scope["method"] == "POST":
            _check_content_type(call)
        try:
            return await handler(self, call, group, name)
        except UnknownMember as error:
            check_printable("group_name", group)
            check_printable("instance", name)
            raise ConsumerNotFound from error

    # -- instances

    async def _create(self, call: Call, group: str) -> Answer:
        check_printable("group_name", group)
        refusal = check_group_id(group)
        if refusal is not None:
            raise refusal
        _check_content_type(call)
        body = await call.body(BODY_BYTES_MAX)
        asked = wire_consumers.decode_creation(body, self._settings.consumer_instance_timeout_ms)
        name = asked.name or f"rest-consumer-{self._log.clock.new_id().hex()}"
        config = msgspec.structs.replace(asked.config, principal=rights_of(call.scope).principal)
        await self._consumers.join(
            group, name, config, instance_id=asked.instance_id, assignor=asked.assignor
        )
        base_uri = f"{_origin(call)}/consumers/{quote(group, safe='')}/instances/"
        said = {"instance_id": name, "base_uri": base_uri + quote(name, safe="")}
        return Answer(200, msgspec.json.encode(said))

    async def _delete(self, _call: Call, group: str, name: str) -> Answer:
        await self._consumers.leave(group, name)
        return NO_CONTENT

    # -- what it reads

    async def _subscribe(self, call: Call, group: str, name: str) -> Answer:
        asked = wire_consumers.decode_subscription(await call.body(BODY_BYTES_MAX))
        await check_topics(rights_of(call.scope), READ, [] if asked is None else asked.topics)
        heard = await self._consumers.hear(group, name)
        if asked is None or (asked.pattern and heard.member.topics and not heard.member.pattern):
            raise AssignedOtherwise
        if asked.topics and heard.member.pattern:
            raise AssignedOtherwise
        await self._consumers.subscribe(group, name, asked.topics, asked.pattern)
        return NO_CONTENT

    async def _subscription(self, _call: Call, group: str, name: str) -> Answer:
        heard = await self._consumers.hear(group, name)
        partitions: dict[str, list[int]] | None = None
        if heard.member.config.dialect == wire_consumers.STRIMZI:
            partitions = {}
            for where in self._assigned(heard):
                partitions.setdefault(where.topic, []).append(where.partition)
        return Answer(200, wire_consumers.encode_subscription(heard.member.topics, partitions))

    async def _unsubscribe(self, _call: Call, group: str, name: str) -> Answer:
        heard = await self._consumers.hear(group, name)
        if heard.member.is_by_hand:
            await self._consumers.assign(group, name, [])
        else:
            await self._consumers.subscribe(group, name, [])
        return NO_CONTENT

    async def _assign(self, call: Call, group: str, name: str) -> Answer:
        asked = wire_consumers.decode_partitions(await call.body(BODY_BYTES_MAX))
        await check_topics(rights_of(call.scope), READ, [where.topic for where in asked])
        await self._consumers.assign(group, name, asked)
        return NO_CONTENT

    async def _assignments(self, _call: Call, group: str, name: str) -> Answer:
        heard = await self._consumers.hear(group, name)
        return Answer(200, wire_consumers.encode_partitions(self._assigned(heard)))

    def _assigned(self, heard: Heard) -> list[TopicPartition]:
        found = []
        for where in heard.member.owned:
            topic = self._log.state.topic_of_id(where.topic)
            if topic is not None:
                found.append(TopicPartition(topic.name, where.partition))
        return sorted(found)

    # -- records

    async def _records(self, call: Call, group: str, name: str) -> Answer | None:
        query = call.query()
        rights_of(call.scope).pay(CONSUMER_BYTE_RATE)
        heard = await self._consumers.hear(group, name)
        config = heard.member.config
        fmt = _accepted(call, config.format)
        if not heard.member.is_subscribed and not heard.member.is_by_hand:
            raise NotConfigured(
                "IllegalStateError: Consumer is not subscribed to any topics or assigned any "
                "partitions"
            )
        settings = self._settings
        wait_ms = _bounded(query, "timeout", config.request_timeout_ms, 0)
        bytes_max = _bounded(query, "max_bytes", settings.fetch_bytes, 1)
        reading = self._consumers.reading(
            group,
            name,
            bytes_max=min(bytes_max, settings.fetch_bytes_max),
            wait_s=min(wait_ms, settings.fetch_wait_ms_max) / 1000,
        )
        loop = asyncio.get_running_loop()
        gone = asyncio.create_task(until_gone(call))
        try:
            async with asyncio.timeout(None) as patience:

                def give_up(_: object) -> None:
                    patience.reschedule(loop.time())

                gone.add_done_callback(give_up)
                try:
                    async with reading as read:
                        # Sent in here: who went away meanwhile is returned the same again.
                        await self._send(call, read, fmt)
                finally:
                    gone.remove_done_callback(give_up)
        except TimeoutError:
            call.status = call.status or CLIENT_GONE
        finally:
            gone.cancel()
        return None

    async def _send(self, call: Call, read: Read, fmt: str) -> None:
        rights = rights_of(call.scope)
        for portion in read.portions:
            await check_found(rights, portion.topic)
        size = sum(map(portion_bytes, read.portions))
        with self._fetch.budget(size):
            records, body = _encoded(read, fmt)
            headers = ((b"tidelog-generation", b"%d" % read.generation),)
            kind = ARROW if fmt == "arrow" else f"application/vnd.kafka.{fmt}.v2+json".encode()
            await call.answer(Answer(200, body, kind, headers))
            self._fetch.count(records, len(body))
            rights.owe(CONSUMER_BYTE_RATE, len(body))
        await call.until_delivered()

    # -- offsets

    async def _commit(self, call: Call, group: str, name: str) -> Answer:
        body = await call.body(BODY_BYTES_MAX)
        heard = await self._consumers.hear(group, name)
        asked = wire_consumers.decode_commit(body, heard.member.config.dialect)
        await check_topics(
            rights_of(call.scope), READ, [where.topic for where in asked.offsets or ()]
        )
        await self._consumers.commit(heard, asked.offsets)
        return NO_CONTENT if asked.is_silent else READ_NOTHING

    async def _committed(self, call: Call, group: str, name: str) -> Answer:
        asked = _partitions_of_query(call)
        body = await call.body(BODY_BYTES_MAX)
        if body.strip():
            asked += wire_consumers.decode_partitions(body)
        await check_topics(rights_of(call.scope), DESCRIBE, [where.topic for where in asked])
        heard = await self._consumers.hear(group, name)
        await self._log.wal.refresh()
        committed = self._log.committed_offsets(group)
        offsets = {}
        for where in asked or self._assigned(heard):
            self._log.state.partition(where.topic, where.partition)
            held = committed.get(where)
            offsets[where] = (-1, "") if held is None else (held.offset, held.metadata)
        return Answer(200, wire_consumers.encode_offsets(offsets))

    async def _seek(self, call: Call, group: str, name: str) -> Answer:
        asked = wire_consumers.decode_positions(await call.body(BODY_BYTES_MAX))
        found = dict(asked.offsets)
        sought = [where.topic for where in (*found, *asked.timestamps)]
        await check_topics(rights_of(call.scope), DESCRIBE, sought)
        for where, stamp in asked.timestamps.items():
            offset = await self._log.offset_for_timestamp(where.topic, where.partition, stamp)
            if offset is None:
                offset = self._log.state.partition(where.topic, where.partition).high_watermark
            found[where] = offset
        await self._consumers.seek(group, name, found)
        return NO_CONTENT

    async def _to_beginning(self, call: Call, group: str, name: str) -> Answer:
        asked = wire_consumers.decode_partitions(await call.body(BODY_BYTES_MAX))
        await check_topics(rights_of(call.scope), DESCRIBE, [where.topic for where in asked])
        await self._consumers.seek_to_end(group, name, asked, is_beginning=True)
        return NO_CONTENT

    async def _to_end(self, call: Call, group: str, name: str) -> Answer:
        asked = wire_consumers.decode_partitions(await call.body(BODY_BYTES_MAX))
        await check_topics(rights_of(call.scope), DESCRIBE, [where.topic for where in asked])
        await self._consumers.seek_to_end(group, name, asked, is_beginning=False)
        return NO_CONTENT

    _handlers: ClassVar[Mapping[tuple[str, ...], tuple[str, "OfInstance"]]] = {
        ("GET", "records"): ("consume", _records),
        ("POST", "offsets"): ("commit", _commit),
        ("DELETE",): ("consumers", _delete),
        ("POST", "subscription"): ("consumers", _subscribe),
        ("GET", "subscription"): ("consumers", _subscription),
        ("DELETE", "subscription"): ("consumers", _unsubscribe),
        ("POST", "assignments"): ("consumers", _assign),
        ("GET", "assignments"): ("consumers", _assignments),
        ("GET", "offsets"): ("consumers", _committed),
        ("POST", "positions"): ("consumers", _seek),
        ("POST", "positions", "beginning"): ("consumers", _to_beginning),
        ("POST", "positions", "end"): ("consumers", _to_end),
    }


OfInstance: TypeAlias = Callable[[ConsumerRoutes, Call, str, str], Awaitable[Answer | None]]
"""Takes the group and the instance of the path."""


def _once(body: bytes, then: Receive) -> Receive:
    """A body that was read already, once more."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return left.pop() if left else await then()

    return receive


def _encoded(read: Read, fmt: str) -> tuple[int, bytes]:
    """How many records, and their body: one array, or stream, over all partitions."""
    if fmt == "arrow":
        parts = [
            (one.topic, one.where.partition, [piece.batch for piece in one.fetched.pieces])
            for one in read.portions
        ]
        records = sum(batch.num_rows for _, _, batches in parts for batch in batches)
        return records, wire_arrow.encode_arrow_of_many(parts)
    records, bodies = 0, []
    for portion in read.portions:
        pieces = portion.fetched.pieces
        if fmt not in READABLE:
            why = "there is no schema registry"
            raise Undecodable(fmt, portion.offset, why)  # type: ignore[arg-type]
        batches = [piece.batch for piece in pieces]
        body = wire_out.encode_records(
            batches,
            portion.topic,
            portion.where.partition,
            fmt,  # type: ignore[arg-type]
            is_json=[piece.is_json for piece in pieces],
        )
        records += sum(batch.num_rows for batch in batches)
        bodies.append(memoryview(body)[1:-1])
    return records, b"".join((b"[", b",".join(bodies), b"]"))


def _check_content_type(call: Call) -> None:
    if call.headers.get(b"content-type", b"") in (JSON_V2, b"", b"application/json"):
        return
    given = media_type(call.headers.get(b"content-type", b""))
    is_kafka = given.startswith(b"application/vnd.kafka") and given.endswith(b"json")
    if not is_kafka and given not in (b"application/json", b"application/octet-stream"):
        shown = call.headers[b"content-type"].decode("latin-1")
        raise UnsupportedMediaType(f"HTTP 415 Unsupported Media Type: {shown}")


def _accepted(call: Call, fmt: str) -> str:
    """An instance's records come in its format, or as columns; who asks for another is told."""
    accept = call.headers.get(b"accept", b"")
    for part in accept.split(b","):
        kind = media_type(part)
        if kind == ARROW:
            return "arrow"
        if kind in GENERIC or (SCHEMA_TYPES.get(kind) or ACCEPTED.get(kind)) == fmt:
            return fmt
    raise NotAcceptable(
        f"The requested embedded data format {accept.decode('latin-1')!r} does not match the "
        f"deserializer for this consumer instance: {fmt}"
    )


def _bounded(query: dict[str, str], name: str, default: int, low: int) -> int:
    """-1 is what Confluent's own clients send for the default."""
    text = query.get(name, "-1")
    return default if text in ("", "-1") else integer(name, text, low, OFFSET_MAX)


def _partitions_of_query(call: Call) -> list[TopicPartition]:
    """`?topic=t&partition=0`, repeated: for clients that cannot send a body with a GET."""
    pairs = parse_qsl(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    topics = [text for name, text in pairs if name == "topic"]
    numbers = [
        integer("partition", text, 0, 2**31 - 1) for name, text in pairs if name == "partition"
    ]
    if len(topics) == 1:
        topics *= len(numbers)
    if len(topics) != len(numbers):
        raise InvalidParameter("give a topic for each partition, or one topic for all")
    for topic in topics:
        check_printable("topic", topic)
    return list(map(TopicPartition, topics, numbers))


def _origin(call: Call) -> str:
    """Our address as the client sees it; no broker's own."""
    headers = {
        name.decode("latin-1").lower(): text.decode("latin-1")
        for name, text in call.headers.items()
    }
    server = call.scope.get("server") or ("localhost", None)
    host = f"[{server[0]}]" if ":" in server[0] else server[0]
    return origin(
        headers,
        clean_path(call.scope["path"]),
        proto=call.scope.get("scheme", "http"),
        server=host if server[1] is None else f"{host}:{server[1]}",
    ).url
