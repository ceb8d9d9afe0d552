"""The attacks on the port for Kafka clients, in the style of `attacks`.

Each request is within the bounds of its frame. It asks for much: an array of the greatest length,
the same name again and again, answers that no client takes, members that do not go on.
"""

import functools
import struct
import time
from collections import Counter
from collections.abc import Sequence

import httpx

from tests.service.kafka.wire import framed
from tests.support.broker import Broker
from tests.tools.attack.kafka_arrays import WIDE, cut, long_arrays, wide_fetch
from tests.tools.attack.kafka_client import asked, open_connections, sent
from tests.tools.attack.kafka_schema import array_fields, frame_of
from tests.tools.attack.kafka_values import wrong_values_sent
from tests.tools.attack.measure import HOLD_S, MIB, Attack, scaled
from tests.tools.attack.probes import NEIGHBOUR
from tidelog.service.kafka.messages import (
    fetch,
    group_offsets,
    groups,
    metadata,
)
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest

ASKERS = 40
STAYS_S = 0.0, 0.02, 0.06, 0.12
"""How long a client stays that leaves: until its request is read, decoded, or served in part."""


def made_wide(broker: Broker, scale: float) -> int:
    """Create a topic with many partitions; return their number."""
    count = scaled(10_000, scale, 10)
    body = {"topic_name": WIDE, "partitions_count": count}
    httpx.post(f"{broker.base_url}/admin/topics", json=body, timeout=120)
    return count


def long_array(name: str, scale: float, broker: Broker) -> str:
    made_wide(broker, scale)
    return sent(broker, [long_arrays(scale)[name]()] * 4, at_once=2)


def schema_arrays(scale: float, broker: Broker) -> str:
    """Send a long array in each field of each request, also of APIs that are new."""
    return sent(broker, [frame_of(field, scale) for field in array_fields()], at_once=2)


def repeated_group(scale: float, broker: Broker) -> str:
    """Commit offsets with long metadata; then name the group many times in one OffsetFetch."""
    count = made_wide(broker, scale)
    for first in range(0, count, 200):
        request = group_offsets.OffsetCommitRequest(
            group_id="g",
            member_id="",
            topics=[
                group_offsets.OffsetCommitRequestTopic(
                    name=WIDE,
                    partitions=[
                        group_offsets.OffsetCommitRequestPartition(
                            partition_index=number,
                            committed_offset=0,
                            committed_metadata="m" * 4096,
                        )
                        for number in range(first, min(first + 200, count))
                    ],
                )
            ],
        )
        asked(broker, request, group_offsets.OffsetCommitResponse, 8)
    return sent(broker, [long_arrays(scale)["OffsetFetch"]()])


def joined(group: str, size: int, **timeouts: int) -> bytes:
    """Return a JoinGroup of a new member, with metadata of this size."""
    request = groups.JoinGroupRequest(
        group_id=group,
        member_id="",
        protocol_type="consumer",
        protocols=[groups.JoinGroupRequestProtocol(name="range", metadata=b"x" * size)],
        **timeouts,
    )
    return framed(request, 3)


def described_group(scale: float, broker: Broker) -> str:
    """Describe one group with much metadata many times in a request."""
    data = joined("fat", MIB - 1000, session_timeout_ms=60_000, rebalance_timeout_ms=100)
    answers = sent(broker, [data] * 3, at_once=3)
    request = groups.DescribeGroupsRequest(groups=["fat"] * scaled(1000, scale, 10))
    return answers + "; " + sent(broker, [framed(request, 5)] * 4, at_once=4)


# -- connections


def held(scale: float, broker: Broker, sends: Sequence[bytes]) -> str:
    """Send on a connection for each of `sends`, and keep the connections open."""
    with open_connections(broker, sends):
        time.sleep(HOLD_S * scale)
    return ""


def waiting(scale: float, broker: Broker) -> str:
    """Fetches of many partitions, which wait for records."""
    made_wide(broker, scale)
    asked_for = [wide_fetch(scaled(10_000, scale, 10))] * 3
    request = fetch.FetchRequest(max_wait_ms=30_000, min_bytes=MIB, topics=asked_for)
    return held(scale, broker, [cut(request, 12)] * scaled(250, scale, 3))


def waiting_small(scale: float, broker: Broker) -> str:
    """Many fetches of one partition, all of which a record ends."""
    parts = [fetch.FetchPartition(partition=0, fetch_offset=1, partition_max_bytes=1)]
    request = fetch.FetchRequest(
        max_wait_ms=30_000,
        min_bytes=MIB,
        topics=[fetch.FetchTopic(topic=NEIGHBOUR, partitions=parts)],
    )
    return held(scale, broker, [framed(request, 12)] * scaled(2_400, scale, 3))


def client_ids(scale: float, broker: Broker) -> str:
    """Send many long client ids on each connection."""
    texts = ["\U0001f600" + str(number) + "x" * 32_000 for number in range(16)]
    requests = [framed(ApiVersionsRequest(), 0, 1, text) for text in texts]
    return held(scale, broker, [b"".join(requests)] * scaled(2_400, scale, 3))


def leaving(name: str, scale: float, broker: Broker) -> str:
    """Send large requests, and close the connection soon, again and again."""
    made_wide(broker, scale)
    data = long_arrays(scale)[name]()
    for number in range(scaled(300, scale, 5)):
        with open_connections(broker, [data]):
            time.sleep(STAYS_S[number % len(STAYS_S)])
    return ""


def half_frames(scale: float, broker: Broker) -> str:
    """Begin large Produce requests, and stop before their end."""
    head = struct.pack(">ihhih", 50 * MIB, 0, 9, 1, -1)
    kinds = [head + bytes(MIB), struct.pack(">ihhih", 60_000, 3, 9, 1, -1) + bytes(50_000), b"\0\0"]
    return held(scale, broker, kinds * scaled(500, scale, 3))


def wrong_sizes(scale: float, broker: Broker) -> str:
    sizes = [0, 1, 9, -1, -(2**31), 2**31 - 1, 100 * MIB + 1]
    frames = [struct.pack(">ihhih", size, 3, 9, 1, -1) + bytes(20) for size in sizes]
    return sent(broker, frames * scaled(40, scale, 1), at_once=20)


def unread(scale: float, broker: Broker) -> str:
    """Ask for large answers, and read none."""
    made_wide(broker, scale)
    request = framed(metadata.MetadataRequest(topics=None), 9)
    return held(scale, broker, [request * 20] * scaled(400, scale, 3))


def unread_fetches(scale: float, broker: Broker) -> str:
    parts = [fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=64 * MIB)]
    request = fetch.FetchRequest(
        max_wait_ms=0, min_bytes=1, topics=[fetch.FetchTopic(topic="big", partitions=parts)]
    )
    return held(scale, broker, [framed(request, 12) * 90] * scaled(600, scale, 3))


def sessions(scale: float, broker: Broker) -> str:
    """Open fetch sessions with many partitions, and forget some of them."""
    count = made_wide(broker, scale)
    begin = fetch.FetchRequest(
        max_wait_ms=0, min_bytes=0, session_epoch=0, topics=[wide_fetch(count)]
    )
    counts: Counter[str] = Counter()
    for _ in range(scaled(60, scale, 2)):
        answer = asked(broker, begin, fetch.FetchResponse, 12)
        counts[f"session {bool(answer.session_id)}"] += 1
        for epoch in (1, 2, 2):
            next_one = fetch.FetchRequest(
                max_wait_ms=0,
                min_bytes=0,
                session_id=answer.session_id,
                session_epoch=epoch,
                topics=[],
                forgotten_topics_data=[
                    fetch.ForgottenTopic(topic=WIDE, partitions=list(range(count // 2)))
                ],
            )
            counts[f"error {asked(broker, next_one, fetch.FetchResponse, 12).error_code}"] += 1
    return str(dict(counts))


def many_at_once(name: str, scale: float, broker: Broker) -> str:
    """Send a request with a long array on many connections at once."""
    made_wide(broker, scale)
    data = long_arrays(scale)[name]()
    return sent(broker, [data] * scaled(ASKERS, scale, 4), at_once=ASKERS)


def joins(scale: float, broker: Broker) -> str:
    """Let members join groups, and send no SyncGroup."""
    timeouts = {"session_timeout_ms": 6_000, "rebalance_timeout_ms": 500}
    count = scaled(1_000, scale, 3)
    lines = []
    for size, of_group in ((10, 1), (10, 1000), (200_000, 10)):
        data = [
            joined(f"g{n // of_group}-{size}-{of_group}", size, **timeouts) for n in range(count)
        ]
        held(scale / 2, broker, data)
        lines.append(f"{len(data)} joins of {size} bytes")
    return "; ".join(lines)


def kafka_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks on the port for Kafka clients, by name."""
    table: dict[str, Attack] = {
        f"kafka array: {name}": functools.partial(long_array, name, scale)
        for name in long_arrays(scale)
    }
    for name in ("Metadata of new names", "ListOffsets by time"):
        table[f"kafka arrays at once: {name}"] = functools.partial(many_at_once, name, scale)
    for name in ("ListOffsets by time", "DeleteTopics"):
        table[f"kafka left: {name}"] = functools.partial(leaving, name, scale)
    for run in (
        schema_arrays,
        repeated_group,
        described_group,
        waiting,
        waiting_small,
        client_ids,
        half_frames,
        wrong_sizes,
        unread,
        unread_fetches,
        sessions,
        joins,
        wrong_values_sent,
    ):
        table[f"kafka: {run.__name__.replace('_', ' ')}"] = functools.partial(run, scale)
    return table
