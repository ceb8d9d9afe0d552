"""Consumer instances, v2: the routes of all dialects (DIALECTS.md).

These routes are hot, because thousands of instances read and commit all the time. An instance is in
the cluster's state and belongs to no broker. Any broker accepts requests of the instance and
forwards them to the group's coordinator. Records count as read when the response has arrived. If
it has not, the next read returns its records again (service.http.answer_arrival, storage.groups).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from tidelog.service.formats import consumers as wire_consumers
from tidelog.service.formats.read_parameters import FETCH_FORMATS, MEDIA_TYPES, on_error_of
from tidelog.service.formats.record_pages import OnError, headers_of
from tidelog.service.http.body_limit import limited_body
from tidelog.service.http.media_types import (
    ARROW,
    JSON_V2,
    NotAcceptable,
    check_instance_type,
    media_type,
)
from tidelog.service.http.parameters import integer_or_default
from tidelog.service.http.request import (
    ClientGone,
    HttpRequest,
    HttpResponse,
    received_again,
    until_gone,
)
from tidelog.service.http.route import Route
from tidelog.service.http.urls import client_url
from tidelog.service.memory_pool import Share
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.rights import DESCRIBE_TOPIC, FETCH, JOIN_GROUP, check_all
from tidelog.service.peers.forwarding import ForwardedCall, Unreached
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.routes.fetch import ENCODE_INLINE_BYTES, Fetch
from tidelog.service.security.caller import ALL_RIGHTS, CallerRights, address_of, rights_of
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.slices import sliced
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import Right
from tidelog.storage.core.errors import (
    AssignedOtherwise,
    InvalidRequest,
    LogError,
    NotAssigned,
    Unavailable,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import ReadBounds, TopicPartition
from tidelog.storage.groups.read_result import Read
from tidelog.storage.groups.rest_members import MemberSession
from tidelog.storage.state.access import CONSUMER_BYTE_RATE
from tidelog.storage.state.committed_offsets import check_group_id

log = logging.getLogger("tidelog.groups")

READ_ID = b"tidelog-read"
"""Header of a response with records: the id of the read. A read may send the last one it has."""
CLIENT_GONE = 499  # metrics count it if the client has disconnected, as in nginx. It is not sent.
NO_CONTENT = HttpResponse(204, b"")
NO_RECORDS = HttpResponse(200, b"[]")
REROUTE_S, REROUTE_PAUSE_S = 2.0, 0.1  # of a broker that stops
GENERIC = frozenset({b"", b"*/*", b"application/*", JSON_V2, b"application/json"})

T = TypeVar("T")
Handler: TypeAlias = Callable[..., Coroutine[Any, Any, HttpResponse | None]]


class ConsumerNotFound(LogError):
    """The instance does not exist: it was never created, was deleted, or has expired."""

    status = 404
    code = 40403

    def __init__(self) -> None:
        super().__init__("Consumer instance not found.")


class NotConfigured(InvalidRequest):
    """The instance reads before it has a subscription or an assignment."""

    status = 409
    code = 40903


class ConsumerHandlers:
    """The handlers of the routes (service.routes.consumers_v2_routes). One per broker."""

    def __init__(
        self,
        broker: Broker,
        settings: RequestSettings,
        operations: Operations,
        held_members: HeldMembers,
        fetch: Fetch,
    ) -> None:
        self._held_members = held_members
        self._forwarder = held_members.forwarder
        self._broker = broker
        self._settings = settings
        self._consumers = held_members.groups
        self._fetch = fetch
        self._groups = operations.groups
        self._records = operations.records

    def bound(self, route: Route) -> Handler:
        """Return the handler of a route for requests of clients."""
        return partial(self._serve, route.serve)

    def bound_here(self, route: Route) -> Handler:
        """Return the handler of a route for requests that a peer forwarded to this broker."""
        return partial(self._serve_forwarded, route.serve)

    async def _serve(
        self, handler: Handler, call: HttpRequest, group: str, *instance: str
    ) -> HttpResponse | None:
        """Serve a request on the group's coordinator: here, or on another broker."""
        requests, loop = self._consumers.requests, asyncio.get_running_loop()
        await requests.until_decided()
        refused: set[str] = set()
        deadline_s = loop.time() + REROUTE_S
        while (coordinator := self._elsewhere(group)) is not None:
            if coordinator in refused:
                # A broker that has released its groups cannot serve the request instead.
                if not requests.is_released or loop.time() >= deadline_s:
                    break
                await asyncio.sleep(REROUTE_PAUSE_S)
            if await self._forward(call, coordinator, group):
                return None
            refused.add(coordinator)
            with contextlib.suppress(LogError):  # another broker may have taken the group
                await self._broker.refresh()
        return await self._serve_here(handler, call, group, *instance)

    async def _serve_forwarded(
        self, handler: Handler, call: ForwardedCall, group: str, *instance: str
    ) -> HttpResponse | None:
        """Serve a request that a peer forwarded.

        If this broker has released its groups, refuse the request before it begins, when the peer
        knows that this broker stops.
        """
        await self._consumers.requests.until_decided()
        if self._consumers.requests.is_released:
            call.refuse()
            raise Unavailable("this broker has released its groups: ask the next coordinator")
        return await self._serve_here(handler, call, group, *instance)

    async def _forward(self, call: HttpRequest, coordinator: str, group: str) -> bool:
        """Forward a request. Return False if the coordinator certainly did not begin it."""
        assert self._forwarder is not None, "without a forwarder, every group is here"
        body = await limited_body(call)
        with self._fetch.answer_share(rights_of(call.scope).principal) as share:
            room = partial(self._fetch.reserve, share)
            try:
                async with _while_connected(call) as stop_watching:
                    send = await self._forwarder.ask(call, coordinator, body, room)
                    stop_watching()
                    await send()
            except (TimeoutError, ClientGone):
                call.status = call.status or CLIENT_GONE
            except Unreached as error:
                log.info("group %s: its coordinator cannot be reached: %s", group, error)
                call.receive = received_again(body, call.receive)
                return False
        return True

    def _elsewhere(self, group: str) -> str | None:
        """Return the group's coordinator if it is another broker, else None."""
        if self._forwarder is None:
            return None
        return self._consumers.coordinator.other_broker_of(group)

    async def _serve_here(
        self, handler: Handler, call: HttpRequest, group: str, *instance: str
    ) -> HttpResponse | None:
        """Serve a request on this broker.

        Every request of an instance is a heartbeat. If the instance is unknown, raises
        ConsumerNotFound, the dialects' error.
        """
        if instance and call.scope["method"] == "POST":
            check_instance_type(call.headers)
        try:
            with self._consumers.requests.serving():
                return await handler(self, call, group, *instance)
        except UnknownMember as error:
            if not instance:
                raise
            raise ConsumerNotFound from error

    # -- instances

    async def create(self, call: HttpRequest, group: str) -> HttpResponse:
        refusal = check_group_id(group)
        if refusal is not None:
            raise refusal
        check_instance_type(call.headers)
        body = await limited_body(call)
        created = wire_consumers.decode_creation(body, self._settings.consumer_instance_timeout_ms)
        name = created.name or f"rest-consumer-{self._broker.clock.new_id().hex()}"
        config = msgspec.structs.replace(created.config, principal=rights_of(call.scope).principal)
        await self._consumers.join(
            group,
            name,
            config,
            instance_id=created.instance_id,
            assignor=created.assignor,
            host=address_of(call.scope),
        )
        url = client_url(call.scope, self._settings.advertised_url).url
        base_uri = f"{url}/consumers/{quote(group, safe='')}/instances/"
        response = {"instance_id": name, "base_uri": base_uri + quote(name, safe="")}
        return HttpResponse(200, msgspec.json.encode(response))

    async def held(self, _call: HttpRequest, group: str) -> HttpResponse:
        """Answer a peer with the held members of a group that this broker coordinates."""
        return HttpResponse(200, self._held_members.here(group))

    async def delete(self, _call: HttpRequest, group: str, name: str) -> HttpResponse:
        await self._consumers.leave(group, name)
        return NO_CONTENT

    # -- subscriptions and assignments

    async def subscribe(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        subscription = wire_consumers.decode_subscription(await limited_body(call))
        await check_all(
            rights_of(call.scope), FETCH, [] if subscription is None else subscription.topics
        )
        member = (await self._consumers.heartbeat(group, name)).member
        if subscription is None or (subscription.pattern and member.topics and not member.pattern):
            raise AssignedOtherwise
        if subscription.topics and member.pattern:
            raise AssignedOtherwise
        await self._consumers.subscribe(group, name, subscription.topics, subscription.pattern)
        return NO_CONTENT

    async def subscription(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        session = await self._consumers.heartbeat(group, name)
        rights = rights_of(call.scope)
        topics = self._groups.shown_subscription(rights, session.member)
        partitions: dict[str, list[int]] | None = None
        if session.member.config.dialect == wire_consumers.STRIMZI:
            partitions = {}
            for partition in await self._assigned(session, rights):
                partitions.setdefault(partition.topic, []).append(partition.partition)
        return HttpResponse(200, wire_consumers.encode_subscription(topics, partitions))

    async def unsubscribe(self, _call: HttpRequest, group: str, name: str) -> HttpResponse:
        session = await self._consumers.heartbeat(group, name)
        if session.member.is_by_hand:
            await self._consumers.assign(group, name, [])
        else:
            await self._consumers.subscribe(group, name, [])
        return NO_CONTENT

    async def assign(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        partitions = await _partitions(call, FETCH)
        await self._consumers.assign(group, name, partitions)
        return NO_CONTENT

    async def assignments(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        session = await self._consumers.heartbeat(group, name)
        assigned = await self._assigned(session, rights_of(call.scope))
        return HttpResponse(200, wire_consumers.encode_partitions(assigned))

    async def _assigned(self, session: MemberSession, rights: CallerRights) -> list[TopicPartition]:
        """Return the member's partitions in topics that the caller may describe, sorted."""
        return list(await self._groups.shown_partitions(rights, session.member.owned))

    def _topics(self, session: MemberSession) -> list[str]:
        """Return the topics of the member's partitions."""
        topics = map(
            self._broker.state.topic_of_id,
            {partition.topic_id for partition in session.member.owned},
        )
        return [topic.name for topic in topics if topic is not None]

    # -- records

    async def records(self, call: HttpRequest, group: str, name: str) -> HttpResponse | None:
        query = call.query()
        rights_of(call.scope).charge(CONSUMER_BYTE_RATE)
        session = await self._consumers.heartbeat(group, name)
        config = session.member.config
        chosen, on_error, records_max = wire_consumers.options_of(config)
        fmt = _accepted(call, chosen)
        on_error = on_error_of(query) or on_error
        if not session.member.is_subscribed and not session.member.is_by_hand:
            raise NotConfigured(
                "IllegalStateError: Consumer is not subscribed to any topics or assigned any "
                "partitions"
            )
        if call.scope["method"] == "HEAD":  # a read would skip the records that HEAD does not send
            return HttpResponse(200, b"", MEDIA_TYPES[fmt])
        settings = self._settings
        wait_ms = integer_or_default(query, "timeout", config.request_timeout_ms, 0)
        bytes_max = integer_or_default(query, "max_bytes", settings.fetch_bytes, 1)
        records_max = min(integer_or_default(query, "max_records", records_max, 1), records_max)
        reading = self._consumers.reading(
            group,
            name,
            bounds=ReadBounds(min(bytes_max, settings.fetch_bytes_max), records_max),
            wait_s=min(wait_ms, settings.fetch_wait_ms_max) / 1000,
            check=wire_consumers.check_of_portions(fmt, on_error),
            received=_received(call),
        )
        try:
            # If the client disconnects in here, the next read returns the same records.
            async with _while_connected(call) as stop_watching, reading as read:
                await rights_of(call.scope).check(JOIN_GROUP, group)  # revoked during the wait
                await self._send(call, read, fmt, on_error, stop_watching)
        except (TimeoutError, ClientGone):
            call.status = call.status or CLIENT_GONE
        return None

    async def _send(
        self,
        call: HttpRequest,
        read: Read,
        fmt: str,
        on_error: OnError,
        stop_watching: Callable[[], object],
    ) -> None:
        rights = rights_of(call.scope)
        for portion in read.portions:
            await self._records.check_matched(rights, portion.topic)
        with self._fetch.answer_share(rights.principal) as share:
            answer = await self._answer(read, fmt, on_error, share, rights)
            if read.read_id:
                read.arrival = call.watch()
            stop_watching()
            sending = call.answer(answer, self._fetch.packing(share, rights))
            del answer  # `sending` has it, until it is packed or on its way
            await sending
            rights.record(CONSUMER_BYTE_RATE, read.weight)
            if read.read_id:
                await call.until_delivered()

    async def _answer(
        self, read: Read, fmt: str, on_error: OnError, share: Share, rights: CallerRights
    ) -> HttpResponse:
        """Encode a read within the share."""
        encoded = partial(self._encoded, read, fmt, share, rights)
        headers: tuple[tuple[bytes, bytes], ...] = (
            (b"tidelog-generation", b"%d" % read.generation),
        )
        kind = ARROW
        if fmt == "arrow":
            records, body = await encoded(partial(wire_consumers.columns_of_read, read))
            self._fetch.counters.add_records_out(records, len(body))
        else:
            work = partial(wire_consumers.array_of_read, read, fmt, on_error)
            pages, body = await encoded(work)
            wire_consumers.end_at_pages(read, pages)
            headers += headers_of(pages, read.failure)
            kind = MEDIA_TYPES[fmt]
            self._fetch.count(pages, len(body))
        read.drop_records()
        await self._fetch.reserve(share, len(body))
        if read.read_id:
            headers += ((READ_ID, read.read_id.encode()),)
        return HttpResponse(200, body, kind, headers)

    async def _encoded(
        self, read: Read, fmt: str, share: Share, rights: CallerRights, encode: Callable[[], T]
    ) -> T:
        """Encode the records, or the leading ones whose answer is within its bound."""
        size = read.weight
        if is_large := size > ENCODE_INLINE_BYTES:
            size = wire_consumers.fit(read, fmt, self._fetch.page_bytes_max)
        await self._fetch.reserve(share, size)
        return await self._fetch.encoded(share, rights, size, encode) if is_large else encode()

    # -- offsets

    async def commit(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        body = await limited_body(call)
        session = await self._consumers.heartbeat(group, name)
        commit = wire_consumers.decode_commit(body, session.member.config.dialect)
        rights = rights_of(call.scope)
        if commit.offsets is not None:
            await check_all(rights, FETCH, [partition.topic for partition in commit.offsets])
        elif rights is not ALL_RIGHTS:
            for topic in self._topics(session):
                await self._records.check_matched(rights, topic)
        await self._consumers.commit(session, commit.offsets)
        return NO_CONTENT if commit.is_silent else NO_RECORDS

    async def committed(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        partitions = wire_consumers.partitions_of_query(call.scope["query_string"])
        body = await limited_body(call)
        if body.strip():
            partitions += wire_consumers.decode_partitions(body)
        topics = [partition.topic for partition in partitions]
        await check_all(rights_of(call.scope), DESCRIBE_TOPIC, topics)
        session = await self._consumers.heartbeat(group, name)
        await self._broker.refresh()
        committed = self._broker.state.committed_offsets.of_group(group)
        offsets = {}
        requested_partitions = partitions or await self._assigned(session, rights_of(call.scope))
        async for partition in sliced(requested_partitions):
            self._broker.state.partition(partition.topic, partition.partition)
            topic_id = self._broker.state.topic(partition.topic).topic_id
            offset = committed.get(topic_id, {}).get(partition.partition)
            offsets[partition] = (-1, "") if offset is None else (offset.offset, offset.metadata)
        return HttpResponse(200, wire_consumers.encode_offsets(offsets))

    async def seek(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        positions = wire_consumers.decode_positions(await limited_body(call))
        offsets = dict(positions.offsets)
        topics = [partition.topic for partition in (*offsets, *positions.timestamps)]
        await check_all(rights_of(call.scope), DESCRIBE_TOPIC, topics)
        with _unknown_is_not_assigned():
            for partition, stamp in positions.timestamps.items():
                offset = await self._broker.records.offset_for_timestamp(
                    partition.topic, partition.partition, stamp
                )
                if offset is None:
                    offset = self._broker.state.partition(
                        partition.topic, partition.partition
                    ).high_watermark
                offsets[partition] = offset
            await self._consumers.seek(group, name, offsets)
        return NO_CONTENT

    async def seek_to_beginning(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        return await self._seek_to(call, group, name, is_beginning=True)

    async def seek_to_end(self, call: HttpRequest, group: str, name: str) -> HttpResponse:
        return await self._seek_to(call, group, name, is_beginning=False)

    async def _seek_to(
        self, call: HttpRequest, group: str, name: str, *, is_beginning: bool
    ) -> HttpResponse:
        partitions = await _partitions(call, DESCRIBE_TOPIC)
        with _unknown_is_not_assigned():
            await self._consumers.seek_to_end(group, name, partitions, is_beginning=is_beginning)
        return NO_CONTENT


@contextlib.contextmanager
def _unknown_is_not_assigned() -> Iterator[None]:
    """Raise NotAssigned for a partition that does not exist. No instance can have it assigned."""
    try:
        yield
    except (UnknownTopic, UnknownPartition) as error:
        raise NotAssigned(f"No current assignment for the partition: {error}") from error


async def _partitions(call: HttpRequest, right: Right) -> list[TopicPartition]:
    """Return the partitions of the body.

    Raises Forbidden if the caller does not have the right to their topics.
    """
    partitions = wire_consumers.decode_partitions(await limited_body(call))
    await check_all(rights_of(call.scope), right, [partition.topic for partition in partitions])
    return partitions


@contextlib.asynccontextmanager
async def _while_connected(call: HttpRequest) -> AsyncIterator[Callable[[], object]]:
    """Raise TimeoutError in the block when the client disconnects.

    This ends when the block calls the function that it gets, before the answer. From then on,
    `HttpRequest.watch` knows more: the end of an answer also ends `until_gone`, perhaps before the
    socket has taken the answer.
    """
    loop = asyncio.get_running_loop()
    disconnection = asyncio.create_task(until_gone(call.receive))
    try:
        async with asyncio.timeout(None) as timeout:

            def give_up(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # the block ended in the same turn
                    timeout.reschedule(loop.time())

            disconnection.add_done_callback(give_up)
            try:
                yield partial(disconnection.remove_done_callback, give_up)
            finally:
                disconnection.remove_done_callback(give_up)
    finally:
        disconnection.cancel()


def _received(call: HttpRequest) -> str | None:
    read_id = call.headers.get(READ_ID)
    return None if read_id is None else read_id.decode("latin-1")


def _accepted(call: HttpRequest, fmt: str) -> str:
    """Return the format of a response: the instance's format, or Arrow. Raises NotAcceptable."""
    accept = call.headers.get(b"accept", b"")
    for part in accept.split(b","):
        kind = media_type(part)
        if kind == ARROW:
            return "arrow"
        if kind in GENERIC or FETCH_FORMATS.get(kind) == fmt:
            return fmt
    raise NotAcceptable(
        f"The requested embedded data format {accept.decode('latin-1')!r} does not match the "
        f"deserializer for this consumer instance: {fmt}"
    )
