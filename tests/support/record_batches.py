"""Record batches as the clients of Kafka's protocol send them."""

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tidelog.storage.core.chunk import Rows
from tidelog.storage.kafka import batch
from tidelog.storage.kafka.batch import Batch

NO_PRODUCER = (-1, -1, -1)
MAGIC = 2
CODECS = 5
"""Numbers of codecs, 0 for none."""


def sent(rows: Rows, producer: tuple[int, int, int] = NO_PRODUCER, codec: int = 0) -> bytes:
    """Return a batch of these records. `producer` is its id, epoch and first sequence."""
    build = DefaultRecordBatchBuilder(MAGIC, codec, 0, *producer, 1 << 30)
    headers = rows.headers or [None] * len(rows)
    columns = zip(rows.timestamps, rows.keys, rows.values, headers, strict=True)
    for offset, (timestamp, key, value, its_headers) in enumerate(columns):
        made = build.append(offset, timestamp, key, value, list(its_headers or []))
        assert made is not None, "the batch is full"
    return bytes(build.build())


def checked(rows: Rows, producer: tuple[int, int, int] = NO_PRODUCER, codec: int = 0) -> Batch:
    return batch.check(memoryview(sent(rows, producer, codec)))
