"""The Spark engine: tasks on executors read and write the segments.

The driver plans and commits. Executors use neither the logs of tables nor the WAL. They run the
same code as the in-process engine, so both engines give the same rows. To find the newest records,
each task runs `Latest` on a part of the log, and Spark reduces the results by key. To write
segments, each task runs one `Rewrite`. Values never pass through Spark. This code, and not the JVM,
reads the store, so no jar is needed, and every byte is verified.

An executor needs this package (set PYSPARK_PYTHON) and access to the store. Memory of a task: the
keys of its part, up to `keys_bytes_max`, or one encoded segment. Memory of the driver: about 24
bytes for each record that key compaction keeps.

**On a crash** of an executor, Spark starts the task again, and the task uploads under a new name.
After a crash of the driver, segments that no version names remain for collection.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidelog.compaction.engine import KeyScan, OnRows
from tidelog.compaction.in_process_engine import KEYS_BYTES_MAX
from tidelog.compaction.newest_per_key import Latest, TooManyKeys, of_ranks
from tidelog.compaction.rewrite import Rewrite, pieces, rewrite
from tidelog.storage.core.errors import Corrupt, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.plan import SegmentRange, Split
from tidelog.storage.read.split_reader import read_split
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.malloc import keep_freed_columns
from tidelog.storage.spark import versions
from tidelog.storage.spark.tasks import Batches, on_executors
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.s3_options import S3Options

SPARK_PARTITIONS_MAX = 8
"""Partitions at once. Executors work on one partition while the driver plans or commits another."""
MERGES_MAX = 256
"""Merges in one commit. If another run commits first, all merges of the commit are lost."""
PART_BYTES_MIN = 8 * 1024 * 1024
PART_BYTES_MAX = 256 * 1024 * 1024
"""Bounds of the bytes that one task reads to find the newest records. Within these bounds, each
core gets one task. With more parts, more keys are in several parts, and each task costs tens of
milliseconds."""

_RANKS = "key binary, alone bigint, rank bigint"
_WRITTEN: dict[str, pa.DataType] = {
    "number": pa.int32(),
    "file": pa.binary(),
    "damage": pa.string(),
}
_WRITTEN_DDL = "number int, file binary, damage string"
_Work = TypeVar("_Work")


class _SearchPart(msgspec.Struct, array_like=True):
    """Segments in which one task searches for the newest records."""

    slices: list[SegmentRange]
    expires: int
    keys_bytes_max: int


class SparkEngine:
    """Engine on the caller's Spark session.

    `url` and `s3` say how executors reach the store. Concurrent calls are allowed, because each
    call is a Spark job of its own.
    """

    name = "spark"
    partitions_max = SPARK_PARTITIONS_MAX
    merges_max = MERGES_MAX

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        s3: S3Options | None = None,
        *,
        keys_bytes_max: int = KEYS_BYTES_MAX,
    ) -> None:
        self._spark = spark
        self._url = url
        self._s3 = s3
        self._keys_bytes_max = keys_bytes_max

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        offsets = await _in_thread(self._newest, scan)
        on_rows(sum(file.rows for file in scan.files))
        return offsets

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        if not tasks:
            return []
        files = await _in_thread(self._write, tasks)
        on_rows(sum(file.rows for task in tasks for file in task.inputs))
        return files

    def _newest(self, scan: KeyScan) -> np.ndarray:
        parts = [
            _encode(_SearchPart(slices, scan.expires, self._keys_bytes_max))
            for slices in _parts(scan, versions.cores(self._spark))
        ]
        url, s3 = self._url, self._s3
        ranks = on_executors(
            self._spark, parts, lambda _, work: _ranks(_decoded(work, _SearchPart), url, s3), _RANKS
        )
        largest = ranks.groupBy("key", "alone").agg({"rank": "max"}).toDF("key", "alone", "rank")
        return of_ranks(versions.collected(largest.select("rank")).column("rank").to_numpy())

    def _write(self, tasks: Sequence[Rewrite]) -> list[SegmentFile]:
        url, s3 = self._url, self._s3
        results = on_executors(
            self._spark,
            [_encode(task) for task in tasks],
            lambda number, work: _rewrite(number, _decoded(work, Rewrite), url, s3),
            _WRITTEN_DDL,
        )
        files: dict[int, SegmentFile] = {}
        for row in versions.collected(results).to_pylist():
            if row["damage"] is not None:
                key, _, why = row["damage"].partition("\n")
                raise Corrupt(key, why)
            files[row["number"]] = msgspec.msgpack.decode(row["file"], type=SegmentFile)
        return [files[number] for number in range(len(tasks))]


def _parts(scan: KeyScan, cores: int) -> list[list[SegmentRange]]:
    """Divide the segments into parts of about equal size."""
    size = max(sum(file.size for file in scan.files), 1)
    count = max(min(cores, size // PART_BYTES_MIN), -(-size // PART_BYTES_MAX))
    parts: list[list[SegmentRange]] = [[] for _ in range(count)]
    position = 0
    for piece in pieces(scan.prefix, scan.files, max(size // count, 1)):
        parts[position * count // size].append(piece)
        position += piece.cost
    return [part for part in parts if part]


# -- on executors


def _ranks(part: _SearchPart, url: str, s3: S3Options | None) -> Batches:
    """Yield the ranks of a part of the log, in several tables if they exceed the memory limit."""
    keep_freed_columns()
    latest = Latest(part.expires, bytes_max=part.keys_bytes_max)
    is_old = [latest.columns(segment_range.start) for segment_range in part.slices]
    with OpenedStore(url, s3) as opened_store:
        for columns in (["offset", "key", "value"], ["offset", "key"]):
            segment_ranges = [
                segment_range
                for segment_range, own in zip(part.slices, is_old, strict=True)
                if own == columns
            ]
            for _, batch in read_split(opened_store, Split(segment_ranges), columns):
                try:
                    latest.add(latest.see(batch))
                except TooManyKeys:
                    yield from latest.take_ranks().to_batches()
    yield from latest.take_ranks().to_batches()


def _rewrite(number: int, task: Rewrite, url: str, s3: S3Options | None) -> Batches:
    """Write and upload a segment. Yield damage as a row, because no retry repairs it."""
    keep_freed_columns()
    file, damage = b"", None
    try:
        file = msgspec.msgpack.encode(asyncio.run(_written(task, url, s3)))
    except Corrupt as error:
        damage = f"{error.key}\n{error.why}"
    yield pa.RecordBatch.from_pylist(
        [{"number": number, "file": file, "damage": damage}], schema=pa.schema(_WRITTEN)
    )


async def _written(task: Rewrite, url: str, s3: S3Options | None) -> SegmentFile:
    store = await open_store(url, s3=s3)
    try:
        return await rewrite(store, task, SystemClock().new_id().hex())
    finally:
        await store.close()


# -- between the driver and the executors


def _encode(work: Any) -> bytes:
    return msgspec.msgpack.encode(work, enc_hook=lambda offsets: offsets.tobytes())


def _decoded(work: pa.Buffer, kind: type[_Work]) -> _Work:
    decoder = msgspec.msgpack.Decoder(
        kind, dec_hook=lambda _, octets: np.frombuffer(octets, np.int64)
    )
    return decoder.decode(work)


async def _in_thread(call: Callable[[Any], Any], work: Any) -> Any:
    """Run Spark's blocking calls in a thread; raise an executor's error as one line."""
    try:
        return await asyncio.to_thread(call, work)
    except (PySparkException, Py4JError) as error:
        raise Unavailable(f"Spark: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the last line that names a Python exception.

    If there is none, return the first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if _is_raised(line)]
    return (raised or lines or [type(error).__name__])[-1 if raised else 0]


def _is_raised(line: str) -> bool:
    name, colon, _ = line.partition(": ")
    return bool(colon) and name.replace(".", "").replace("_", "").isalnum() and "." in name
