"""Records, requests and drafts for tests, and the plainest possible reader of a WAL."""

from collections.abc import Mapping, Sequence

import msgspec

from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Draft, HotMark, IdempotencyKey
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import AnyAction, CreateTopic
from tidelog.storage.core.errors import ObjectNotFound
from tidelog.storage.runtime.clock import Clock, SystemClock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.wal_objects import ClusterIdentity, WalObjects, empty_state
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.requests import AppendRequest, TopicRecords

TOPIC_ID = "a1" * 16
TIME_MS = 1_700_000_000_000


def rows(*values: bytes | str, timestamps: Sequence[int] | None = None) -> Rows:
    """One record a value; a millisecond apart without `timestamps`."""
    encoded: list[bytes | None] = [v.encode() if isinstance(v, str) else v for v in values]
    stamps = [TIME_MS + i for i in range(len(values))] if timestamps is None else list(timestamps)
    return Rows(stamps, [None] * len(values), encoded)


def request(
    clock: Clock,
    parts: Mapping[int, Rows],
    *,
    topic_id: str = TOPIC_ID,
    key: IdempotencyKey | None = None,
    hot: HotMark | None = None,
    actions: Sequence[AnyAction] = (),
) -> AppendRequest:
    """A request to one topic; its size is that of its values."""
    size = sum(len(value or b"") for part in parts.values() for value in part.values)
    return AppendRequest(
        [TopicRecords(topic_id, partition, part) for partition, part in parts.items()],
        size,
        key=key,
        hot=hot,
        actions=actions,
        topic_id=topic_id,
        commit_id=clock.new_id(),
    )


def draft(*requests: AppendRequest) -> Draft:
    return ClosedSegment(requests, SystemClock().new_id).encode("").draft


def creating(clock: Clock, name: str = "t", partitions: int = 1, topic_id: str = TOPIC_ID) -> Draft:
    """A draft that makes a topic."""
    action = CreateTopic(name, topic_id, partitions, {})
    return draft(AppendRequest((), 0, actions=[action]))


async def found_cluster(store: ObjectStore, level: int) -> None:
    """Found a cluster of this level, as a version that does not know a newer one."""
    identity = ClusterIdentity(level, "c0ffee", 1)
    await store.create(object_keys.CLUSTER, [msgspec.json.encode(identity)])


async def entries_of(store: ObjectStore, first: int = 1) -> list[tuple[str, entries.DecodedEntry]]:
    """Every entry from number `first` on, its chain verified."""
    keyed_entries: list[tuple[str, entries.DecodedEntry]] = []
    previous = entries.GENESIS if first == 1 else None
    while True:
        key = object_keys.wal(first + len(keyed_entries))
        try:
            body = await store.get(key)
        except ObjectNotFound:
            return keyed_entries
        decoded = entries.decode(body, key, seq=first + len(keyed_entries), previous=previous)
        previous = decoded.hash
        keyed_entries.append((key, decoded))


async def fold(store: ObjectStore, cluster_id: str) -> tuple[ClusterState, list[list[Outcome]]]:
    """The state of a WAL that begins at 1, and the outcomes of each entry."""
    identity = await WalObjects(store, SystemClock()).open_cluster(cluster_id, is_creating=False)
    state = empty_state(identity)
    outcomes = [state.apply(decoded, key).outcomes for key, decoded in await entries_of(store)]
    return state, outcomes


async def tail_values(
    store: ObjectStore, state: ClusterState, topic: str, partition: int
) -> list[bytes | None]:
    """The values of a partition's tail in offset order, read chunk by chunk; no offset missing."""
    partition_state = state.partition(topic, partition)
    values: list[bytes | None] = []
    offset = (
        partition_state.tail[0].base_offset
        if partition_state.tail
        else partition_state.high_watermark
    )
    for run in partition_state.tail:
        assert run.base_offset == offset
        body = await store.get_range(run.object_key, run.position, run.size)
        batch = run.decode(body)
        values += batch.slice(run.first_row, run.count).column("value").to_pylist()
        offset = run.end_offset
    assert offset == partition_state.high_watermark
    return values
