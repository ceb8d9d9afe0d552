"""A broker's log for tests that are not async: write to a folder, and say what it then holds."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.logs import WAL
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import ObjectStore

TIME_MS = 1_700_000_000_000
UNSEALED = LogSettings(is_sealing=False, wal=WAL)


class Record(NamedTuple):
    """A record as a reader sees it; the timestamp in microseconds."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None


class BrokerLog:
    """One broker on a folder, driven from one thread; seals only by `seal`."""

    def __init__(self, root: Path) -> None:
        self._runner = asyncio.Runner()
        self.log = self._runner.run(open_log(FolderStore(root)))
        self._stamps: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, topic: str, partitions: int, **configs: str) -> None:
        named = {name.replace("_", "."): value for name, value in configs.items()}
        self._runner.run(self.log.topics.create(topic, partitions, named))

    def append(
        self,
        topic: str,
        parts: dict[int, Sequence[bytes | None]],
        *,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers | None] | None = None,
    ) -> None:
        """One request; each partition's records are a millisecond apart."""
        rows = [
            (number, self._rows(topic, number, values, keys, headers))
            for number, values in parts.items()
        ]
        size = sum(len(value or b"") for values in parts.values() for value in values)
        self._runner.run(
            self.log.records.append(self.log.state.topic(topic), rows, size=size, is_json=False)
        )

    def seal(self, topic: str, partitions: Sequence[int] | None = None) -> int:
        return self._runner.run(self.log.records.seal(topic, partitions))

    def add_partitions(self, topic: str, partitions: int) -> None:
        self._runner.run(self.log.topics.add_partitions(topic, partitions))

    def delete_topic(self, topic: str) -> None:
        self._runner.run(self.log.topics.delete(topic))

    def records(self, topic: str) -> list[Record]:
        """All of a topic, by partition and offset, as fetches of the broker answer."""
        return self._runner.run(records_of(self.log, topic))

    def close(self) -> None:
        self._runner.run(self.log.close())
        self._runner.run(self.log._log.store.close())
        self._runner.close()

    def _rows(
        self,
        topic: str,
        number: int,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Headers | None] | None,
    ) -> Rows:
        first = self._stamps.get((topic, number), TIME_MS)
        self._stamps[topic, number] = first + len(values)
        return Rows(
            list(range(first, first + len(values))),
            [None] * len(values) if keys is None else list(keys),
            list(values),
            None if headers is None else list(headers),
        )


async def open_log(store: ObjectStore) -> Broker:
    return await Broker.open(store, UNSEALED, clock=SystemClock(), name="b1")


async def records_of(log: Broker, topic: str) -> list[Record]:
    records: list[Record] = []
    for number in range(len(log.state.topic(topic).partitions)):
        offset = (await log.records.offsets(topic, number)).log_start_offset
        while (answer := await log.records.fetch(topic, number, offset, bytes_max=1 << 20)).pieces:
            for piece in answer.pieces:
                records += records_in(piece.batch.to_pylist(), topic, number)
            offset = answer.next_offset
    return records


def records_in(rows: list[dict], topic: str, number: int) -> list[Record]:
    """Rows of RECORD_SCHEMA."""
    return [
        Record(
            topic,
            number,
            row["offset"],
            round(row["timestamp"].timestamp() * 1_000_000),
            row["key"],
            row["value"],
            headers_in(row["headers"]),
        )
        for row in rows
    ]


def headers_in(headers: list[dict] | None) -> tuple[tuple[str, bytes | None], ...] | None:
    return (
        None if headers is None else tuple((header["key"], header["value"]) for header in headers)
    )
