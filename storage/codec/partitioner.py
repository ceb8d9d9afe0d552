"""The choice of a partition for each record of a request, and the split of rows by partition.

Kafka's rules: a record goes to the partition that it requests. If it requests none, the murmur2
hash of its key decides. Kafka's Java client uses the same hash, so producers of all protocols put a
key into the same partition. Records that request no partition and have no key go to the partitions
in turn (`Sticky`). Pure. Imports the types of rows and columns, not those of topics and requests.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.storage.codec import byte_loops
from tidelog.storage.codec.chunk import octets_before
from tidelog.storage.codec.key_partition import partition_of
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import InvalidRequest

Column: TypeAlias = "pa.Array[Any]"
Ints: TypeAlias = npt.NDArray[np.int64]
RequestedPartitions: TypeAlias = "Sequence[int | None] | Column | None"
Partitions: TypeAlias = "RequestedPartitions | int"
"""Requested partitions: one per record (null: none requested), one for all records, or None."""
RecordPartitions: TypeAlias = "int | list[int] | Ints"
"""The chosen partitions: one for all records, or one per record."""

RUN_BYTES = 16 * 1024


class NoSuchPartition(InvalidRequest):
    """A request whose record number `row` names a partition outside [0, count)."""

    def __init__(self, row: int, partition: int, count: int) -> None:
        super().__init__(
            f"record {row} names partition {partition}: the topic has 0 to {count - 1}"
        )
        self.row = row
        self.partition = partition
        self.count = count


class Sticky:
    """Chooser of partitions for records without a key.

    Within a request, it goes to the next partition after about `RUN_BYTES` bytes of values.

    `seed` determines the first partition of each request. Kafka's client changes the partition
    when a batch is full. A broker counts bytes instead, so that a request has few chunks. Each
    broker owns one `Sticky`. Threads may share it: the only effect of a race is that two requests
    begin at the same partition.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws = 0

    def spread(self, row_bytes: Ints, count: int) -> Ints:
        """Choose a partition for each row of one request, in order, by the rows' sizes."""
        row_starts = np.cumsum(row_bytes) - row_bytes
        return (row_starts // RUN_BYTES + self._draw()) % count

    def spread_few(self, row_bytes: Sequence[int], count: int) -> list[int]:
        """Choose as `spread` does, but with lists instead of arrays, for few rows."""
        first = self._draw()
        row_start = 0
        partitions = []
        for size in row_bytes:
            partitions.append((row_start // RUN_BYTES + first) % count)
            row_start += size
        return partitions

    def _draw(self) -> int:
        # SplitMix64 (Steele et al. 2014) turns the counter into uniform bits. The result has only
        # 32 bits, so that the callers' sums with it fit into int64.
        self._draws += 1
        bits = (self._seed + self._draws * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return bits >> 32


def partitions_of(keys: pa.BinaryArray, count: int) -> npt.NDArray[np.int32]:
    """Return the partition of each key, -1 for a null key."""
    if len(keys) == 0:
        return np.empty(0, dtype=np.int32)
    hashes = _hashes(keys)
    # count fits in 31 bits, so the unsigned remainder is the partition.
    partitions = ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(count)).astype(np.int32)
    if keys.null_count:
        partitions[nulls(keys)] = -1
    return partitions


def _hashes(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Return Kafka's murmur2 of each key. A null row's hash has no meaning."""
    _, offset_buffer, data_buffer = keys.buffers()
    assert offset_buffer is not None
    bounds = np.frombuffer(memoryview(offset_buffer), np.int32)
    hashes = np.empty(len(keys), np.uint32)
    bounds = bounds[keys.offset : keys.offset + len(keys) + 1]
    byte_loops.murmur2_column(hashes, bounds, memoryview(data_buffer or b""))
    return hashes


def place(
    rows: Rows | pa.RecordBatch,
    partitions: Partitions,
    count: int,
    sticky: Sticky,
    *,
    otherwise: int | None = None,
) -> RecordPartitions:
    """Choose the partitions of one request's rows, among the `count` partitions of its topic.

    `otherwise` is the partition of records that request none (a produce to `/partitions/{p}`). An
    int as `partitions` has the same meaning as `otherwise`. Raises NoSuchPartition.
    """
    if isinstance(partitions, int):
        otherwise, partitions = partitions, None
    if otherwise is not None and not 0 <= otherwise < count:
        raise NoSuchPartition(0, otherwise, count)
    if partitions is None and (otherwise is not None or count == 1):
        return otherwise or 0
    if isinstance(rows, Rows):
        requested = partitions.to_pylist() if isinstance(partitions, pa.Array) else partitions
        few = _place_rows(rows, requested, count, sticky, otherwise)
        return few if len(set(few)) > 1 else few[0]
    placed = _place_batch(rows, partitions, count, sticky, otherwise)
    return placed if (placed != placed[0]).any() else int(placed[0])


def tally(places: RecordPartitions, rows: int) -> list[tuple[int, int]]:
    """Count the records per partition, in ascending order of partitions.

    `rows` is the number of all records.
    """
    if isinstance(places, int):
        return [(places, rows)]
    if isinstance(places, list):
        return sorted(Counter(places).items())
    counts = np.bincount(places)
    used = np.flatnonzero(counts)
    return list(zip(used.tolist(), counts[used].tolist(), strict=True))


def part(batch: pa.RecordBatch, places: RecordPartitions) -> list[tuple[int, pa.RecordBatch]]:
    """Split the rows by partition, in ascending order.

    Rows of one partition keep their order. If all rows go to one partition, return the batch
    itself.
    """
    if isinstance(places, int):
        return [(places, batch)]
    placed = np.asarray(places)
    # numpy sorts 16-bit integers by radix. Nearly all partition numbers fit into 16 bits.
    order = np.argsort(
        placed.astype(np.uint16) if placed.max() < 1 << 16 else placed, kind="stable"
    )
    return cut(_take(batch, order), tally(placed, len(placed)))


def cut(
    batch: pa.RecordBatch, counts: Iterable[tuple[int, int]]
) -> list[tuple[int, pa.RecordBatch]]:
    """Slice a batch whose rows are sorted by partition; `counts` has (partition, rows) in order."""
    parts = []
    start = 0
    for partition, count in counts:
        parts.append((partition, batch.slice(start, count)))
        start += count
    return parts


# --- rows: small requests, plain Python


def _place_rows(
    rows: Rows,
    named: Sequence[int | None] | None,
    count: int,
    sticky: Sticky,
    otherwise: int | None,
) -> list[int]:
    placed: list[int | None] = list(named) if named is not None else [None] * len(rows)
    keyless = []
    for row, partition in enumerate(placed):
        if partition is not None:
            if not 0 <= partition < count:
                raise NoSuchPartition(row, partition, count)
        elif otherwise is not None:
            placed[row] = otherwise
        elif (key := rows.keys[row]) is not None:
            placed[row] = partition_of(key, count)
        else:
            keyless.append(row)
    if keyless:
        spread = sticky.spread_few([len(rows.values[row] or b"") for row in keyless], count)
        for row, partition in zip(keyless, spread, strict=True):
            placed[row] = partition
    return placed  # type: ignore[return-value]  # every None was replaced


# --- batches: numpy


def _place_batch(
    batch: pa.RecordBatch,
    requested: RequestedPartitions,
    count: int,
    sticky: Sticky,
    otherwise: int | None,
) -> Ints:
    placed = np.full(batch.num_rows, -1) if requested is None else _requested(requested, count)
    if otherwise is not None:
        placed[placed < 0] = otherwise
    elif requested is None:
        placed = _by_key(batch, count)
    elif (unnamed := placed < 0).any():
        placed[unnamed] = _by_key(batch, count)[unnamed]
    if (keyless := placed < 0).any():
        lengths = np.diff(octets_before(batch.column("value")))
        placed[keyless] = sticky.spread(lengths[keyless], count)
    return placed


def _requested(requested: RequestedPartitions, count: int) -> Ints:
    """Return each record's requested partition, -1 for none. Raises NoSuchPartition."""
    column = requested if isinstance(requested, pa.Array) else _column(requested or [], count)
    numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
    if wrong.size:
        raise NoSuchPartition(int(wrong[0]), int(numbers[wrong[0]]), count)
    placed = numbers.astype(np.int64)
    if column.null_count:
        placed[nulls(column)] = -1
    return placed


def _column(requested: Sequence[int | None], count: int) -> Column:
    try:
        return pa.array(requested, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        # At least one number does not fit in 64 bits.
        row = next(row for row, number in enumerate(requested) if abs(number or 0) >= 1 << 63)
        raise NoSuchPartition(row, requested[row] or 0, count) from None


def _by_key(batch: pa.RecordBatch, count: int) -> Ints:
    keys: Any = batch.column("key")
    if keys.null_count == batch.num_rows:
        return np.full(batch.num_rows, -1)
    return partitions_of(keys, count).astype(np.int64)


def _take(batch: pa.RecordBatch, order: Ints) -> pa.RecordBatch:
    indices: Any = pa.array(order)
    columns = [
        column if column.null_count == batch.num_rows else column.take(indices)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


# --- columns


def nulls(column: Column) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls
