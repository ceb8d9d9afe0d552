"""AsyncProducer: makes batches of records and sends them, without loss or duplicates.

The records of a partition keep the order of the calls of `send`. Each partition belongs to one
lane. A lane sends one request at a time and repeats it (same Idempotency-Key, same bytes) until a
broker acknowledges it, for up to `delivery_s`. Brokers keep a key for an hour, so this is safe on
any broker. The client computes Kafka's hash of a key to find the lane; the broker computes it again
to choose the partition. Records without a key go to one partition until a batch of it is sent, then
to the next one. If partitions are added to a topic, this client continues with the old number. So a
key stays in its lane, and the records of one key keep their order.

A request is atomic. If the broker rejects it (400, 413, 422), the lane sends each half of the batch
in a request of its own, and so on, until a request has one record. So only the rejected record
fails.

**On a crash** of the caller: records whose future is not done may be in the log or not.
"""

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from tidelog.service.client.connection import Connected, Connection, quoted
from tidelog.service.client.errors import (
    BadArgument,
    ClientError,
    Closed,
    NotFound,
    Refused,
)
from tidelog.service.client.records import (
    MEDIA_TYPES,
    RECORD_BYTES,
    Headers,
    JsonRecord,
    ProduceFormat,
    encoded,
    headers_of_write,
)
from tidelog.service.client.transactions import AsyncTransaction
from tidelog.storage.codec.key_partition import partition_of

log = logging.getLogger("tidelog.client")

HALVED = frozenset({400, 413, 422})
"""Statuses of refusals that may concern only one record of the batch."""


class Delivered(NamedTuple):
    """Where a record is. `offset` is None unless `acks` is all."""

    topic: str
    partition: int
    offset: int | None


class RecordOutcome(Protocol):
    """The future of a record's outcome: asyncio's or concurrent.futures'."""

    def done(self) -> bool: ...
    def set_result(self, result: Delivered) -> None: ...
    def set_exception(self, exception: BaseException) -> None: ...


class ProducerOptions(NamedTuple):
    """Options of a producer."""

    format: ProduceFormat = "binary"
    """binary: keys and values are bytes or str; json: anything that can be JSON."""
    media_type: str = ""
    """Media type of requests; empty: that of `format`."""
    acks: str = "all"
    linger_ms: float = 5.0
    """How long a batch waits for more records."""
    flush_ms: float | None = None
    """How long the broker may hold a batch to commit it with others; None: as the topic says."""
    batch_records: int = 10_000
    batch_bytes: int = 1024 * 1024
    buffer_bytes: int = 32 * 1024 * 1024
    """Bytes of all records that are not acknowledged. At this bound, `send` waits."""
    in_flight: int = 4
    """Maximum requests at a time for a topic; no two have the same partition."""
    delivery_s: float = 120.0
    """How long a request is repeated."""


class Item:
    """A record without an outcome yet. `number` counts the records for its topic, from 0."""

    __slots__ = ("added_s", "number", "outcome", "partition", "size", "tag", "text")

    def __init__(self, text: bytes, number: int, outcome: RecordOutcome | None, tag: Any) -> None:
        self.text = text
        self.number = number
        self.outcome = outcome
        self.tag = tag
        self.size = len(text) + RECORD_BYTES
        self.partition: int | None = None
        self.added_s = 0.0


class _PlaceAnswer(msgspec.Struct):
    partition: int | None = None
    offset: int | None = None
    error_code: int | None = None
    error: str | None = None


class _Placed(msgspec.Struct):
    offsets: list[_PlaceAnswer]


_decode_placed = msgspec.json.Decoder(_Placed).decode


async def send_batch(
    connection: Connection,
    topic: str,
    texts: Sequence[bytes],
    idempotency_key: str,
    options: ProducerOptions,
) -> list[Delivered]:
    """Send records, each a JSON object, in one request.

    Repeat it for up to `delivery_s`. Return their places in the order of the request. Raises
    ClientError; then no record is in the log, unless the error `is_unknown`.
    """
    answer = await connection.call(
        "POST",
        f"/topics/{quoted(topic)}",
        params={"acks": options.acks},
        headers=headers_of_write(
            options.media_type or MEDIA_TYPES[options.format], idempotency_key, options.flush_ms
        ),
        content=b'{"records":[%b]}' % b",".join(texts),
        retry_s=options.delivery_s,
    )
    try:
        places = _decode_placed(answer.content).offsets
    except msgspec.MsgspecError:
        raise connection.is_no_broker() from None
    if len(places) != len(texts):
        raise connection.is_no_broker()
    for index, place in enumerate(places):
        if place.error_code is not None or place.partition is None:
            raise Refused(
                f"the broker rejected record {index} of a request for topic {topic!r}: "
                f"{place.error}",
                code=place.error_code or 0,
            )
    return [Delivered(topic, place.partition or 0, place.offset) for place in places]


class _Lane:
    """Records of some partitions of a topic, in order, and the task that sends them."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.size = 0
        self.wake = asyncio.Event()

    def take(self, records_max: int, bytes_max: int) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self.items and len(batch) < records_max:
            size += len(self.items[0].text) + 1
            if batch and size > bytes_max:
                break
            batch.append(self.items.popleft())
        self.size -= sum(item.size for item in batch)
        return batch


class _ProducerTopic:
    """A topic with its lanes; `waiting` has records until its partitions are known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.partitions = 0
        self.lanes: list[_Lane] = []
        self.waiting: list[tuple[Item, JsonRecord]] = []
        self.unkeyed = 0
        """Partition of the next records without a key, until a batch of it is sent."""


class AsyncProducer(Connected):
    """A producer of one process. Belongs to one event loop.

    async with AsyncProducer("http://127.0.0.1:8082") as producer:
        delivered = await producer.send("flights", b"value", key=b"N14228")
        print((await delivered).offset)
    """

    def __init__(
        self,
        servers: str | Connection,
        *,
        key: str | None = None,
        ca_file: str | None = None,
        options: ProducerOptions | None = None,
        on_delivered: Callable[[Sequence[Item], Sequence[Delivered]], None] | None = None,
        **bounds: Any,
    ) -> None:
        """`bounds` are fields of ProducerOptions.

        `on_delivered` is called with each acknowledged batch. A Connection as `servers` stays open
        at the end. Raises BadArgument.
        """
        try:
            self.options = (options or ProducerOptions())._replace(**bounds)
        except ValueError as error:
            raise BadArgument(f"the producer has no such option: {error}") from None
        super().__init__(servers, key=key, ca_file=ca_file)
        self._on_delivered = on_delivered
        self._run_id = os.urandom(16).hex()
        self._requests = 0
        self._topics: dict[str, _ProducerTopic] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffered = 0
        self._flushes = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._reported: set[tuple[str, type[ClientError], int]] = set()
        """Topics, and the kinds of errors of their records that are logged."""

    async def __aenter__(self) -> "AsyncProducer":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error of the caller, records that are not sent yet are given up.
        await self.close(flush_s=math.inf if kind is None else 0.0)

    # -- sending

    async def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> "asyncio.Future[Delivered]":
        """Add a record; wait only while the buffer is full.

        The future has its place, or the ClientError that names topic, partition and record. The
        first error of a kind for each topic is also logged, for callers that do not await the
        future. Raises BadArgument or Closed.
        """
        record = encoded(self.options.format, value, key, headers, partition, timestamp_ms)
        outcome: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(partial(self.report, topic))
        await self.put(topic, record, outcome)
        return outcome

    def report(self, topic: str, outcome: "asyncio.Future[Delivered] | Future[Delivered]") -> None:
        """Log the error of a record, if it is the first of its kind for the topic.

        This also retrieves the exception, because asyncio logs each one that no caller retrieves.
        """
        if outcome.cancelled() or not isinstance(error := outcome.exception(), ClientError):
            return
        kind = topic, type(error), getattr(error, "code", 0)
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s; later errors of this kind are only in the futures of `send`", error)

    async def put(
        self, topic: str, record: JsonRecord, outcome: RecordOutcome | None = None, tag: Any = None
    ) -> None:
        """Add an encoded record; wait while the buffer is full. `on_delivered` gets `tag`."""
        while not self.try_put(topic, record, outcome, tag):
            self._changed.clear()
            await self._changed.wait()

    def try_put(
        self, topic: str, record: JsonRecord, outcome: RecordOutcome | None = None, tag: Any = None
    ) -> bool:
        """Add an encoded record if the buffer has room. Raises Closed."""
        if self._is_closed:
            raise Closed("the producer is closed")
        size = len(record.members) + RECORD_BYTES
        if self._buffered and self._buffered + size > self.options.buffer_bytes:
            return False
        topic_state = self._topics.get(topic)
        if topic_state is None:
            topic_state = self._topics[topic] = _ProducerTopic(topic)
            self._start(self._open(topic_state))
        item = Item(record.members, topic_state.count, outcome, tag)
        topic_state.count += 1
        self._buffered += size
        if topic_state.lanes:
            self._place(topic_state, item, record)
        else:
            topic_state.waiting.append((item, record))
        return True

    async def flush(self) -> None:
        """Send all records at once; wait until each has its outcome."""
        self._flushes += 1
        try:
            while self._buffered:
                for topic in self._topics.values():
                    for lane in topic.lanes:
                        lane.wake.set()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._flushes -= 1

    async def close(self, flush_s: float = math.inf) -> None:
        """Flush for up to `flush_s`, then end. Records without an outcome get the error Closed."""
        try:
            if flush_s > 0 and not self._is_closed:
                async with asyncio.timeout(None if math.isinf(flush_s) else flush_s):
                    await self.flush()
        except TimeoutError:
            pass  # the records that are left get their error below
        finally:
            self._is_closed = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            error = Closed("the producer was closed before the record was acknowledged")
            for topic in self._topics.values():
                remaining_items = [item for lane in topic.lanes for item in lane.items]
                remaining_items += [item for item, _ in topic.waiting]
                for lane in topic.lanes:
                    lane.items.clear()
                topic.waiting.clear()
                self._fail(topic, remaining_items, error)
            self._changed.set()
            await self._disconnect()

    def transaction(self, idempotency_key: str | None = None) -> AsyncTransaction:
        """Return a transaction: records and offsets of groups that are committed together."""
        return AsyncTransaction(
            self.connection,
            self.options.format,
            idempotency_key,
            self.options.delivery_s,
            self.options.flush_ms,
        )

    # -- lanes

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work, name="tidelog-client-producer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, topic: _ProducerTopic) -> None:
        """Find the number of partitions, then start the lanes."""
        try:
            topic.partitions = await self.connection.partitions(
                topic.name, retry_s=self.options.delivery_s
            )
        except NotFound:
            topic.partitions = 1  # the produce request creates the topic, or names the error
        except ClientError as error:
            error.is_unknown = False  # no record was sent
            self._topics.pop(topic.name)
            self._fail(topic, [item for item, _ in topic.waiting], error)
            topic.waiting.clear()
            return
        self.connection.learn_soon()
        topic.lanes = [_Lane() for _ in range(min(self.options.in_flight, topic.partitions))]
        for item, record in topic.waiting:
            self._place(topic, item, record)
        topic.waiting.clear()
        for lane in topic.lanes:
            self._start(self._send_all(topic, lane))

    def _place(self, topic: _ProducerTopic, item: Item, record: JsonRecord) -> None:
        partition = record.partition
        if partition is not None:
            item.text = b'{"partition":%d,%b}' % (partition, record.members)
        elif record.key is not None:
            partition = partition_of(record.key, topic.partitions)
            item.text = b"{%b}" % record.members
        else:
            partition = topic.unkeyed % topic.partitions
            item.text = b'{"partition":%d,%b}' % (partition, record.members)
        item.partition = partition
        item.added_s = asyncio.get_running_loop().time()
        lane = topic.lanes[partition % len(topic.lanes)]
        lane.items.append(item)
        lane.size += item.size
        if len(lane.items) == 1:
            lane.wake.set()
        elif self._is_full(lane):
            lane.wake.set()
            if record.key is None and record.partition is None:
                topic.unkeyed = (topic.unkeyed + 1) % topic.partitions

    def _is_full(self, lane: _Lane) -> bool:
        options = self.options
        return len(lane.items) >= options.batch_records or lane.size >= options.batch_bytes

    async def _send_all(self, topic: _ProducerTopic, lane: _Lane) -> None:
        while True:
            await self._batch_is_due(lane)
            batch = lane.take(self.options.batch_records, self.options.batch_bytes)
            if batch[-1].partition == topic.unkeyed:
                topic.unkeyed = (topic.unkeyed + 1) % topic.partitions
            try:
                await self._deliver(topic, batch)
            except asyncio.CancelledError:
                closed = Closed("the producer was closed")
                closed.is_unknown = True
                self._fail(topic, batch, closed)
                raise

    async def _batch_is_due(self, lane: _Lane) -> None:
        """Wait until the lane has a full batch, or its first record has waited for `linger_ms`."""
        loop = asyncio.get_running_loop()
        while not lane.items:
            lane.wake.clear()
            await lane.wake.wait()
        due_s = lane.items[0].added_s + self.options.linger_ms / 1000
        while not self._flushes and not self._is_full(lane) and loop.time() < due_s:
            lane.wake.clear()
            try:
                async with asyncio.timeout_at(due_s):
                    await lane.wake.wait()
            except TimeoutError:
                return

    async def _deliver(self, topic: _ProducerTopic, batch: list[Item]) -> None:
        """Send a batch until each record has its outcome."""
        self._requests += 1
        name = f"{self._run_id}-{self._requests}"
        texts = [item.text for item in batch]
        try:
            placed = await send_batch(self.connection, topic.name, texts, name, self.options)
        except Refused as error:
            if error.status in HALVED and len(batch) > 1 and not error.is_unknown:
                middle = len(batch) // 2
                await self._deliver(topic, batch[:middle])
                await self._deliver(topic, batch[middle:])
                return
            self._fail(topic, batch, error)
        except ClientError as error:
            self._fail(topic, batch, error)
        else:
            self.connection.learn_soon()
            for item, place in zip(batch, placed, strict=True):
                if item.outcome is not None and not item.outcome.done():
                    item.outcome.set_result(place)
            if self._on_delivered is not None:
                self._on_delivered(batch, placed)
            self._release(batch)

    def _fail(self, topic: _ProducerTopic, batch: Sequence[Item], error: ClientError) -> None:
        for item in batch:
            if item.outcome is not None and not item.outcome.done():
                item.outcome.set_exception(_named(topic.name, item, error))
        self._release(batch)

    def _release(self, batch: Sequence[Item]) -> None:
        self._buffered -= sum(item.size for item in batch)
        self._changed.set()


def _named(topic: str, item: Item, error: ClientError) -> ClientError:
    """Return the error with topic, partition and number of its record. Its cause is `error`."""
    named = _with_message(topic, item, error)
    named.__cause__ = error
    return named


def _with_message(topic: str, item: Item, error: ClientError) -> ClientError:
    partition_text = "" if item.partition is None else f", partition {item.partition}"
    message = (
        f"topic {topic!r}{partition_text}, record {item.number} of this producer: {error.message}"
    )
    if error.is_unknown:
        message += " (it is unknown whether the record is in the log)"
    of_kind = {"status": error.status, "code": error.code} if isinstance(error, Refused) else {}
    named = type(error)(message, error.advice, **of_kind)
    named.is_unknown = error.is_unknown
    return named
