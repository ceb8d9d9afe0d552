"""AsyncConsumer: which records are delivered, how they decode, and which offsets are committed.

A record is *delivered* when `poll` or the iterator has returned it. A delivered record is *done*
when the caller calls `poll` or `commit`, or asks the iterator for the next record. With
auto_commit, the next read commits the offsets of done records. So if the caller's work on a record
ends with an exception, the record is read again: at least once.

A record that does not decode does not stop the others. `on_error` is one of:
- stop: all records before it and those of other partitions are delivered. Then `poll` raises
  UndecodableRecord once. If the caller polls again, the other partitions continue, and this one
  does not.
- skip: it counts as delivered; `skipped` and `first_skipped` count and name such records.
- a function: it gets the Record as bytes and the error. When it returns, the record counts as
  delivered. `DeadLetters` is such a function: it sends the record to another topic.
"""

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from tidelog.service.client.connection import Connected, Connection
from tidelog.service.client.errors import (
    BadArgument,
    ClientError,
    Closed,
    UndecodableRecord,
)
from tidelog.service.client.group_reader import LEAVE_S, GroupReader
from tidelog.service.client.partition_reader import PartitionReader
from tidelog.service.client.producer import AsyncProducer
from tidelog.service.client.records import (
    BINARY,
    ON_ERROR,
    Header,
    PartitionPage,
    ReadFormat,
    Record,
)
from tidelog.storage.core.model import TopicPartition

Decode: TypeAlias = Callable[[bytes], Any]
OnUndecodable: TypeAlias = Callable[[Record, UndecodableRecord], Awaitable[None] | None]
OnError: TypeAlias = Literal["stop", "skip"] | OnUndecodable
Offsets: TypeAlias = dict[TopicPartition, int]
POLL_S = 20.0
"""Timeout of one read while the iterator waits for records."""
READ_MS_MAX = 30_000
"""The longest time for which a broker holds a read (`Settings.fetch_wait_ms_max`)."""


class ConsumerOptions(NamedTuple):
    """Options of a consumer."""

    auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest"
    """Where reading begins in a partition without a committed offset. none, only without a group:
    an offset out of range is an error."""
    auto_commit: bool = True
    decode_value: Decode | None = None
    decode_key: Decode | None = None
    """Functions from bytes to any value. They are not called for null."""
    on_error: OnError = "stop"
    session_timeout_ms: int = 30_000
    """A member that has crashed keeps its partitions for this time."""
    fetch_bytes: int = 1024 * 1024
    retry_s: float = 120.0
    """How long `poll` tries to reach a broker, before it raises NotReachable."""
    client_id: str = "tidelog-client"
    read_format: ReadFormat = BINARY


class DeadLetters:
    """An `on_error` that sends records to a topic, with headers that name source and error.

    It waits for the acknowledgment, so the record is in that topic before its offset is committed.
    """

    def __init__(self, producer: AsyncProducer, topic: str) -> None:
        self._producer = producer
        self.topic = topic
        self.sent = 0

    async def __call__(self, record: Record, error: UndecodableRecord) -> None:
        headers = [
            *record.headers,
            Header("tidelog.source", f"{record.topic}-{record.partition}@{record.offset}".encode()),
            Header("tidelog.error", error.why.encode()),
        ]
        sent = await self._producer.send(
            self.topic,
            record.value,
            record.key,
            headers=[(header.key, header.value) for header in headers],
            timestamp_ms=record.timestamp_ms,
        )
        await sent
        self.sent += 1


class AsyncConsumer(Connected):
    """A consumer of one process. Belongs to one event loop.

    async with AsyncConsumer("http://127.0.0.1:8082", "flights", group="enrich") as consumer:
        async for record in consumer:
            print(record.offset, record.value)
    """

    def __init__(
        self,
        servers: str | Connection,
        topics: str | Iterable[str],
        group: str | None = None,
        *,
        key: str | None = None,
        ca_file: str | None = None,
        positions: Mapping[tuple[str, int], int] | None = None,
        **choices: Any,
    ) -> None:
        """With a `group`, this consumer is a member of it and commits offsets.

        Without one, it commits nothing, and reads all partitions of `topics`, or only those in
        `positions`, from these offsets on. `choices` are fields of ConsumerOptions. A Connection as
        `servers` stays open at the end; its `retry_s` is used. Raises BadArgument.
        """
        try:
            chosen = ConsumerOptions()._replace(**choices)
        except ValueError as error:
            raise BadArgument(f"the consumer has no such option: {error}") from None
        on_error = chosen.on_error
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        if not self._topics and not positions:
            raise BadArgument("a consumer needs a topic")
        if group is not None and positions:
            raise BadArgument("positions and group exclude each other: seek after the first poll")
        if isinstance(on_error, str) and on_error not in {"stop", "skip"}:
            raise BadArgument(f"on_error {on_error!r} is neither stop nor skip nor a function")
        super().__init__(servers, key=key, ca_file=ca_file, retry_s=chosen.retry_s)
        self._auto_commit = chosen.auto_commit
        self._decode_value = chosen.decode_value
        self._decode_key = chosen.decode_key
        self._on_error = on_error
        self.group = group
        self.skipped = 0
        self.first_skipped = ""
        self._reader = self._reader_of(chosen, positions or {})
        self._is_started = bool(positions)
        self._is_closed = False
        self._ahead: deque[Record] = deque()
        """Records that were read and that the iterator has not delivered."""
        self._done: Offsets = {}
        """By partition, the offset after the last done record, until it is committed."""
        self._pending: Offsets = {}
        """By partition, the offset after the last delivered record, until that record is done."""
        self._pages: deque[PartitionPage] = deque()
        """Pages that were read and that are not decoded, because `on_error` raised an error."""
        self._ends: dict[TopicPartition, tuple[int, int]] = {}
        """By partition, the offset of the last record of the newest page, and the offset after the
        page: further ahead if the records after that one were skipped."""
        self._blocked: dict[TopicPartition, UndecodableRecord] = {}
        self._failures: deque[UndecodableRecord] = deque()
        """Errors of `stop` that `poll` raises next."""

    def _reader_of(
        self, chosen: ConsumerOptions, positions: Mapping[tuple[str, int], int]
    ) -> GroupReader | PartitionReader:
        if self.group is None:
            reader = PartitionReader(
                self.connection,
                chosen.read_format,
                fetch_bytes=chosen.fetch_bytes,
                reset="" if chosen.auto_offset_reset == "none" else chosen.auto_offset_reset,
            )
            for partition, offset in positions.items():
                reader.positions[TopicPartition(*partition)] = offset
            return reader
        config = {
            "format": chosen.read_format.name,
            "auto.offset.reset": "latest" if chosen.auto_offset_reset == "latest" else "earliest",
            "auto.commit.enable": False,
            "client.id": chosen.client_id,
            "session.timeout.ms": chosen.session_timeout_ms,
            "on.error": ON_ERROR,
        }
        return GroupReader(
            self.connection,
            chosen.read_format,
            self.group,
            self._topics,
            config,
            fetch_bytes=chosen.fetch_bytes,
        )

    async def __aenter__(self) -> "AsyncConsumer":
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._pending.clear()  # the caller has not finished its work
        await self.close()

    async def start(self) -> None:
        """Join the group, or find the positions. `poll` does this too. Raises ClientError."""
        if self._is_started:
            return
        # A subscription to a missing topic would wait for the topic, so fail here.
        counts = {topic: await self.connection.partitions(topic) for topic in self._topics}
        if isinstance(self._reader, PartitionReader):
            await self._reader.start(counts)
        else:
            await self._reader.start()
        self._is_started = True

    async def close(self) -> None:
        """Commit what was delivered (with auto_commit), and leave the group.

        Its other members get the partitions at once. Takes two seconds at most. Never raises
        ClientError.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._auto_commit:
                self._finish()
                # If the commit fails, the records are read again.
                with contextlib.suppress(ClientError, TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._commit_done()
        finally:
            await asyncio.shield(self._reader.close())
            await self._disconnect()

    # -- records

    def __aiter__(self) -> "AsyncConsumer":
        return self

    async def __anext__(self) -> Record:
        self._finish()
        while not self._ahead:
            await self._read(POLL_S)
        record = self._ahead.popleft()
        self._pending[record.where] = self._after(record)
        return record

    async def poll(self, timeout_s: float = 1.0) -> list[Record]:
        """Return the next records, or an empty list after `timeout_s`.

        With auto_commit, commit those of the previous call first. Raises ClientError.
        """
        self._finish()
        if not self._ahead:
            await self._read(timeout_s)
        records = list(self._ahead)
        self._ahead.clear()
        for record in records:
            self._pending[record.where] = self._after(record)
        return records

    async def poll_pages(self, timeout_s: float) -> list[PartitionPage]:
        """Return pages of records as the read format decodes them.

        A page may be empty. The caller decodes keys and values, and calls `done` with the offsets
        of done records. Raises ClientError.
        """
        await self._open()
        await self._commit_if_auto()
        return await self._reader.read(_wait_ms(timeout_s))

    async def poll_arrow(self, timeout_s: float = 1.0) -> Any:
        """Return the next records as a pyarrow.Table; None after `timeout_s`.

        Columns: `topic`, `partition`, `offset`, `timestamp`, `key`, `value`, `headers`. Needs
        pyarrow and a group. Raises ClientError.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if not isinstance(self._reader, GroupReader):
            raise BadArgument("poll_arrow needs a group")
        self._finish()
        await self._commit_if_auto()
        await self._open()
        body = await self._reader.read_arrow(_wait_ms(timeout_s))
        if body is None:
            return None
        table = pa.ipc.open_stream(body).read_all()
        grouped = table.group_by(["topic", "partition"]).aggregate([("offset", "max")])
        for row in grouped.to_pylist():
            partition = TopicPartition(row["topic"], row["partition"])
            position = self._reader.positions.get(partition, -1)
            if position >= 0:  # the broker may send delivered records again
                is_here = (pc.field("topic") == partition.topic) & (
                    pc.field("partition") == partition.partition
                )
                table = table.filter(~(is_here & (pc.field("offset") < position)))
            self._reader.positions[partition] = max(position, row["offset_max"] + 1)
            self._pending[partition] = self._reader.positions[partition]
        self._reader.is_in_doubt = False
        return table if len(table) else None

    async def _open(self) -> None:
        if self._is_closed:
            raise Closed("the consumer is closed")
        await self.start()

    async def _read(self, timeout_s: float) -> None:
        """Commit what is done, then read once into `_ahead`.

        Raises ClientError, and the UndecodableRecord of `stop`.
        """
        await self._open()
        await self._commit_if_auto()
        if self._failures:
            raise self._failures.popleft()
        if not self._pages:
            self._pages.extend(await self._reader.read(_wait_ms(timeout_s)))
        if isinstance(self._reader, GroupReader):
            for partition in self._reader.take_lost():
                self._blocked.pop(partition, None)
        while self._pages:
            page = self._pages[0]
            if page.where not in self._blocked:
                records, end = await self._decoded(page)
                self._ahead += records
                if records:
                    self._ends[page.where] = (records[-1].offset, end)
                elif page.records and end > page.records[0].offset:
                    self._done[page.where] = end
            self._pages.popleft()
        if not self._ahead and self._failures:
            raise self._failures.popleft()

    async def _decoded(self, page: PartitionPage) -> tuple[list[Record], int]:
        """Return the records of a page that decode, and the offset at which the partition goes on.

        The records end before the first that stops its partition.
        """
        if self._decode_value is None and self._decode_key is None:
            return page.records, page.next_offset
        records: list[Record] = []
        for record in page.records:
            key, value = record.key, record.value
            try:
                if self._decode_value is not None and value is not None:
                    value = self._decode_value(value)
                if self._decode_key is not None and key is not None:
                    key = self._decode_key(key)
            except Exception as error:  # noqa: BLE001 - a caller's function may raise anything
                if not await self._passed(record, f"{type(error).__name__}: {error}"):
                    return records, record.offset
            else:
                records.append(msgspec.structs.replace(record, key=key, value=value))
        return records, page.next_offset

    async def _passed(self, record: Record, why: str) -> bool:
        """Handle a record that does not decode. Return whether its partition goes on."""
        partition = record.where
        error = UndecodableRecord(*partition, record.offset, why)
        if self._on_error == "stop":
            self._blocked[partition] = error
            self._failures.append(error)
            if isinstance(self._reader, PartitionReader):
                self._reader.pause(partition)
            return False
        if callable(self._on_error):
            waiting = self._on_error(record, error)
            if inspect.isawaitable(waiting):
                await waiting
        self.skipped += 1
        self.first_skipped = (
            self.first_skipped or f"{partition.topic}-{partition.partition}@{record.offset}"
        )
        return True

    def _after(self, record: Record) -> int:
        """Return the offset to commit when this record and those before it are done."""
        last, end = self._ends.get(record.where, (-1, 0))
        return end if record.offset == last else record.offset + 1

    # -- offsets

    def positions(self) -> Offsets:
        """Return the next offset to read of each partition that has delivered records.

        Without a group, return that of each partition.
        """
        offsets = dict(self._reader.positions)
        waiting = [record for page in self._pages for record in page.records]
        for record in reversed([*self._ahead, *waiting]):
            offsets[record.where] = record.offset
        offsets |= {partition: error.offset for partition, error in self._blocked.items()}
        return offsets

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Read this partition from `offset` on. Raises BadArgument if it is not assigned."""
        await self._open()
        topic_partition = TopicPartition(topic, partition)
        if isinstance(self._reader, GroupReader):
            await self._reader.seek(topic_partition, offset)
        else:
            self._reader.seek(topic_partition, offset)
            self._reader.paused.discard(topic_partition)
        self._blocked.pop(topic_partition, None)
        self._failures = deque(
            e for e in self._failures if (e.topic, e.partition) != topic_partition
        )
        self._ahead = deque(record for record in self._ahead if record.where != topic_partition)
        self._pages = deque(page for page in self._pages if page.where != topic_partition)
        self._pending.pop(topic_partition, None)
        self._done[topic_partition] = offset

    def pause(self, topic: str, partition: int) -> None:
        """Read no further records of a partition.

        Only without a group: pausing a member's partition would keep it from the other members.
        """
        if not isinstance(self._reader, PartitionReader):
            raise BadArgument("a member of a group cannot pause a partition: leave the group")
        self._reader.pause(TopicPartition(topic, partition))

    def resume(self, topic: str, partition: int) -> None:
        """Read a paused partition again."""
        if isinstance(self._reader, PartitionReader):
            self._reader.paused.discard(TopicPartition(topic, partition))

    async def commit(self) -> None:
        """Commit all delivered offsets, also that of the iterator's current record.

        Raises ClientError. Offsets of partitions that this member has lost are not committed.
        """
        self._finish()
        await self._commit_done()

    def done(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Count the records below these offsets as done.

        With auto_commit, the next poll commits them, or `close`.
        """
        self._done |= offsets

    async def _commit_if_auto(self) -> None:
        if self._auto_commit and self._done:
            await self._commit_done()

    async def _commit_done(self) -> None:
        offsets = dict(self._done)
        if isinstance(self._reader, GroupReader) and offsets:
            await self._reader.commit(offsets)
        self.committed_elsewhere(offsets)

    def committed_elsewhere(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Drop these offsets from those to commit, because they are committed."""
        for partition, offset in offsets.items():
            if self._done.get(partition) == offset:
                del self._done[partition]

    def group_offsets(self) -> dict[str, Any] | None:
        """Return all delivered offsets as a transaction's body has them, None if there are none.

        Raises BadArgument without a group, or with auto_commit.
        """
        if not isinstance(self._reader, GroupReader) or self._auto_commit:
            raise BadArgument("a transaction needs a consumer with a group and auto_commit=False")
        self._finish()
        if not self._done:
            return None
        return {
            "consumer_group_id": self._reader.group,
            "generation": self._reader.generation,
            "consumer_id": self._reader.name,
            "offsets": [
                {"topic_name": w.topic, "partition_id": w.partition, "offset": offset}
                for w, offset in self._done.items()
            ],
        }

    def _finish(self) -> None:
        """Count all delivered records as done."""
        self._done |= self._pending
        self._pending.clear()


def _wait_ms(timeout_s: float) -> int:
    """Return the timeout of one read."""
    return min(round(timeout_s * 1000), READ_MS_MAX)
