"""A follower of a topic: one stream with the records of all partitions, each in offset order.

The event id is a vector of offsets (service.formats.events), so a broker keeps no state of a
follower. A client that connects again with its last event id, to any broker, loses no record and
gets no record twice. Partitions that are added later are read from their beginning.

The partitions take turns. Each turn sends one page of one partition, so between two pages of a
partition there is at most one page of each other partition. A follower at the end of all partitions
is one waiter (storage.read.long_polls), and a commit wakes it once.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tidelog.service.formats import events
from tidelog.service.formats.fetched import FetchParams
from tidelog.service.formats.json_text import Undecodable
from tidelog.service.formats.pages import RecordPage
from tidelog.service.formats.record_formats import (
    FORMAT_PARAMETER,
    MAX_BYTES_PARAMETER,
    MAX_RECORDS_PARAMETER,
    MEDIA_TYPES,
    ON_ERROR_PARAMETER,
    RESET_PARAMETER,
    FetchedRecord,
    embedded_format,
    on_error_of,
    reset_of,
)
from tidelog.service.http.call import HttpRequest
from tidelog.service.http.media_types import EVENT_STREAM, NDJSON, media_type, not_acceptable
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.route import (
    V2,
    Answer,
    Content,
    Parameter,
    Permission,
    Route,
    RouteDoc,
)
from tidelog.service.memory_pool import Share
from tidelog.service.routes.fetch import KEEPALIVE_S, Fetch
from tidelog.service.routes.followers.bounds import Follower
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.storage.core.acls import READ, TOPIC
from tidelog.storage.core.errors import InvalidRequest, LogError, OffsetOutOfRange, UnknownTopic
from tidelog.storage.log import Log
from tidelog.storage.state.access import CONSUMER_BYTE_RATE
from tidelog.storage.state.cluster_state import Topic

PARTITIONS_MAX = events.VECTOR_PARTITIONS_MAX
"""Maximum partitions of a topic that can be followed. The number is bounded, because each event id
has an offset of each partition."""
FORMATS = {EVENT_STREAM: "sse", NDJSON: "ndjson", b"*/*": "ndjson", b"": "ndjson"}


class _Turn(NamedTuple):
    """The result of one turn: its events `reset`, and a page of one partition with the offset after
    the page and the weight of its records."""

    resets: bytes
    partition: int = 0
    next_offset: int = 0
    page: RecordPage | None = None
    weight: int = 0


class _Position:
    """The position of one follower: `offsets` has the next offset of each partition."""

    def __init__(
        self,
        view: FetchParams,
        reset: str,
        topic: Topic,
        offsets: list[int],
        follower: Follower,
    ) -> None:
        self.view = view
        self.is_sse = view.format_name == "sse"
        self.offsets = offsets
        self._reset = reset
        self._topic_id = topic.topic_id
        self._follower = follower
        self._last = -1
        """The partition of the last turn."""

    def update(self, topic: Topic) -> bytes:
        """Add the topic's new partitions, and reset the offsets that are out of range. Return the
        events of these resets. Raises UnknownTopic, InvalidRequest, Throttled, OffsetOutOfRange."""
        if topic.topic_id != self._topic_id:  # deleted, and created again
            raise UnknownTopic(topic.name)
        _check_count(topic)
        if len(topic.partitions) > len(self.offsets):
            self._follower.grow(len(topic.partitions))
        added = topic.partitions[len(self.offsets) :]
        self.offsets += [partition.log_start_offset for partition in added]
        resets = b""
        for number, partition in enumerate(topic.partitions):
            offset = self.offsets[number]
            if not partition.log_start_offset <= offset <= partition.high_watermark:
                resets += self.reset(
                    number,
                    OffsetOutOfRange(
                        topic.name,
                        number,
                        offset,
                        log_start_offset=partition.log_start_offset,
                        high_watermark=partition.high_watermark,
                    ),
                )
        return resets

    def reset(self, number: int, error: OffsetOutOfRange) -> bytes:
        """Move the partition's offset as the parameter `reset` says, and return the event `reset`.
        If the parameter is `none`, raise the error."""
        if self._reset == "none":
            raise error
        is_first = self._reset == "earliest"
        offset = error.log_start_offset if is_first else error.high_watermark
        self.offsets[number] = offset
        data = {"type": "reset", "partition": number, "requested_offset": error.offset}
        return self.notice("reset", {**data, "offset": offset})

    def turn(self, topic: Topic) -> int | None:
        """Return the next partition with records to send, counted from the partition of the last
        turn. If no partition has such records, return None."""
        count = len(self.offsets)
        for step in range(1, count + 1):
            number = (self._last + step) % count
            if topic.partitions[number].high_watermark > self.offsets[number]:
                self._last = number
                return number
        return None

    def notice(self, kind: str, data: dict[str, object]) -> bytes:
        return events.notice(self.view.format_name, kind, data, events.vector(self.offsets))

    def beginning(self) -> bytes:
        """Return the beginning of the stream: for SSE, an event with an id and without data; for
        NDJSON, the first line."""
        if self.is_sse:
            return events.beginning_with(events.vector(self.offsets))
        return self.notice(
            "", {"type": "position", "event_id": events.vector(self.offsets).decode()}
        )


class TopicFollower:
    """The route of followers of a topic. One per broker."""

    def __init__(self, broker: Log, fetcher: Fetch) -> None:
        self._log = broker
        self._fetch = fetcher

    async def follow(self, call: HttpRequest, name: str) -> None:
        """Send records until the client disconnects. If the first turn raises an error, the
        response has the error's status. A later error is sent as an event."""
        rights_of(call.scope).charge(CONSUMER_BYTE_RATE)
        query = call.query()
        format_name = _format(call.headers.get(b"accept", b""), query)
        embedded = embedded_format(query, format_name)
        bounds = self._fetch.bounds_of(query)
        view = FetchParams(name, 0, format_name, embedded, bounds, on_error_of(query) or "stop")
        reset = reset_of(query)
        await self._log.refresh()  # to see all records acknowledged before this call (I3)
        topic = self._log.state.topic(name)
        _check_count(topic)
        offsets = _offsets(call, query, topic, reset)
        principal = rights_of(call.scope).principal
        with (
            self._fetch.followers.follower(principal, len(offsets)) as follower,
            self._fetch.answer_share(principal) as share,
        ):
            at = _Position(view, reset, topic, offsets, follower)
            await self._stream(call, at, share)

    async def _stream(self, call: HttpRequest, at: _Position, share: Share) -> None:
        beginning = at.beginning()
        rights = rights_of(call.scope)
        if call.scope["method"] == "HEAD":
            turn = _Turn(at.update(self._log.state.topic(at.view.topic)))
        else:
            turn = await self._turn(at, share, rights, 0.0, call)
        page = turn.page
        if page is not None and page.stopped is not None and not page.records and not at.is_sse:
            raise page.stopped  # not for SSE: an EventSource closes at any status but 200
        await call.start_stream(MEDIA_TYPES[at.view.format_name])
        await self._fetch.send_stream(
            call,
            at.view.topic,
            share,
            beginning,
            turn,
            read=lambda: self._turn(at, share, rights, KEEPALIVE_S),
            send=lambda turn: self._send(call, at, turn or _Turn(b"")),
            failure=lambda error: self._failure(call, at, error),
        )

    async def _turn(
        self,
        at: _Position,
        share: Share,
        rights: CallerRights,
        wait_s: float,
        call: HttpRequest | None = None,
    ) -> _Turn:
        """Wait for records, and read a page of the next partition that has any. A waiting follower
        holds no memory."""
        topic = await self._log.wait_for_topic(at.view.topic, at.offsets, wait_s)
        resets = at.update(topic)
        number = at.turn(topic)
        if number is None:
            return _Turn(resets)
        view = at.view._replace(partition=number)
        try:
            fetch_page = await self._fetch.page(view, at.offsets[number], share, rights, call=call)
        except OffsetOutOfRange as error:  # retention has deleted records since `update`
            return _Turn(resets + at.reset(number, error))
        fetched, page = fetch_page
        return _Turn(resets, number, fetched.next_offset, page, fetched.weight)

    async def _send(self, call: HttpRequest, at: _Position, turn: _Turn) -> None:
        """Send the result of a turn, or a keep-alive if the result is empty. If the page stops at a
        record that does not decode, send the records before it, then raise Undecodable."""
        await call.chunk(turn.resets)
        page = turn.page
        if page is None:
            if not turn.resets:
                await call.chunk(events.KEEPALIVE[at.view.format_name])
            return
        pieces: Iterable[bytes] = [page.body]
        if at.is_sse:
            pieces = events.with_vectors(page.body, at.offsets, turn.partition)
        size = 0
        for piece in pieces:
            await call.chunk(piece)
            size += len(piece)
        at.offsets[turn.partition] = turn.next_offset
        rights_of(call.scope).record(CONSUMER_BYTE_RATE, turn.weight)
        self._fetch.count([page], size, page.topic)
        if page.skipped:
            data = {"skipped": page.skipped, "first_skipped_offset": page.first_wrong}
            await call.chunk(at.notice("skipped", {"partition": turn.partition, **data}))
        if page.stopped is not None:
            raise page.stopped

    def _failure(self, call: HttpRequest, at: _Position, error: LogError) -> bytes:
        offsets = at.offsets
        if isinstance(error, Undecodable):  # an EventSource continues after the record
            offsets = [*offsets]
            offsets[error.where.partition] = error.offset + 1
        body = self._fetch.answer_of(call, error)
        return events.failure(at.view.format_name, error, body, events.vector(offsets))


def _check_count(topic: Topic) -> None:
    if len(topic.partitions) > PARTITIONS_MAX:
        raise InvalidRequest(
            f"topic {topic.name!r} has {len(topic.partitions)} partitions, and a topic with more "
            f"than {PARTITIONS_MAX} cannot be followed: follow single partitions, or use a "
            "consumer group"
        )


def _offsets(call: HttpRequest, query: dict[str, str], topic: Topic, reset: str) -> list[int]:
    """Return the offset at which each partition begins. Raises InvalidParameter."""
    seen = call.headers.get(b"last-event-id", b"").decode("latin-1")
    if seen or "last-event-id" in query:
        return _offsets_of_id(seen or query["last-event-id"], topic, reset)
    where = query.get("offset", "earliest")
    if where == "earliest":
        return [partition.log_start_offset for partition in topic.partitions]
    if where == "latest":
        return [partition.high_watermark for partition in topic.partitions]
    raise InvalidParameter(
        f"parameter offset={where[:SHOWN_MAX]!r} of a topic must be earliest or latest; "
        "Last-Event-ID takes the offsets of its partitions"
    )


def _offsets_of_id(text: str, topic: Topic, reset: str) -> list[int]:
    found = events.parse_vector(text)
    if found is None:
        raise InvalidParameter(
            f"Last-Event-ID {text[:SHOWN_MAX]!r} is not the offset of the last record of each "
            "partition, as 0:12,1:-1,2:7"
        )
    count = len(topic.partitions)
    if (beyond := max(found)) >= count and reset == "none":
        raise InvalidParameter(
            f"Last-Event-ID names partition {beyond}, but topic {topic.name!r} has 0 to {count - 1}"
        )
    return [
        found.get(number, partition.log_start_offset)
        for number, partition in enumerate(topic.partitions)
    ]


def _format(accept: bytes, query: dict[str, str]) -> str:
    """Return `sse`, or `ndjson` if `follow=true`. Raises NotAcceptable, InvalidParameter."""
    for part in accept.split(b","):
        found = FORMATS.get(media_type(part))
        if found is None:
            continue
        if found == "ndjson" and query.get("follow") != "true":
            raise InvalidParameter(
                "the records of a topic are an endless stream: add follow=true, or send "
                "Accept: text/event-stream"
            )
        return found
    raise not_acceptable(accept, "text/event-stream or application/x-ndjson")


_DOC = RouteDoc(
    {
        400: "40002: an offset out of range, a topic of more than 256 partitions, or an invalid "
        "parameter",
        404: "40401: unknown topic",
        406: "an unknown Accept",
        422: "the first record does not decode in the requested format (NDJSON)",
        429: "the principal's quota is used up, or the principal follows too much",
        500: "a corrupt object; the message names it",
        503: "the store does not answer, or too many fetches at once",
    },
    tag="records",
    summary="Follow a topic",
    text="Sends the records of all partitions as they are committed, each partition in offset "
    "order. The event id has the offset of the last record of each partition: `0:12,1:-1,2:7` (-1: "
    "no record). A request with this id as `Last-Event-ID` continues the stream. A partition that "
    'the id does not name is read from its beginning. NDJSON begins with a line `{"type": '
    '"position"}`, which has the `event_id`.',
    parameters=(
        Parameter("follow", "with NDJSON: `true`", {"type": "boolean", "default": False}),
        Parameter(
            "offset",
            "where all partitions begin: `earliest` or `latest`",
            {"type": "string", "enum": ["earliest", "latest"], "default": "earliest"},
        ),
        Parameter("last-event-id", "the same as the header", {"type": "string"}),
        Parameter("Last-Event-ID", "the id of the last event", {"type": "string"}, "header"),
        MAX_BYTES_PARAMETER,
        MAX_RECORDS_PARAMETER,
        RESET_PARAMETER,
        FORMAT_PARAMETER,
        ON_ERROR_PARAMETER,
    ),
    answers={
        200: Answer(
            "Server-sent events, or lines of records.",
            (Content((EVENT_STREAM, NDJSON), (FetchedRecord,)),),
        )
    },
)

ROUTES = (
    Route(
        "GET",
        "/topics/{topic_name}/records",
        TopicFollower.follow,
        Permission(READ, TOPIC, "topic_name"),
        "follow_topic",
        V2,
        _DOC,
    ),
)
