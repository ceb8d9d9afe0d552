"""Produce requests of Kafka's protocol, made beforehand, for the load generator of `load`."""

import struct
import time

from tests.service.kafka.wire import framed
from tests.support.record_batches import sent
from tests.tools.bench.load import Connection
from tidelog.service.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.storage.codec.record_columns import Rows

VERSION = 7
"""Of Produce: the newest that is not flexible, so that the error of an answer has a fixed place."""
_ERROR = struct.Struct(">h")


def requests(topic: str, partitions: int, records: int, value_bytes: int) -> list[bytes]:
    """Return a request for each partition, with one batch of so many records, acks=all."""
    value, now_ms = b"v" * value_bytes, int(time.time() * 1000)
    rows = Rows([now_ms] * records, [None] * records, [value] * records, [None] * records)
    batch = memoryview(sent(rows))
    framed_requests = []
    for partition in range(partitions):
        data = PartitionProduceData(index=partition, records=batch)
        of_topic = TopicProduceData(name=topic, partition_data=[data])
        request = ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[of_topic])
        framed_requests.append(framed(request, VERSION))
    return framed_requests


class KafkaConnection(Connection):
    """Reads answers of Produce for one partition."""

    def __init__(self, on_answer: object) -> None:
        super().__init__(on_answer)  # type: ignore[arg-type]
        self._answer = b""

    def data_received(self, data: bytes) -> None:
        answer = self._answer = self._answer + data
        size = int.from_bytes(answer[:4]) + 4
        if len(answer) < max(size, 5):
            return
        self._answer = answer[size:]
        name_bytes = int.from_bytes(answer[12:14])
        # Behind the size, the number, the topics' and partitions' numbers and the index.
        (error,) = _ERROR.unpack_from(answer, 22 + name_bytes)
        self._on_answer(self, error or 200, size)
