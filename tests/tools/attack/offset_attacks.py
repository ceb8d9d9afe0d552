"""Small requests whose answers have all committed offsets of several groups."""

import functools

from tests.service.kafka.wire import framed
from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.kafka_client import sent
from tests.tools.attack.measure import Attack, scaled
from tidelog.service.kafka.messages import group_offsets

MEMBER = "member"
PREFIX = "offsets-"
"""The principal may use its own groups and topics, as a tenant does."""


def committing(group_id: str, topics: list[str], partitions: int) -> bytes:
    parts = [
        group_offsets.OffsetCommitRequestPartition(
            partition_index=number, committed_offset=0, committed_metadata=None
        )
        for number in range(partitions)
    ]
    named = [
        group_offsets.OffsetCommitRequestTopic(name=topic, partitions=parts) for topic in topics
    ]
    request = group_offsets.OffsetCommitRequest(group_id=group_id, member_id="", topics=named)
    return framed(request, 8)


def all_offsets(scale: float, broker: SecuredBroker) -> str:
    """Commit offsets in the partitions of a few topics for four groups, then ask for all."""
    partitions, topics = scaled(10_000, scale, 100), [f"{PREFIX}{number}" for number in range(3)]
    for topic in topics:
        broker.create_topic(topic, partitions)
    broker.allow(MEMBER, "READ", "TOPIC", PREFIX, "PREFIXED")
    broker.allow(MEMBER, "READ", "GROUP", PREFIX, "PREFIXED")
    principal, names = broker.principal(MEMBER), [f"{PREFIX}{number}" for number in range(4)]
    commits = sent(broker, [committing(name, topics, partitions) for name in names], 1, principal)
    groups = [group_offsets.OffsetFetchRequestGroup(group_id=name, topics=None) for name in names]
    fetch = framed(group_offsets.OffsetFetchRequest(groups=groups), 8)
    return f"{commits}; {sent(broker, [fetch] * scaled(20, scale, 2), 4, principal)}"


def offset_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {"offsets: all of four groups": functools.partial(all_offsets, scale)}
