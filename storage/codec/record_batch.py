"""Record batches of magic 2: check what a producer sent, serve it, read it, build it. Pure.

A broker keeps a producer's batch as it came, compressed or not. A chunk of codec `kafka` has the
batches of one partition back to back (`split`). Consumers of Kafka's protocol get these bytes with
another base offset (`placed`). The sealer and other readers get columns (`decode`). Records that
are stored as rows are built into batches when a Kafka consumer reads them (`build`).
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from tidelog.storage.codec import chunk, decompression, record_columns, records
from tidelog.storage.codec.batch_header import (
    ATTRIBUTES_AT,
    CODEC_BITS,
    CONTROL,
    HEADER,
    HEADER_SIZE,
    LENGTH_FROM,
    LOG_APPEND_TIME,
    MAGIC,
    MAX_TIMESTAMP_AT,
    RECORD_SIZE_MIN,
    TIMESTAMP_MS_MAX,
    TRANSACTIONAL,
    TRANSACTIONS_NOT_SERVED,
    BatchHeader,
    CorruptBatch,
    InvalidBatch,
    TransactionalBatch,
)
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.codec.records import HEADERS_MAX, TooManyHeaders, Walked
from tidelog.storage.core.errors import Corrupt, LogError, RecordTooLarge, bare

BATCH_BYTES = 256 << 10
"""`build` ends a batch before the weight of its records is above this. A consumer gets whole
batches, and asks for 1 MiB a partition by default, so a few batches fill an answer."""
DECODED_RECORDS = 20_000
"""`decode` reads about so many records at once. With five times as many, the arrays of numbers do
not fit into the processor's cache, and a record takes 0.4 us instead of 0.2 us."""
KEYLESS_MAX = 1_000
"""The records without a key that an error names."""
UNDECODABLE = "tidelog.undecodable"
"""The name of a header: see `decode`."""

_INT32_MAX = 2**31 - 1
_COMMIT = b"\0\0\0\1", bytes(6)
"""Key and value of a commit marker: version 0, type 1; version 0, coordinator epoch 0."""
_MARKED_PRODUCER = 0, 0
"""Producer id and epoch of a marker. Clients look at them only at the end of an aborted
transaction."""
_COPY_MAX = 4096  # up to this size, a copy is cheaper than a buffer of Arrow
_KNOWN_BITS = CODEC_BITS | LOG_APPEND_TIME | TRANSACTIONAL | CONTROL
_EXTENT = struct.Struct(">8xi4xb6xi30xi")  # length, magic, last offset delta, count
_ORIGIN = struct.Struct(">21xh4xq")  # attributes, base timestamp
_PLACE = struct.Struct(">qii")  # base offset, length, leader epoch
_CHECKSUM = struct.Struct(">I")
_CRC_AT = 17


class Batch(NamedTuple):
    """A checked batch. Timestamps are the smallest and the largest of the records, in ms.

    `data` is what the producer sent, but with a true header (`check`). `raw_size` counts the bytes
    of the unpacked records; `weight` is that of `chunk.weight`. The last three fields are -1 if the
    producer is not idempotent.
    """

    data: memoryview
    count: int  # type: ignore[assignment]  # hides tuple.count, which no code calls
    codec: int
    timestamp_min: int
    timestamp_max: int
    raw_size: int
    weight: int
    has_null_key: bool
    producer_id: int
    producer_epoch: int
    base_sequence: int


class KeptBatch(NamedTuple):
    """A checked batch in a chunk or a cache, and its number of records.

    If `append_ms` >= 0, it is the timestamp of all its records for readers.
    """

    data: memoryview
    count: int  # type: ignore[assignment]  # hides tuple.count, which no code calls
    append_ms: int = -1


class DecodedBatches(NamedTuple):
    """The rows of some batches in CHUNK_SCHEMA, and how many of the batches did not decode."""

    rows: pa.RecordBatch
    undecodable: int


class Rules(NamedTuple):
    """The bounds that the topic of a batch sets to its check."""

    unpacked_max: int = decompression.UNPACKED_MAX
    """The most bytes that the records of a batch may unpack to."""
    needs_keys: bool = False
    """Whether a record without a key is refused, because the topic is compacted by key."""


ANY = Rules()


class Effort:
    """The bounds of all checks of a caller that may not take long; `check` counts down.

    The packed bytes do not show how long: a few of them may be many bytes and many headers.
    """

    __slots__ = ("headers", "unpacked")

    def __init__(self, unpacked: int, headers: int) -> None:
        self.unpacked = unpacked
        self.headers = headers


class TooMuchEffort(Exception):
    """A check would take more than the caller's Effort. Nothing is known about the batch."""


class KeylessRecords(InvalidBatch):
    """Records of a batch have no key, and their topic is compacted by key."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__("a record has no key, and the topic is compacted by key")
        self.numbers = numbers
        """Of these records, the numbers of the first KEYLESS_MAX."""


def check(
    sent: memoryview | None, rules: Rules = ANY, effort: Effort | None = None
) -> Batch | LogError:
    """Check the records of a partition of a produce request, which must be exactly one batch.

    `sent` is None for a partition without records. Return the checked batch or an error, which
    refers to none of the bytes (`bare`).

    The errors are InvalidBatch, TransactionalBatch, KeylessRecords, CorruptBatch (the checksum
    differs) and RecordTooLarge (more than RECORDS_MAX records: a producer may send them as two
    batches). Raises TooMuchEffort.
    """
    try:
        if sent is None:
            return InvalidBatch("a partition of the request has no records")
        opened_batch = _opened(sent, rules, effort)
        walked = _walked(opened_batch, effort)
        if rules.needs_keys and walked.has_null_key:
            numbers = records.without_key(
                opened_batch.raw, opened_batch.start, opened_batch.header.count, KEYLESS_MAX
            )
            return KeylessRecords(numbers)
        return _batch(opened_batch, walked)
    except LogError as error:
        return bare(error)


class _Opened(NamedTuple):
    """A batch with a checked header, and its unpacked records: the bytes of `raw` from `start`."""

    sent: memoryview
    header: BatchHeader
    raw: records.Raw
    start: int


def _opened(sent: memoryview, rules: Rules, effort: Effort | None) -> _Opened:
    header = _check_header(sent)
    raw: records.Raw = sent
    start = HEADER_SIZE
    if codec := header.attributes & CODEC_BITS:
        raw, start = _unpacked(codec, sent[HEADER_SIZE:], rules, effort), 0
    raw_size = len(raw) - start
    if header.count > raw_size // RECORD_SIZE_MIN:
        raise InvalidBatch(f"{raw_size} bytes cannot hold the {header.count} records of the header")
    return _Opened(sent, header, raw, start)


def _unpacked(codec: int, packed: memoryview, rules: Rules, effort: Effort | None) -> bytes:
    if effort is None or effort.unpacked >= rules.unpacked_max:
        raw = decompression.unpack(codec, packed, rules.unpacked_max)
    else:
        try:
            raw = decompression.unpack(codec, packed, effort.unpacked)
        except decompression.TooMuch:
            raise TooMuchEffort from None
        except InvalidBatch:
            effort.unpacked = 0  # the bytes up to the error may have been so many
            raise
    if effort is not None:
        effort.unpacked -= len(raw)
    return raw


def _walked(opened_batch: _Opened, effort: Effort | None) -> Walked:
    raw, start, count = opened_batch.raw, opened_batch.start, opened_batch.header.count
    base_timestamp = opened_batch.header.base_timestamp
    if effort is None or effort.headers >= HEADERS_MAX:
        return records.walk(raw, start, count, base_timestamp)
    try:
        walked = records.walk(raw, start, count, base_timestamp, effort.headers)
    except TooManyHeaders:
        raise TooMuchEffort from None
    except InvalidBatch:
        effort.headers = 0  # the headers up to the error may have been so many
        raise
    effort.headers -= walked.headers
    return walked


def _batch(opened_batch: _Opened, walked: Walked) -> Batch:
    sent, header = opened_batch.sent, opened_batch.header
    data = sent
    if header.max_timestamp != walked.timestamp_max or header.attributes & LOG_APPEND_TIME:
        # Kafka's broker does the same. sarama, for example, sends no maximum timestamp, but
        # consumers and searches by time use it. With the bit LOG_APPEND_TIME, consumers would give
        # all records the maximum timestamp.
        head = _changed(sent, header.attributes & ~LOG_APPEND_TIME, walked.timestamp_max)
        data = memoryview(bytes(head) + sent[HEADER_SIZE:])
    return Batch(
        data,
        header.count,
        header.attributes & CODEC_BITS,
        walked.timestamp_min,
        walked.timestamp_max,
        len(opened_batch.raw) - opened_batch.start,
        walked.weight,
        walked.has_null_key,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
    )


def _check_header(sent: memoryview) -> BatchHeader:
    size = sent.nbytes
    if size < HEADER_SIZE:
        raise InvalidBatch(f"{size} bytes are less than the header of a record batch")
    header = BatchHeader._make(HEADER.unpack_from(sent))
    # Older formats have other fields, but the magic is at the same place.
    if header.magic != MAGIC:
        raise InvalidBatch(f"magic {header.magic} is not supported: use record batches of magic 2")
    if header.length + LENGTH_FROM != size:
        raise InvalidBatch(
            f"a batch has {header.length + LENGTH_FROM} bytes by its header, but {size} came: send "
            "exactly one batch for a partition"
        )
    if _crc(sent[ATTRIBUTES_AT:]) != header.crc:
        raise CorruptBatch("the checksum of a record batch differs: send it again")
    _check_values(header)
    return header


def _check_values(header: BatchHeader) -> None:
    if header.attributes & TRANSACTIONAL:
        raise TransactionalBatch(TRANSACTIONS_NOT_SERVED)
    if header.attributes & CONTROL:
        raise InvalidBatch("a producer may not send control records")
    if header.attributes & ~_KNOWN_BITS:
        raise InvalidBatch(f"attributes {header.attributes} have bits without a meaning")
    if header.attributes & CODEC_BITS > decompression.ZSTD:
        raise InvalidBatch(
            f"codec {header.attributes & CODEC_BITS} is none of {decompression.NAMES}"
        )
    if header.base_offset:
        raise InvalidBatch(f"base offset {header.base_offset} of a producer's batch is not 0")
    if header.count < 1 or header.last_offset_delta != header.count - 1:
        raise InvalidBatch(
            f"{header.count} records do not fit last offset delta {header.last_offset_delta}"
        )
    if header.count > RECORDS_MAX:
        raise RecordTooLarge(
            f"a batch has {header.count} records, more than {RECORDS_MAX}: send smaller batches"
        )
    producer = (header.producer_id, header.producer_epoch, header.base_sequence)
    # As in Kafka: without an id, epoch and sequence have no meaning. aiokafka sends sequence 0.
    if header.producer_id != -1 and min(producer) < 0:
        raise InvalidBatch(f"producer id, epoch and sequence {producer} must all be 0 or more")


def placed(batch: memoryview, base_offset: int, append_ms: int = -1) -> list[bytes | memoryview]:
    """Return the bytes of a checked batch for a consumer, as parts, with its place in the log.

    If `append_ms` >= 0, it becomes the timestamp of all records (LogAppendTime). `batch` stays as
    it is. The second part is a view of it.
    """
    if append_ms < 0:
        length = batch.nbytes - LENGTH_FROM
        return [_PLACE.pack(base_offset, length, 0), batch[_PLACE.size :]]
    attributes, _ = _ORIGIN.unpack_from(batch)
    head = _changed(batch, attributes | LOG_APPEND_TIME, append_ms)
    _PLACE.pack_into(head, 0, base_offset, batch.nbytes - LENGTH_FROM, 0)
    return [bytes(head), batch[HEADER_SIZE:]]


def _changed(batch: memoryview, attributes: int, max_timestamp: int) -> bytearray:
    """Return the header of a batch with other attributes, maximum timestamp and checksum."""
    head = bytearray(batch[:HEADER_SIZE])
    struct.pack_into(">h", head, ATTRIBUTES_AT, attributes)
    struct.pack_into(">q", head, MAX_TIMESTAMP_AT, max_timestamp)
    _CHECKSUM.pack_into(head, _CRC_AT, _crc(batch[HEADER_SIZE:], _crc(head[ATTRIBUTES_AT:])))
    return head


def _crc(data: bytearray | memoryview, checksum: int = 0) -> int:
    if len(data) > _COPY_MAX:
        return crc32c(data, checksum)
    return google_crc32c.extend(checksum, bytes(data))


# --- chunks


def split(body: memoryview, key: str) -> list[KeptBatch]:
    """Return the batches that lie back to back in a chunk, whose object is `key`.

    Raises Corrupt if the bytes are no whole batches. This reads no records and no checksums.
    """
    batches, start, size = list[KeptBatch](), 0, body.nbytes
    extent = _EXTENT.unpack_from
    while start < size:
        if size - start < HEADER_SIZE:
            raise Corrupt(key, f"the batch at byte {start} of a chunk is cut off")
        length, magic, last_offset_delta, count = extent(body, start)
        end = start + LENGTH_FROM + length
        if magic != MAGIC or not start + HEADER_SIZE <= end <= size:
            raise Corrupt(key, f"there is no whole batch at byte {start} of a chunk")
        if not 0 < count == last_offset_delta + 1 or count > RECORDS_MAX:
            raise Corrupt(key, f"the batch at byte {start} of a chunk has {count} records")
        batches.append(KeptBatch(body[start:end], count))
        start = end
    return batches


def decode(batches: Sequence[KeptBatch], key: str) -> DecodedBatches:
    """Return the records of batches of a chunk, one or more, as rows.

    The timestamps are the producer's; `append_ms` is not used. Raises Corrupt if the unpacked
    records are too large for one chunk. A broker decodes only batches that it accepted, so a batch
    is undecodable only because of a bug. Such a batch must not stop the seal of the partition: the
    batch becomes `count` rows without keys. The first row has the whole batch as its value, and
    each row has the header UNDECODABLE, whose value is the reason.
    """
    parts, undecodable, remaining_bytes = list[pa.RecordBatch](), 0, chunk.RAW_SIZE_MAX
    groups = deque(_groups(batches))
    while groups:
        group = groups.popleft()
        try:
            part, size = _read(group, key, remaining_bytes)
            remaining_bytes -= size
        except _READ_ERRORS as error:
            if len(group) > 1:  # read the batches one by one, to find those that cause it
                groups.extendleft([item] for item in reversed(group))
                continue
            part = _undecodable(group[0], str(error))
            undecodable += 1
        parts.append(part)
    return DecodedBatches(record_columns.concat(parts), undecodable)


def _groups(batches: Sequence[KeptBatch]) -> Iterator[Sequence[KeptBatch]]:
    """Yield the batches in groups of at least DECODED_RECORDS records; the last may have fewer."""
    first = records = 0
    for number, item in enumerate(batches, start=1):
        records += item.count
        if records >= DECODED_RECORDS:
            yield batches[first:number]
            first, records = number, 0
    if first < len(batches):
        yield batches[first:]


# MemoryError is not here: the batch is not its cause.
_READ_ERRORS = (InvalidBatch, pa.ArrowInvalid, ValueError, IndexError, OverflowError)


def _read(batches: Sequence[KeptBatch], key: str, bytes_max: int) -> tuple[pa.RecordBatch, int]:
    """Return the records and their unpacked bytes: `bytes_max` at most, else Corrupt."""
    pieces = list[records.Raw]()
    starts, ends, counts, base_timestamps = list[int](), list[int](), list[int](), list[int]()
    size = 0
    for data, count, _ in batches:
        attributes, base_timestamp = _ORIGIN.unpack_from(data)
        packed, codec = data[HEADER_SIZE:], attributes & CODEC_BITS
        piece: records.Raw = decompression.unpack(codec, packed) if codec else packed
        if count > len(piece) // RECORD_SIZE_MIN:
            raise InvalidBatch(f"{len(piece)} bytes cannot hold {count} records")
        pieces.append(piece)
        starts.append(size)
        size += len(piece)
        ends.append(size)
        counts.append(count)
        base_timestamps.append(base_timestamp)
        if size > bytes_max:
            raise Corrupt(key, f"a chunk has more than {chunk.RAW_SIZE_MAX} unpacked bytes")
    rows = records.read(b"".join(pieces), starts, ends, counts, base_timestamps)
    return rows, size


def _undecodable(item: KeptBatch, reason: str) -> pa.RecordBatch:
    header = BatchHeader._make(HEADER.unpack_from(item.data))
    timestamp = max(min(header.max_timestamp, TIMESTAMP_MS_MAX), -TIMESTAMP_MS_MAX)
    values: list[bytes | None] = [bytes(item.data)]
    values += [None] * (item.count - 1)
    headers: list[Headers | None] = [[(UNDECODABLE, reason.encode())]] * item.count
    stamps = [timestamp] * item.count
    return record_columns.batch_of_rows([Rows(stamps, [None] * item.count, values, headers)])


# --- from rows


def build(rows: pa.RecordBatch, start_offset: int, end_offset: int) -> list[bytes]:
    """Return batches for the offsets [start_offset, end_offset).

    `rows` has the records that still exist at these offsets, in order (RECORD_SCHEMA).

    Compaction removes records, so batches have gaps. Each batch begins behind the one before; a gap
    of 2**31 offsets is between two batches. A gap behind the last record is a control batch, so the
    batches reach the end offset.
    """
    offsets = rows.column("offset").to_numpy()
    stamps = chunk.timestamps_us(rows.column("timestamp")) // record_columns.US_PER_MS
    weight = chunk.weight_before(rows)
    firsts, bases = list[int](), list[int]()
    first, base = 0, start_offset
    while first < len(offsets):
        if offsets[first] - base > _INT32_MAX:
            base = int(offsets[first])
        firsts.append(first)
        bases.append(base)
        heavy = int(weight.searchsorted(weight[first] + BATCH_BYTES, side="right")) - 1
        far = int(offsets.searchsorted(base + _INT32_MAX, side="right"))
        first = min(max(heavy, first + 1), far)
        base = int(offsets[first - 1]) + 1
    if not firsts:
        return list(_gap(start_offset, end_offset))
    counts = np.diff([*firsts, len(offsets)])
    data, bounds = records.write(
        rows,
        stamps - np.repeat(stamps[firsts], counts),
        offsets - np.repeat(np.array(bases, dtype=np.int64), counts),
    )
    records_end = int(offsets[-1]) + 1
    ends = [*(int(offsets[first - 1]) + 1 for first in firsts[1:]), records_end]
    built = list[bytes]()
    for first, count, base, end in zip(firsts, counts.tolist(), bases, ends, strict=True):
        body = data[bounds[first] : bounds[first + count]]
        built.append(_built(base, end, body, stamps[first : first + count]))
    return [*built, *_gap(records_end, end_offset)]


def _built(
    base_offset: int, end_offset: int, body: bytes | memoryview, stamps: np.ndarray
) -> bytes:
    """Return an uncompressed batch of records with these timestamps in ms."""
    last_offset_delta = end_offset - base_offset - 1
    facts = 0, last_offset_delta, int(stamps[0]), int(stamps.max()), -1, -1, -1, len(stamps)
    return _whole(base_offset, facts, body)


def _gap(start_offset: int, end_offset: int) -> Iterator[bytes]:
    """Yield control batches over the offsets [start_offset, end_offset), which have no records.

    The batch of a gap has one record, the marker of a committed transaction, at its last offset. So
    each client continues behind the gap, and commits this position. After a batch without records,
    librdkafka would commit the position before the gap, and kafkajs would read it again, without a
    pause. No client gives a marker to its application.
    """
    while start_offset < end_offset:
        delta = min(end_offset - start_offset - 1, _INT32_MAX)
        facts = TRANSACTIONAL | CONTROL, delta, 0, 0, *_MARKED_PRODUCER, -1, 1
        yield _whole(start_offset, facts, records.record(0, delta, *_COMMIT))
        start_offset += delta + 1


def _whole(base_offset: int, facts: tuple[int, ...], body: bytes | memoryview) -> bytes:
    """Return an uncompressed batch; `facts` are the fields of its header from the attributes on."""
    length = HEADER_SIZE - LENGTH_FROM + len(body)
    head = bytearray(HEADER.pack(base_offset, length, 0, MAGIC, 0, *facts))
    crc = _crc(memoryview(body), _crc(head[ATTRIBUTES_AT:]))
    _CHECKSUM.pack_into(head, _CRC_AT, crc)
    return b"".join((head, body))
