"""A follower of a topic: one stream with the records of all partitions, each in offset order.

The event id is a vector of offsets (service.formats.events), so a broker keeps no state of a
follower. A client that connects again with its last event id, to any broker, loses no record and
gets no record twice. Partitions that are added later are read from their beginning.

The partitions take turns. A turn sends pages of several partitions, one of each, so between two
pages of a partition there is at most one page of each other partition. A follower at the end of all
partitions is one waiter (storage.read.long_polls), and a commit wakes it once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidelog.service.formats import events
from tidelog.service.formats.fetched import FetchParams
from tidelog.service.formats.json_text import Undecodable
from tidelog.service.formats.read_parameters import (
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
from tidelog.service.formats.record_pages import RecordPage
from tidelog.service.http.media_types import EVENT_STREAM, NDJSON, media_type, not_acceptable
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.request import HttpRequest
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
from tidelog.service.operations.rights import FETCH
from tidelog.service.routes.fetch import KEEPALIVE_S, Fetch
from tidelog.service.routes.follower_bounds import Follower
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import InvalidRequest, LogError, OffsetOutOfRange, UnknownTopic
from tidelog.storage.read.long_polls import NO_CHANGE, TopicChanges
from tidelog.storage.state.access import CONSUMER_BYTE_RATE
from tidelog.storage.state.topic import Topic

PARTITIONS_MAX = events.VECTOR_PARTITIONS_MAX
"""Maximum partitions of a topic that can be followed. The number is bounded, because each event id
has an offset of each partition."""
PAGES_AT_ONCE = 8
"""Maximum pages of one turn. A page costs ~0.1 ms of CPU, and one turn of the event loop has turns
of several followers (storage.read.long_polls)."""
FORMATS = {EVENT_STREAM: "sse", NDJSON: "ndjson", b"*/*": "ndjson", b"": "ndjson"}


class _Page(NamedTuple):
    """A page of one partition with the offset after it, and the weight of its records."""

    partition: int
    next_offset: int
    page: RecordPage
    weight: int


class _Turn(NamedTuple):
    """The result of one turn: the events `reset`, and pages of partitions."""

    resets: bytes = b""
    pages: Sequence[_Page] = ()


class _Position:
    """The position of one follower: `offsets` has the next offset of each partition.

    `ready` has the partitions that perhaps have records to send, in the order of their turns. A
    follower looks at no other partition until it has changed.
    """

    def __init__(
        self,
        view: FetchParams,
        reset: str,
        topic: Topic,
        offsets: list[int],
        follower: Follower,
        changes: TopicChanges,
    ) -> None:
        self.view = view
        self.is_sse = view.format_name == "sse"
        self.offsets = offsets
        self.vector = events.pairs(offsets)
        """The parts of the event id."""
        self.changes = changes
        self.count = NO_CHANGE
        """Number of the changes that are in `ready`."""
        self.ready: dict[int, None] = {}
        self.reset_to = reset
        self._topic_id = topic.topic_id
        self._follower = follower

    def update(self, topic: Topic) -> None:
        """Add the topic's new partitions, and to `ready` those that have changed.

        Raises UnknownTopic, InvalidRequest, Throttled.
        """
        if topic.topic_id != self._topic_id:  # deleted, and created again
            raise UnknownTopic(topic.name)
        partitions = topic.partitions
        if len(partitions) > len(self.offsets):
            _check_count(topic)
            self._follower.grow(len(partitions))
            self.offsets += [added.log_start_offset for added in partitions[len(self.offsets) :]]
            self.vector = events.pairs(self.offsets)
        changed = self.changes.since(self.count)
        self.count = self.changes.count
        for number in range(len(partitions)) if changed is None else changed:
            if partitions[number].high_watermark != self.offsets[number]:
                self.ready[number] = None

    def take(self) -> int:
        """Take the first partition of those that are ready."""
        number = next(iter(self.ready))
        del self.ready[number]
        return number

    def put_back(self, number: int) -> None:
        """Let the partition be the first one of the next turn."""
        self.ready = {number: None, **self.ready}

    def move(self, number: int, offset: int) -> None:
        self.offsets[number] = offset
        self.vector[number] = events.pair(number, offset)

    def reset(self, number: int, error: OffsetOutOfRange) -> bytes:
        """Move the partition's offset as the parameter `reset` says, and return the event `reset`.

        If the parameter is `none`, raise the error.
        """
        if self.reset_to == "none":
            raise error
        is_first = self.reset_to == "earliest"
        offset = error.log_start_offset if is_first else error.high_watermark
        self.move(number, offset)
        if offset != error.high_watermark:
            self.ready[number] = None
        data = {"type": "reset", "partition": number, "requested_offset": error.offset}
        return self.notice("reset", {**data, "offset": offset})

    def events_of(self, ready: _Page) -> Iterable[bytes]:
        """Return the events or lines of a page, in pieces."""
        body = ready.page.body
        if not self.is_sse:
            return [body]
        return events.with_vectors(body, self.vector, ready.partition)

    def notice(self, kind: str, data: dict[str, object]) -> bytes:
        return events.notice(self.view.format_name, kind, data, self.event_id())

    def event_id(self) -> bytes:
        return b",".join(self.vector)

    def beginning(self) -> bytes:
        """Return the beginning of the stream.

        For SSE, it is an event with an id and without data; for NDJSON, the first line.
        """
        if self.is_sse:
            return events.beginning_with(self.event_id())
        return self.notice("", {"type": "position", "event_id": self.event_id().decode()})


class _Writes:
    """The pieces of a stream, joined into writes of at least PIECE_BYTES.

    A write is smaller if a piece that is larger or the end of a turn follows.
    """

    def __init__(self, call: HttpRequest) -> None:
        self._call = call
        self._pieces: list[bytes] = []
        self._size = 0

    async def add(self, piece: bytes) -> None:
        if self._size + len(piece) > events.PIECE_BYTES:
            await self.flush()
        self._pieces.append(piece)
        self._size += len(piece)

    async def flush(self) -> None:
        await self._call.chunk(b"".join(self._pieces))
        self._pieces, self._size = [], 0


class TopicFollower:
    """The route of followers of a topic. One per broker."""

    def __init__(self, broker: Broker, fetcher: Fetch) -> None:
        self._broker = broker
        self._fetch = fetcher

    async def follow(self, call: HttpRequest, name: str) -> None:
        """Send records until the client disconnects.

        If the first turn raises an error, the response has the error's status. A later error is
        sent as an event.
        """
        rights_of(call.scope).charge(CONSUMER_BYTE_RATE)
        query = call.query()
        format_name = _format(call.headers.get(b"accept", b""), query)
        embedded = embedded_format(query, format_name)
        bounds = self._fetch.bounds_of(query)
        view = FetchParams(name, 0, format_name, embedded, bounds, on_error_of(query) or "stop")
        reset = reset_of(query)
        await self._broker.refresh()  # to see all records acknowledged before this call (I3)
        topic = self._broker.state.topic(name)
        _check_count(topic)
        offsets = _offsets(call, query, topic, reset)
        principal = rights_of(call.scope).principal
        with (
            self._fetch.followers.follower(principal, len(offsets)) as follower,
            self._fetch.answer_share(principal) as share,
        ):
            changes = self._broker.records.changes_of(name)
            position = _Position(view, reset, topic, offsets, follower, changes)
            await self._stream(call, position, share)

    async def _stream(self, call: HttpRequest, position: _Position, share: Share) -> None:
        beginning = position.beginning()
        rights = rights_of(call.scope)
        turn = _Turn()
        if call.scope["method"] == "HEAD":
            self._check_ranges(position)
        else:
            turn = await self._turn(position, share, rights, 0.0, call)
        first = turn.pages[0].page if turn.pages else None
        if (
            first is not None
            and first.stopped is not None
            and not first.records
            and not position.is_sse
        ):
            raise first.stopped  # not for SSE: an EventSource closes at any status but 200
        await call.start_stream(MEDIA_TYPES[position.view.format_name])
        await self._fetch.send_stream(
            call,
            position.view.topic,
            share,
            beginning,
            turn,
            read=lambda: self._turn(position, share, rights, KEEPALIVE_S),
            send=lambda turn: self._send(call, position, turn or _Turn()),
            failure=lambda error: self._failure(call, position, error),
        )

    def _check_ranges(self, position: _Position) -> None:
        """Raise OffsetOutOfRange if an offset is out of range and is not to be reset."""
        topic = self._broker.state.topic(position.view.topic)
        position.update(topic)
        for number in position.ready if position.reset_to == "none" else ():
            partition = topic.partitions[number]
            partition.check_range(topic.name, number, position.offsets[number])

    async def _turn(
        self,
        position: _Position,
        share: Share,
        rights: CallerRights,
        wait_s: float,
        call: HttpRequest | None = None,
    ) -> _Turn:
        """Wait for records, and read pages of the next partitions that have any.

        A waiting follower holds no memory.
        """
        if position.ready:
            await self._broker.records.turn()
            wait_s = 0.0
        name = position.view.topic
        position.update(
            await self._broker.records.wait_for_changes(
                name, position.changes, position.count, wait_s
            )
        )
        resets, pages, size = b"", list[_Page](), 0
        for _ in range(min(len(position.ready), PAGES_AT_ONCE)):
            if pages and not self._has_room(position, share, size):
                break
            number = position.take()
            view = position.view._replace(partition=number)
            try:
                fetched, page = await self._fetch.page(
                    view, position.offsets[number], share, rights, call=call
                )
                self._fetch.charge(share, size := size + len(page.body))
            except LogError as error:
                if pages:  # they are sent before the next turn meets the error again
                    position.put_back(number)
                    break
                if not isinstance(error, OffsetOutOfRange):
                    raise
                resets += position.reset(number, error)
                continue
            pages.append(_Page(number, fetched.next_offset, page, fetched.weight))
            if fetched.next_offset < fetched.high_watermark:
                position.ready[number] = None
            if page.stopped is not None:
                break
        return _Turn(resets, pages)

    def _has_room(self, position: _Position, share: Share, size: int) -> bool:
        """Whether a turn with `size` bytes may have a page more."""
        return size < events.PIECE_BYTES and share.set(size + position.view.bounds.bytes_max)

    async def _send(self, call: HttpRequest, position: _Position, turn: _Turn) -> None:
        """Send the result of a turn, or a keep-alive if the result is empty.

        If the last page stops at a record that does not decode, send the records before it, then
        raise Undecodable.
        """
        if not turn.resets and not turn.pages:
            await call.chunk(events.KEEPALIVE[position.view.format_name])
            return
        writes, size = _Writes(call), 0
        await writes.add(turn.resets)
        for ready in turn.pages:
            for piece in position.events_of(ready):
                size += len(piece)
                await writes.add(piece)
            position.move(ready.partition, ready.next_offset)
            if ready.page.skipped:
                await writes.add(_skipped(position, ready))
        await writes.flush()
        if turn.pages:
            weight = sum(ready.weight for ready in turn.pages)
            rights_of(call.scope).record(CONSUMER_BYTE_RATE, weight)
            self._fetch.count([ready.page for ready in turn.pages], size, position.view.topic)
            if (stopped := turn.pages[-1].page.stopped) is not None:
                raise stopped

    def _failure(self, call: HttpRequest, position: _Position, error: LogError) -> bytes:
        offsets = position.offsets
        if isinstance(error, Undecodable):  # an EventSource continues after the record
            offsets = [*offsets]
            offsets[error.where.partition] = error.offset + 1
        body = self._fetch.answer_of(call, error)
        return events.failure(position.view.format_name, error, body, events.vector(offsets))


def _skipped(position: _Position, ready: _Page) -> bytes:
    data = {"skipped": ready.page.skipped, "first_skipped_offset": ready.page.first_wrong}
    return position.notice("skipped", {"partition": ready.partition, **data})


def _check_count(topic: Topic) -> None:
    if len(topic.partitions) > PARTITIONS_MAX:
        raise InvalidRequest(
            f"topic {topic.name!r} has {len(topic.partitions)} partitions, and a topic with more "
            f"than {PARTITIONS_MAX} cannot be followed: follow single partitions, or use a "
            "consumer group"
        )


def _offsets(call: HttpRequest, query: dict[str, str], topic: Topic, reset: str) -> list[int]:
    """Return the offset at which each partition begins. Raises InvalidParameter."""
    event_id = call.headers.get(b"last-event-id", b"").decode("latin-1")
    if event_id or "last-event-id" in query:
        return _offsets_of_id(event_id or query["last-event-id"], topic, reset)
    text = query.get("offset", "earliest")
    if text == "earliest":
        return [partition.log_start_offset for partition in topic.partitions]
    if text == "latest":
        return [partition.high_watermark for partition in topic.partitions]
    raise InvalidParameter(
        f"parameter offset={text[:SHOWN_MAX]!r} of a topic must be earliest or latest; "
        "Last-Event-ID takes the offsets of its partitions"
    )


def _offsets_of_id(text: str, topic: Topic, reset: str) -> list[int]:
    offset_by_partition = events.parse_vector(text)
    if offset_by_partition is None:
        raise InvalidParameter(
            f"Last-Event-ID {text[:SHOWN_MAX]!r} is not the offset of the last record of each "
            "partition, as 0:12,1:-1,2:7"
        )
    count = len(topic.partitions)
    if (beyond := max(offset_by_partition)) >= count and reset == "none":
        raise InvalidParameter(
            f"Last-Event-ID names partition {beyond}, but topic {topic.name!r} has 0 to {count - 1}"
        )
    return [
        offset_by_partition.get(number, partition.log_start_offset)
        for number, partition in enumerate(topic.partitions)
    ]


def _format(accept: bytes, query: dict[str, str]) -> str:
    """Return `sse`, or `ndjson` if `follow=true`. Raises NotAcceptable, InvalidParameter."""
    for part in accept.split(b","):
        format_name = FORMATS.get(media_type(part))
        if format_name is None:
            continue
        if format_name == "ndjson" and query.get("follow") != "true":
            raise InvalidParameter(
                "the records of a topic are an endless stream: add follow=true, or send "
                "Accept: text/event-stream"
            )
        return format_name
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
        Permission(FETCH, "topic_name"),
        "follow_topic",
        V2,
        _DOC,
    ),
)
