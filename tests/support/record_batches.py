"""Record batches as the clients of Kafka's protocol send them."""

from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from tidelog.storage.codec import record_batch
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.record_batch import Batch
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.core.errors import LogError

NO_PRODUCER = (-1, -1, -1)
MAGIC = 2
CODECS = 5
"""Numbers of codecs, 0 for none."""

_GZIP = 1
_CRC_AT, _RECORDS_AT = 17, 61


def sent(rows: Rows, producer: tuple[int, int, int] = NO_PRODUCER, codec: int = 0) -> bytes:
    """Return a batch of these records. `producer` is its id, epoch and first sequence."""
    build = DefaultRecordBatchBuilder(MAGIC, codec, 0, *producer, 1 << 30)
    headers = rows.headers or [None] * len(rows)
    columns = zip(rows.timestamps, rows.keys, rows.values, headers, strict=True)
    for offset, (timestamp, key, value, its_headers) in enumerate(columns):
        metadata = build.append(offset, timestamp, key, value, list(its_headers or []))
        assert metadata is not None, "the batch is full"
    return _without_time(build.build()) if codec == _GZIP else bytes(build.build())


def _without_time(data: bytearray) -> bytes:
    """Clear the time of compression in the header of gzip.

    So the same records give the same bytes, and the simulator repeats a run.
    """
    data[_RECORDS_AT + 4 : _RECORDS_AT + 8] = bytes(4)
    data[_CRC_AT : _CRC_AT + 4] = crc32c(data[_CRC_AT + 4 :]).to_bytes(4, "big")
    return bytes(data)


def check_one(data: bytes | memoryview) -> Batch:
    """Check one batch; raise its error."""
    outcome = record_batch.check(memoryview(data))
    if isinstance(outcome, LogError):
        raise outcome
    return outcome


def checked(rows: Rows, producer: tuple[int, int, int] = NO_PRODUCER, codec: int = 0) -> Batch:
    return check_one(sent(rows, producer, codec))


class Consumed(NamedTuple):
    """A record as a Kafka consumer gets it; the timestamp is in ms."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def consumed(batches: bytes | memoryview, offset: int = 0) -> list[Consumed]:
    """Return the records of one answer as a client gets them that asked for `offset`.

    Clients drop records before `offset`, and the markers of transactions. The batches must not
    overlap, because librdkafka delivers all records behind `offset`, in the order of the answer.
    """
    records: list[Consumed] = []
    memory, end_offset = MemoryRecords(bytes(batches)), -1
    while memory.has_next():
        batch = memory.next_batch()
        assert batch.validate_crc()
        assert batch.base_offset >= end_offset, "two batches of an answer overlap"
        end_offset = batch.next_offset
        if batch.is_control_batch:
            continue
        records += [
            Consumed(
                record.offset, record.timestamp, record.key, record.value, list(record.headers)
            )
            for record in batch
            if record.offset >= offset
        ]
    return records
