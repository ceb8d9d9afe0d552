"""Attacks by records that are spread over many partitions.

Each flush then adds a chunk to the state for each partition, whatever the size of its records.
"""

import functools
import re
from collections import Counter

from tests.service.kafka.wire import answer, framed
from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.kafka_arrays import WIDE
from tests.tools.attack.kafka_client import connected, received
from tests.tools.attack.measure import Attack, scaled
from tests.tools.attack.produce_attacks import WRITER, batch_of, record
from tidelog.service.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.storage.state.principal_shares import PARTS
from tidelog.storage.state.tail_chunk_counts import CHUNKS_MAX

PARTITIONS = 10_000
REQUEST_PARTITIONS = 1_000
"""Partitions of one request. A frame of small batches cannot have many more."""
ROUNDS = 22
"""They add more chunks than a topic may have before brokers seal it. Each takes memory in the tail
cache, too, until this is full."""


def _spread(first: int, end: int) -> bytes:
    """Return a request with one record for each of these partitions."""
    batch = memoryview(batch_of(record(0)))
    parts = [PartitionProduceData(index=number, records=batch) for number in range(first, end)]
    data = [TopicProduceData(name=WIDE, partition_data=parts)]
    return framed(ProduceRequest(acks=-1, timeout_ms=1000, topic_data=data), 9)


def spread_records(scale: float, broker: SecuredBroker) -> str:
    """Produce one record to each partition of a wide topic, again and again."""
    count = scaled(PARTITIONS, scale, 10)
    if WIDE not in broker.asked("GET", "/topics").json():
        broker.create_topic(WIDE, count)
    principal = broker.principal(WRITER)
    broker.allow(WRITER, "WRITE", "TOPIC", WIDE)
    step = REQUEST_PARTITIONS
    requests = [_spread(first, min(first + step, count)) for first in range(0, count, step)]
    codes: Counter[int] = Counter()
    with connected(broker, principal) as connection:
        for _ in range(scaled(ROUNDS, scale, 2)):
            connection.sendall(b"".join(requests))
            for _ in requests:
                response = answer(received(connection), ProduceResponse, 9)[1]
                parts = response.responses[0].partition_responses
                codes.update(part.error_code for part in parts)
    return f"{_tail_chunks(broker)} chunks; records by error {dict(codes)}"


def _tail_chunks(broker: SecuredBroker) -> str:
    """Return the number of chunks of all tails; a failure if a broker does not bound it."""
    metrics = broker.asked("GET", "/metrics").text
    gauge = re.search(r"^tidelog_tail_chunks (\S+)$", metrics, re.MULTILINE)
    if gauge is None:
        return "FAILED: unknown"
    count = int(float(gauge.group(1)))
    return f"FAILED: {count}" if count > CHUNKS_MAX // PARTS else str(count)


def chunk_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    name = f"chunks: one record to each of {PARTITIONS:,} partitions"
    return {name: functools.partial(spread_records, scale)}
