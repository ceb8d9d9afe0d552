"""Fetch: records of the tail and of the table, in the format that the client accepts.

A broker keeps no state between two fetches: the client sends the offset, and the response's headers
have the next offset. A fetch at the end of a partition may wait for records (long poll). A follower
keeps the connection and gets records when they are committed, as server-sent events or as lines.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from tidelog.service.codec_threads import UnpackThreads
from tidelog.service.formats import events
from tidelog.service.formats.encoded_size_bounds import FittedPage, fitted
from tidelog.service.formats.fetched import FetchPage, FetchParams, encode, limits, positions
from tidelog.service.formats.json_in import TIMESTAMP_MS_MAX
from tidelog.service.formats.json_text import Undecodable
from tidelog.service.formats.read_parameters import (
    FORMAT_PARAMETER,
    MAX_BYTES_PARAMETER,
    MAX_RECORDS_PARAMETER,
    MEDIA_TYPES,
    ON_ERROR_HEADERS,
    ON_ERROR_PARAMETER,
    RESET_PARAMETER,
    embedded_format,
    format_of_accept,
    on_error_of,
    records_answer,
    reset_of,
)
from tidelog.service.formats.record_pages import RecordPage, headers_of
from tidelog.service.formats.shared_pages import PageKey, ReadKey, SharedPages
from tidelog.service.http.content_coding import pack, packed_bound
from tidelog.service.http.errors import answered, error_body
from tidelog.service.http.parameters import InvalidParameter, integer, partition_number
from tidelog.service.http.request import HttpRequest, HttpResponse, Pack, until_gone
from tidelog.service.http.route import V2, Parameter, Permission, Route, RouteDoc
from tidelog.service.memory_pool import MemoryPool, Share
from tidelog.service.operations.rights import FETCH
from tidelog.service.routes.follower_bounds import Followers
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.service.security.request_cpu_time import measured
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core.errors import (
    LogError,
    OffsetOutOfRange,
    Unavailable,
    UnknownPartition,
)
from tidelog.storage.core.model import OFFSET_MAX, ReadBounds
from tidelog.storage.read.backwards import fetch_before
from tidelog.storage.records import FetchResult
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.state.access import CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE

T = TypeVar("T")

KEEPALIVE_S = 15.0
ENCODE_INLINE_BYTES = 1024 * 1024
"""Records of at most this weight are encoded on the event loop, which takes ~2 ms, and 30 ms at
most. A thread for heavier records costs ~100 us."""
ROOM_S = 0.05
"""If there is no memory for a page, the broker tries again after this time."""
ROOM_WAIT_S = 1.0
"""How long a fetch waits for memory before it is refused. Large pages hold theirs for less."""
BACKWARDS_PART = 8
"""A fetch backwards reads at most this part of `fetch_bytes_max`, whose answer is within it."""


class Fetch:
    """The fetch route. One per broker."""

    def __init__(
        self,
        broker: Broker,
        settings: RequestSettings,
        counters: HttpCounters,
        answers: MemoryPool,
        threads: UnpackThreads,
    ) -> None:
        self._broker = broker
        self._settings = settings
        self.counters = counters
        self._answers = answers
        self._threads = threads
        self._pages = SharedPages()
        self._encoding: dict[tuple[str, PageKey], asyncio.Task[FetchPage]] = {}
        """By principal: the slices of a busy principal would delay the readers of others."""
        self.followers = Followers()

    async def fetch(
        self, call: HttpRequest, topic: str, partition_text: str
    ) -> HttpResponse | None:
        """Answer a fetch. The answer holds a share of the memory until the socket has taken it."""
        rights = rights_of(call.scope)
        rights.charge(CONSUMER_BYTE_RATE)
        format_name = format_of_accept(call.headers.get(b"accept", b""))
        query = call.query()
        embedded = embedded_format(query, format_name)
        number = await self._partition(topic, partition_text)
        bounds = self.bounds_of(query)
        on_error = on_error_of(query) or "stop"
        view = FetchParams(topic, number, format_name, embedded, bounds, on_error)
        if call.scope["method"] == "HEAD":
            await self._head(call, view, query)
            return None
        if "before" in query:
            await self._fetch_before(call, view, query)
            return None
        wait_ms = integer("timeout", query.get("timeout", "0"), 0, OFFSET_MAX)
        wait_ms = min(wait_ms, self._settings.fetch_wait_ms_max)
        offset = await self._offset(call, topic, number, query)
        if format_name == "sse" or (format_name == "ndjson" and query.get("follow") == "true"):
            await self._follow(call, view, offset, reset_of(query))
            return None
        with self.answer_share(rights.principal) as share:
            page = await self.page(view, offset, share, rights, wait_ms / 1000, call)
            sending = await self._answer(call, view, page, share)
            del page  # `sending` has it, until it is packed
            await sending
        return None

    async def _head(self, call: HttpRequest, view: FetchParams, query: dict[str, str]) -> None:
        """Answer with the headers of a fetch that are known without its records."""
        topic_partition = view.topic, view.partition
        offset = await self._offset(call, *topic_partition, query)
        offsets = await self._broker.records.offsets(*topic_partition)
        if "before" not in query and reset_of(query) == "none":
            offsets.check_range(*topic_partition, offset)
        headers = limits(offsets.log_start_offset, offsets.high_watermark)
        await call.start_stream(MEDIA_TYPES[view.format_name], headers)
        await call.end()

    async def _fetch_before(
        self, call: HttpRequest, view: FetchParams, query: dict[str, str]
    ) -> None:
        """Answer a fetch of the newest records before an offset."""
        for name in ("offset", "timestamp", "timeout", "follow", "last-event-id"):
            if name in query:
                raise InvalidParameter(f"give before or {name}, not both")
        if view.format_name == "sse":
            raise InvalidParameter("a stream of events begins at an offset: give no before")
        text = query["before"]
        end = OFFSET_MAX if text == "latest" else integer("before", text, 0, OFFSET_MAX)
        offsets = await self._broker.records.offsets(view.topic, view.partition)
        start, high_watermark = offsets.log_start_offset, offsets.high_watermark
        if end < start:
            offsets.check_range(view.topic, view.partition, end)
        rights = rights_of(call.scope)
        part = max(self._settings.fetch_bytes_max // BACKWARDS_PART, 1)
        bounds = view.bounds._replace(bytes_max=min(view.bounds.bytes_max, part))
        with self.answer_share(rights.principal) as share:
            await self.reserve(share, bounds.bytes_max)
            fetch = partial(self._broker.records.fetch, view.topic, view.partition)
            end = min(end, high_watermark)
            result, first = await fetch_before(fetch, start, end, high_watermark, bounds)
            large = FittedPage(result, 0)
            if result.weight > ENCODE_INLINE_BYTES:
                large = fitted(result, view.topic, view.format_name, view.embedded)
                await self.reserve(share, large.size)
            page = await self._encoded(view, large, share, rights)
            self.charge(share, len(page.page.body))
            sending = await self._answer(call, view, page, share, first)
            del page, result, large
            await sending

    async def _answer(
        self,
        call: HttpRequest,
        view: FetchParams,
        fetch_page: FetchPage,
        share: Share,
        first: int | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine that sends the answer, packed if the client wants it."""
        rights, (fetched, page) = rights_of(call.scope), fetch_page
        await rights.check(FETCH, view.topic)  # access may have changed during a wait
        if page.stopped is not None and not page.records:
            raise page.stopped
        rights.record(CONSUMER_BYTE_RATE, fetched.weight)
        self.count([page], len(page.body), page.topic)
        headers = positions(fetched, first)
        if page.wrong:
            headers += headers_of([page])
        answer = HttpResponse(200, page.body, MEDIA_TYPES[view.format_name], headers)
        return call.answer(answer, self.packing(share, rights))

    def bounds_of(self, query: dict[str, str]) -> ReadBounds:
        """Return the parameters `max_bytes` and `max_records`, within their bounds.

        Raises InvalidParameter.
        """
        bytes_max, records_max = self._settings.fetch_bytes, RECORDS_MAX
        if "max_bytes" in query:
            bytes_max = integer("max_bytes", query["max_bytes"], 1, OFFSET_MAX)
            bytes_max = min(bytes_max, self._settings.fetch_bytes_max)
        if "max_records" in query:
            records_max = integer("max_records", query["max_records"], 1, OFFSET_MAX)
            records_max = min(records_max, RECORDS_MAX)
        return ReadBounds(bytes_max, records_max)

    async def page(
        self,
        view: FetchParams,
        offset: int,
        share: Share,
        rights: CallerRights,
        wait_s: float = 0.0,
        call: HttpRequest | None = None,
    ) -> FetchPage:
        """Return the encoded records from `offset` on.

        If there is no record, wait up to `wait_s` for one. That wait holds no memory, so idle
        clients do not block others.

        If there is no memory and no `call`, wait for room. With a `call`, whose
        response has not begun, raise Unavailable after ROOM_WAIT_S.
        """
        partition = self._broker.state.partition(view.topic, view.partition)
        if wait_s > 0 and offset >= partition.high_watermark:
            started_s = self._broker.clock.boot_s()
            waited = await self._broker.records.fetch(
                view.topic, view.partition, offset, bytes_max=0, wait_s=wait_s
            )
            if call is not None:
                call.waited_s = self._broker.clock.boot_s() - started_s
            if offset == waited.high_watermark:
                return encode(view, waited)
        # Long polls and followers often need the same records at the same time.
        is_shared = wait_s > 0 or call is None or view.format_name == "sse"
        losses = self._broker.records.losses
        if is_shared and (recent := await self._recent(view, offset)) is not None:
            await self.reserve(share, len(recent.page.body), is_refused=call is not None)
            return recent
        needed = view.bounds.bytes_max
        while True:
            fit = await self._read(view, offset, share, needed, is_refused=call is not None)
            if is_shared:
                page = await self._shared(view, offset, fit, share, rights, losses)
            else:
                page = await self._encoded(view, fit, share, rights)
            if share.set(size := len(page.page.body)):
                return page
            # Hold nothing during the wait: readers that hold a part would wait for each other.
            needed = size
            del fit, page
            share.set(0)

    async def _read(
        self, view: FetchParams, offset: int, share: Share, needed: int, *, is_refused: bool
    ) -> FittedPage:
        """Read the records of a page when there is room for `needed` bytes.

        If they are many, the share then holds the bytes that they may have in the answer, which are
        at most `page_bytes_max`, or those of one record.
        """
        bytes_max, records_max = view.bounds.bytes_max, view.bounds.records_max
        while True:
            await self.reserve(share, needed, is_refused=is_refused)
            fetched = await self._broker.records.fetch(
                view.topic, view.partition, offset, bytes_max=bytes_max, records_max=records_max
            )
            if fetched.weight <= ENCODE_INLINE_BYTES:
                return FittedPage(fetched, 0)
            fit = fitted(fetched, view.topic, view.format_name, view.embedded, self.page_bytes_max)
            if share.set(fit.size):
                return fit
            needed = max(bytes_max, fit.size)
            del fetched, fit
            share.set(0)  # during the wait, as in `page`

    @property
    def page_bytes_max(self) -> int:
        """Bound of the encoded bytes of a page, unless its first record alone has more."""
        return self._settings.fetch_bytes_max

    async def encoded(
        self, share: Share, rights: CallerRights, size: int, encode: Callable[[], T]
    ) -> T:
        """Encode many records, in a thread.

        `size` bounds their encoded bytes, which the share has, too.
        """
        return await self._threads.run(rights, size, encode, share)

    async def _encoded(
        self, view: FetchParams, fit: FittedPage, share: Share, rights: CallerRights
    ) -> FetchPage:
        if fit.fetched.weight <= ENCODE_INLINE_BYTES:
            return encode(view, fit.fetched)
        return await self.encoded(share, rights, fit.size, partial(encode, view, fit.fetched))

    async def _recent(self, view: FetchParams, offset: int) -> FetchPage | None:
        """Return the page of another reader that has just read the same, if there is one."""
        await self._broker.ensure_view()
        topic = self._broker.state.topic(view.topic)
        partition = self._broker.state.partition(view.topic, view.partition)
        ends = partition.log_start_offset, partition.high_watermark
        losses = self._broker.records.losses
        return self._pages.of_read(ReadKey(topic.topic_id, view, offset, *ends, losses))

    async def _shared(
        self,
        view: FetchParams,
        offset: int,
        fit: FittedPage,
        share: Share,
        rights: CallerRights,
        losses: int,
    ) -> FetchPage:
        """Return the encoded records, if possible from a page of another reader."""
        topic, fetched = self._broker.state.topics.get(view.topic), fit.fetched
        if topic is None or not fetched.pieces:
            return encode(view, fetched)
        key = PageKey(
            *(topic.topic_id, view.partition, offset, fetched.next_offset, fetched.records),
            *(view.format_name, view.embedded, view.on_error),
        )
        page = self._pages.get(key)
        if page is None and fetched.weight <= ENCODE_INLINE_BYTES:
            page = encode(view, fetched).page
            self._pages.add(key, page)
        elif page is None:
            work = rights.principal, key
            if work not in self._encoding:
                encoding = self._encode_once(key, view, fit, share, rights)
                self._encoding[work] = asyncio.create_task(encoding)
                self._encoding[work].add_done_callback(retrieve_exception)
            # If a reader leaves, the others still wait for the page.
            page = (await asyncio.shield(self._encoding[work])).page
        fetched = fetched._replace(pieces=[], next_offset=page.end(fetched.next_offset))
        ends = fetched.log_start_offset, fetched.high_watermark
        read = ReadKey(topic.topic_id, view, offset, *ends, losses)
        self._pages.add_read(read, key, fetched)
        return FetchPage(fetched, page)

    async def _encode_once(
        self,
        key: PageKey,
        view: FetchParams,
        fit: FittedPage,
        share: Share,
        rights: CallerRights,
    ) -> FetchPage:
        try:
            page = await self._encoded(view, fit, share, rights)
            self._pages.add(key, page.page)
            return page
        finally:
            del self._encoding[rights.principal, key]

    def count(self, pages: Sequence[RecordPage], size: int, topic: str | None = None) -> None:
        """Count the records of an answer of `size` bytes.

        `topic` is None if the answer may have records of several topics.
        """
        self.counters.add_records_out(sum(page.records for page in pages), size, topic)
        for page in pages:
            if page.wrong and page.stopped is None:
                self.counters.undecodable[page.on_error] += page.wrong

    def packing(self, share: Share, rights: CallerRights) -> Pack:
        """Return the function that packs an answer, within the share and in the threads."""

        async def pack_body(body: bytes, coding: bytes) -> bytes:
            size = packed_bound(len(body))
            await self.reserve(share, len(body) + size)
            packed = await self._threads.run(rights, size, partial(pack, body, coding), share)
            self.charge(share, len(packed))  # the body is freed
            return packed

        return pack_body

    @contextlib.contextmanager
    def answer_share(self, principal: str) -> Iterator[Share]:
        """Hold memory for a response until it is sent (I10).

        At first this is no bytes, then those that `reserve` and `charge` set.
        """
        share = Share(self._answers, principal)
        try:
            yield share
        finally:
            share.end()

    async def reserve(self, share: Share, size: int, *, is_refused: bool = True) -> None:
        """Set the bytes that a response holds; if there is no room, wait for it.

        Raises Unavailable if the share has ended, and after ROOM_WAIT_S if the response
        `is_refused` then, because it has not begun.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + ROOM_WAIT_S
        while not share.set(size):
            if share.is_ended or (is_refused and loop.time() >= until_s):
                raise self._full()
            await asyncio.sleep(ROOM_S)

    def charge(self, share: Share, size: int) -> None:
        """Set the bytes that a response holds. Raises Unavailable."""
        if not share.set(size):
            raise self._full()

    def _full(self) -> Unavailable:
        return Unavailable(
            f"responses of {self._answers.used} bytes are in flight, the limit of all principals "
            f"is {self._answers.limit}: try again later"
        )

    async def _partition(self, topic: str, text: str) -> int:
        try:
            return partition_number(self._broker.state.topics[topic], text)
        except (KeyError, UnknownPartition):
            await self._broker.refresh()  # another broker may just have created it (I3)
            return partition_number(self._broker.state.topic(topic), text)

    async def _offset(
        self, call: HttpRequest, topic: str, number: int, query: dict[str, str]
    ) -> int:
        event_id = call.headers.get(b"last-event-id", b"").decode("latin-1")
        if event_id or "last-event-id" in query:
            event_id = event_id or query["last-event-id"]
            if event_id == events.START:
                return 0
            return integer("Last-Event-ID", event_id, 0, OFFSET_MAX - 1) + 1
        if "timestamp" in query:
            if "offset" in query:
                raise InvalidParameter("give offset or timestamp, not both")
            stamp = integer("timestamp", query["timestamp"], 0, TIMESTAMP_MS_MAX)
            offset = await self._broker.records.offset_for_timestamp(topic, number, stamp)
            if offset is not None:
                return offset
            return self._broker.state.partition(topic, number).high_watermark
        text = query.get("offset", "earliest")
        if text == "earliest":
            return self._broker.state.partition(topic, number).log_start_offset
        if text == "latest":
            return (await self._broker.records.offsets(topic, number)).high_watermark
        return integer("offset", text, 0, OFFSET_MAX)

    async def _follow(self, call: HttpRequest, view: FetchParams, offset: int, reset: str) -> None:
        # The first page is read before the response starts, so its errors have a status. An
        # EventSource closes at any status but 200, so for a record that does not decode it gets an
        # event.
        principal = rights_of(call.scope).principal
        with self.followers.follower(principal, 1), self.answer_share(principal) as share:
            await self._follow_on(call, view, offset, reset, share)

    async def _follow_on(
        self, call: HttpRequest, view: FetchParams, offset: int, reset: str, share: Share
    ) -> None:
        rights = rights_of(call.scope)
        (fetched, page), resets = await self._page_or_reset(
            view, offset, reset, share, rights, call=call
        )
        if page.stopped is not None and not page.records and view.format_name != "sse":
            raise page.stopped
        await call.start_stream(MEDIA_TYPES[view.format_name], positions(fetched))
        beginning = events.beginning(offset) if view.format_name == "sse" else b""
        offset = fetched.next_offset

        async def read() -> tuple[FetchPage, bytes]:
            nonlocal offset
            if self._broker.state.partition(view.topic, view.partition).high_watermark > offset:
                await self._broker.records.turn()
            turn = await self._page_or_reset(view, offset, reset, share, rights, KEEPALIVE_S)
            offset = turn[0].fetched.next_offset
            return turn

        async def send(turn: tuple[FetchPage, bytes] | None) -> None:
            if turn is None:
                await call.chunk(events.KEEPALIVE[view.format_name])
                return
            (fetched, page), resets = turn
            await call.chunk(resets)
            await self._send(call, view, fetched, page)

        first = FetchPage(fetched, page), resets
        await self.send_stream(
            call,
            view.topic,
            share,
            beginning,
            first,
            read,
            send,
            partial(self._failure, call, view),
        )

    async def send_stream(
        self,
        call: HttpRequest,
        topic: str,
        share: Share,
        beginning: bytes,
        turn: T | None,
        read: Callable[[], Coroutine[Any, Any, T]],
        send: Callable[[T | None], Awaitable[None]],
        failure: Callable[[LogError], bytes],
    ) -> None:
        """Continue a started stream until the client disconnects.

        `send` sends `turn`, then each result of `read`. While the principal's quota is used up,
        `send` gets None, for a keep-alive. After an error, the last event is `failure(error)`,
        because the status is sent already.
        """
        if call.scope["method"] == "HEAD":
            await call.end()
            return
        await call.chunk(beginning)
        started_s = self._broker.clock.boot_s()
        rights = rights_of(call.scope)
        disconnection = asyncio.create_task(until_gone(call.receive))
        reading: asyncio.Task[T] | None = None
        try:
            while not disconnection.done():
                self._broker.records.check_serving()
                await rights.check(FETCH, topic)  # access may have changed
                await send(turn)
                share.set(0)
                throttle_s = max(map(rights.throttle_s, (CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE)))
                if throttle_s > 0:
                    await asyncio.wait({disconnection}, timeout=min(throttle_s, KEEPALIVE_S))
                    turn = None
                    continue
                reading = asyncio.create_task(measured(rights, read()))
                await asyncio.wait({reading, disconnection}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    turn = reading.result()
        except LogError as error:
            await call.chunk(failure(error))
        finally:
            disconnection.cancel()
            if reading is not None:
                reading.cancel()
            call.waited_s = self._broker.clock.boot_s() - started_s
        await call.end()

    async def _page_or_reset(
        self,
        view: FetchParams,
        offset: int,
        reset: str,
        share: Share,
        rights: CallerRights,
        wait_s: float = 0.0,
        call: HttpRequest | None = None,
    ) -> tuple[FetchPage, bytes]:
        """Return a page, and the event `reset` if the offset was out of range.

        The event precedes the page.
        """
        try:
            return await self.page(view, offset, share, rights, wait_s, call), b""
        except OffsetOutOfRange as error:
            if reset == "none":
                raise
            offset, resets = events.reset(view.format_name, error, reset)
            return await self.page(view, offset, share, rights, call=call), resets

    async def _send(
        self, call: HttpRequest, view: FetchParams, fetched: FetchResult, page: RecordPage
    ) -> None:
        """Send a page of a stream, or a keep-alive if the page is empty.

        If the page stops at a record that does not decode, send the records before it, then raise
        Undecodable.
        """
        if page.body:
            await call.chunk(page.body)
            rights_of(call.scope).record(CONSUMER_BYTE_RATE, fetched.weight)
        elif not page.wrong:
            await call.chunk(events.KEEPALIVE[view.format_name])
        self.count([page], len(page.body), page.topic)
        if page.skipped:
            await call.chunk(events.skipped(view.format_name, fetched.next_offset, page))
        if page.stopped is not None:
            raise page.stopped

    def _failure(self, call: HttpRequest, view: FetchParams, error: LogError) -> bytes:
        event_id = b"%d" % error.offset if isinstance(error, Undecodable) else b""
        return events.failure(view.format_name, error, self.answer_of(call, error), event_id)

    def answer_of(self, call: HttpRequest, error: LogError) -> bytes:
        """Count the error of a stream. Return the body of its error response."""
        return error_body(answered(error, call.scope, self.counters).code, str(error))


_DOC = RouteDoc(
    {
        400: "40002: offset out of range (the message has the range), or an invalid parameter",
        404: "40401 unknown topic, 40402 unknown partition",
        406: "an unknown Accept",
        422: "the first record does not decode in the requested format",
        429: "the principal's quota is used up, or the principal follows too much",
        500: "a corrupt object; the message names it. Reads of other partitions work.",
        503: "the store does not answer, or too many fetches at once",
    },
    tag="records",
    summary="Fetch records",
    text="Returns records from an offset on, or before it, from the tail and the table. Needs no "
    "instance.",
    parameters=(
        Parameter(
            "offset",
            "an offset, `earliest` or `latest`",
            {"type": "string", "default": "earliest"},
        ),
        Parameter(
            "timestamp",
            "time in ms, in place of `offset`: begin at the first record of this time or later",
            {"type": "integer"},
        ),
        Parameter(
            "before",
            "an offset, or `latest` for the end of the partition, in place of `offset`: the newest "
            "records before it that `max_bytes` and `max_records` allow, in offset order",
            {"type": "string"},
        ),
        Parameter("timeout", "ms to wait at the partition end", {"type": "integer", "default": 0}),
        MAX_BYTES_PARAMETER,
        MAX_RECORDS_PARAMETER,
        Parameter(
            "follow",
            "with NDJSON: do not end the response, but send new records when they are committed",
            {"type": "boolean", "default": False},
        ),
        RESET_PARAMETER,
        FORMAT_PARAMETER,
        ON_ERROR_PARAMETER,
    ),
    answers={
        200: records_answer(
            "Records in offset order. Headers: `Tidelog-Next-Offset`, `Tidelog-High-Watermark` and "
            "`Tidelog-Log-Start-Offset`. With `before`, also `Tidelog-First-Offset`: the `before` "
            "of the page of older records. If it equals the log start offset, there are none. "
            f"{ON_ERROR_HEADERS}"
        )
    },
)

ROUTES = (
    Route(
        "GET",
        "/topics/{topic_name}/partitions/{partition_id}/records",
        Fetch.fetch,
        Permission(FETCH, "topic_name"),
        "fetch",
        V2,
        _DOC,
    ),
)
