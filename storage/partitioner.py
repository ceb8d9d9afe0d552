"""Which partition each record of a request goes to, and rows parted by it.

Kafka's rules: an explicit partition wins, else murmur2 of the key exactly as the Java client
computes it (so that every producer of a key, by whatever protocol, meets in one partition), else
one partition after the other for records without a key. Pure: the sequence behind the last rule is
seeded by its owner. Knows rows and columns, nothing of topics or requests.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.chunk import Rows, sizes
from storage.errors import InvalidRequest

Column: TypeAlias = "pa.Array[Any]"
Ints: TypeAlias = npt.NDArray[np.int64]
Lengths: TypeAlias = npt.NDArray[np.int32]
Said: TypeAlias = "Sequence[int | None] | Column | None"
Partitions: TypeAlias = "Said | int"
"""What a request says: a partition per record (null: none said), one for all, or nothing."""
Places: TypeAlias = "int | list[int] | Ints"
"""Where records go: one partition for all, or one for each."""

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_M32 = np.uint32(_M)

_unpack_words = [struct.Struct(f"<{words}I").unpack_from for words in range(33)]
"""Little-endian words from the start of a key, by their number: most keys are short."""

ACTIVE_MIN = 32
"""A numpy pass over fewer rows than this costs more than the scalar loop."""


class NoSuchPartition(InvalidRequest):
    """Record number `row` of the request names a partition outside [0, count)."""

    def __init__(self, row: int, partition: int, count: int) -> None:
        super().__init__(
            f"record {row} names partition {partition}: the topic has 0 to {count - 1}"
        )
        self.row = row
        self.partition = partition
        self.count = count


class Sticky:
    """The partitions of records without a key: ~`run_bytes` to one, then to the next.

    Each request begins at a partition drawn from a seeded sequence. Kafka's client stays with a
    partition to fill its batches; here it keeps the number of chunks a request makes small.
    Owned by a broker, lives as long; safe for threads: a race repeats a draw, nothing more.
    """

    def __init__(self, seed: int, run_bytes: int = 16 * 1024) -> None:
        self._seed = seed
        self._run_bytes = run_bytes
        self._draws = 0

    def spread(self, row_bytes: Ints, count: int) -> Ints:
        """A partition for each row of one request, given the rows' sizes in order."""
        before = np.cumsum(row_bytes) - row_bytes
        return (before // self._run_bytes + self._draw()) % count

    def spread_few(self, row_bytes: Sequence[int], count: int) -> list[int]:
        """The same as `spread`, from and to lists."""
        first = self._draw()
        before = 0
        partitions = []
        for size in row_bytes:
            partitions.append((before // self._run_bytes + first) % count)
            before += size
        return partitions

    def _draw(self) -> int:
        # SplitMix64 (Steele et al. 2014): a counter made uniform. 32 bits leave room to add.
        self._draws += 1
        bits = (self._seed + self._draws * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return bits >> 32


def murmur2(key: bytes) -> int:
    """Kafka's `Utils.murmur2`: a signed 32-bit hash."""
    length = len(key)
    words = length >> 2
    unpacked = _unpack_words[words](key) if words <= 32 else struct.unpack_from(f"<{words}I", key)
    h = _absorb(_SEED ^ length, unpacked)
    if length & 3:
        h = (h ^ int.from_bytes(key[words << 2 :], "little")) * _M & _MASK
    h = (h ^ (h >> 13)) * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def partition_of(key: bytes, count: int) -> int:
    """The partition that Kafka's default partitioner gives a key."""
    return (murmur2(key) & 0x7FFFFFFF) % count


def partitions_of(keys: pa.BinaryArray, count: int) -> npt.NDArray[np.int32]:
    """`partition_of` each key; -1 for null."""
    if len(keys) == 0:
        return np.empty(0, dtype=np.int32)
    hashes = _murmur2_column(keys)
    # count fits in 31 bits, so the unsigned remainder is the partition.
    partitions = ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(count)).astype(np.int32)
    if keys.null_count:
        partitions[_nulls(keys)] = -1
    return partitions


def place(
    rows: Rows | pa.RecordBatch,
    partitions: Partitions,
    count: int,
    sticky: Sticky,
    *,
    otherwise: int | None = None,
) -> Places:
    """Where the rows of one request go, among the `count` partitions of its topic.

    `otherwise` is the partition of records that say none themselves (a produce to
    `/partitions/{p}`); an int as `partitions` means the same. Raises NoSuchPartition.
    """
    if isinstance(partitions, int):
        otherwise, partitions = partitions, None
    if otherwise is not None and not 0 <= otherwise < count:
        raise NoSuchPartition(0, otherwise, count)
    if partitions is None and (otherwise is not None or count == 1):
        return otherwise or 0
    if isinstance(rows, Rows):
        said = partitions.to_pylist() if isinstance(partitions, pa.Array) else partitions
        few = _place_rows(rows, said, count, sticky, otherwise)
        return few if len(set(few)) > 1 else few[0]
    placed = _place_batch(rows, partitions, count, sticky, otherwise)
    return placed if (placed != placed[0]).any() else int(placed[0])


def tally(places: Places, rows: int) -> list[tuple[int, int]]:
    """The partitions that `rows` records go to, in ascending order, and how many go there."""
    if isinstance(places, int):
        return [(places, rows)]
    if isinstance(places, list):
        return sorted(Counter(places).items())
    counts = np.bincount(places)
    used = np.flatnonzero(counts)
    return list(zip(used.tolist(), counts[used].tolist(), strict=True))


def part(batch: pa.RecordBatch, places: Places) -> list[tuple[int, pa.RecordBatch]]:
    """The rows by partition, in ascending order; those of one keep their order.

    A batch that goes to one partition is handed on untouched.
    """
    if isinstance(places, int):
        return [(places, batch)]
    placed = np.asarray(places)
    # A radix sort for 16 bits, which all numbers of partitions fit that anybody has.
    order = np.argsort(
        placed.astype(np.uint16) if placed.max() < 1 << 16 else placed, kind="stable"
    )
    return cut(_take(batch, order), tally(placed, len(placed)))


def cut(
    batch: pa.RecordBatch, counts: Iterable[tuple[int, int]]
) -> list[tuple[int, pa.RecordBatch]]:
    """A batch whose rows lie in the order of `counts`, (partition, rows), by partition."""
    parts = []
    start = 0
    for partition, count in counts:
        parts.append((partition, batch.slice(start, count)))
        start += count
    return parts


# --- rows: small requests, plain Python


def _place_rows(
    rows: Rows, said: Sequence[int | None] | None, count: int, sticky: Sticky, otherwise: int | None
) -> list[int]:
    placed: list[int | None] = list(said) if said is not None else [None] * len(rows)
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
    said: Said,
    count: int,
    sticky: Sticky,
    otherwise: int | None,
) -> Ints:
    placed = np.full(batch.num_rows, -1) if said is None else _said(said, count)
    if otherwise is not None:
        placed[placed < 0] = otherwise
    elif said is None:
        placed = _by_key(batch, count)
    elif (unsaid := placed < 0).any():
        placed[unsaid] = _by_key(batch, count)[unsaid]
    if (keyless := placed < 0).any():
        placed[keyless] = sticky.spread(sizes(batch)[keyless], count)
    return placed


def _said(said: Said, count: int) -> Ints:
    """The partitions that a request names, -1 for none; raises NoSuchPartition."""
    column = said if isinstance(said, pa.Array) else _column(said or [], count)
    named = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((named < 0) | (named >= count))
    if wrong.size:
        raise NoSuchPartition(int(wrong[0]), int(named[wrong[0]]), count)
    placed = named.astype(np.int64)
    if column.null_count:
        placed[_nulls(column)] = -1
    return placed


def _column(said: Sequence[int | None], count: int) -> Column:
    try:
        return pa.array(said, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        # One does not even fit in 64 bits.
        row = next(row for row, number in enumerate(said) if abs(number or 0) >= 1 << 63)
        raise NoSuchPartition(row, said[row] or 0, count) from None


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


# --- murmur2


def _absorb(h: int, words: Sequence[int]) -> int:
    for word in words:
        k = word * _M & _MASK
        h = (h * _M ^ (k ^ (k >> 24)) * _M) & _MASK
    return h


def _murmur2_column(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Hashes of all rows, null or not."""
    _, offset_buffer, data_buffer = keys.buffers()
    assert offset_buffer is not None
    data = memoryview(data_buffer or b"")
    bounds = np.frombuffer(memoryview(offset_buffer), np.int32)
    bounds = bounds[keys.offset : keys.offset + len(keys) + 1]
    starts = bounds[:-1].astype(np.int64)
    lengths = np.diff(bounds)
    length = int(lengths[0])
    if length <= 256 and (lengths == length).all():
        return _hash_uniform(data, int(starts[0]), len(keys), length)
    return _hash_mixed(data, starts, lengths)


def _hash_uniform(data: memoryview, start: int, rows: int, length: int) -> npt.NDArray[np.uint32]:
    """Keys of one length lie at equal distances: word i of all of them is a strided view."""
    h = np.full(rows, _SEED ^ length, dtype=np.uint32)
    for at in range(0, length & ~3, 4):
        h *= _M32
        h ^= _scramble(np.ndarray((rows,), "<u4", data, start + at, (length,)))
    if length & 3:
        for shift in range(length & 3):
            at = start + (length & ~3) + shift
            tail = np.ndarray((rows,), np.uint8, data, at, (length,))
            h ^= tail.astype(np.uint32) << np.uint32(8 * shift)
        h *= _M32
    return _finish(h)


def _hash_mixed(data: memoryview, starts: Ints, lengths: Lengths) -> npt.NDArray[np.uint32]:
    """Longest keys first, so that the rows which still have a word i are a prefix."""
    order = np.argsort(-lengths, kind="stable")
    starts = starts[order]
    words = lengths[order] >> 2
    tails = lengths[order] & 3
    h = np.uint32(_SEED) ^ lengths[order].astype(np.uint32)
    _absorb_mixed(h, data, starts, words)
    octets = np.frombuffer(data, np.uint8)
    ends = starts + (words << 2)
    for shift in range(3):
        rows = np.flatnonzero(tails > shift)
        h[rows] ^= octets[ends[rows] + shift].astype(np.uint32) << np.uint32(8 * shift)
    np.multiply(h, _M32, out=h, where=tails > 0)
    hashes = np.empty_like(h)
    hashes[order] = _finish(h)
    return hashes


def _absorb_mixed(
    h: npt.NDArray[np.uint32], data: memoryview, starts: Ints, words: Lengths
) -> None:
    done = 0
    if len(data) >= 4:
        anywhere = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))  # a word at every byte
        for done, active in _passes(words):
            prefix = h[:active]
            prefix *= _M32
            prefix ^= _scramble(anywhere[starts[:active] + 4 * (done - 1)])
    # Few are longer than this: one by one, or a single key of a megabyte costs 250,000 passes.
    for row in range(int(np.count_nonzero(words > done))):
        left = int(words[row]) - done
        rest = struct.unpack_from(f"<{left}I", data, int(starts[row]) + 4 * done)
        h[row] = _absorb(int(h[row]), rest)


def _passes(words: Lengths) -> Iterator[tuple[int, int]]:
    """(words read after the pass, rows in it) while enough rows have a next word."""
    counts = words[::-1]  # ascending
    rows = len(counts)
    last = int(words[ACTIVE_MIN - 1]) if rows >= ACTIVE_MIN else 0
    short = np.searchsorted(counts, np.arange(last), side="right")
    for done, fewer in enumerate(short.tolist(), start=1):
        yield done, rows - fewer


def _scramble(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    k = words * _M32
    k ^= k >> np.uint32(24)
    k *= _M32
    return k


def _finish(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h ^= h >> np.uint32(13)
    h *= _M32
    h ^= h >> np.uint32(15)
    return h


def _nulls(column: Column) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls
