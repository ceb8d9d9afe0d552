"""The cluster state: the result of applying all WAL entries in order.

I4: `apply` reads no clock, uses no randomness and does no IO. Two brokers that apply the same
entries have equal states, to the byte (tests compare `encode`). `apply` checks all actions of a
commit before it applies the first one. So it applies all actions, or refuses the commit.

The state has two times (state.elapsed). `time_ms`, the time of the newest entry, stamps new data.
`elapsed_ms` decides when data is forgotten. At level 1 both are the greatest `at_ms`.

The state is mutable and owned by one event loop. Only `apply` changes it.
"""

import contextlib
from collections.abc import Iterator, Sequence

from tidelog.storage.codec.entry import GENESIS, Commit, DecodedEntry, Entry
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import (
    AccessAction,
    AddPartitions,
    AlterTopic,
    AnyAction,
    Append,
    Chunk,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    ForgetTopic,
    HoldAction,
    InitProducer,
    LoseRecords,
    MoveLogStart,
    ProducerAppend,
    ReserveProducers,
    RetireHotLog,
    Sealed,
    SetBounds,
    SetTopicDefaults,
)
from tidelog.storage.core.errors import (
    Corrupt,
    InvalidRequest,
    LogError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.core.time_bounds import DEFAULT_BOUNDS, Bounds
from tidelog.storage.core.topic_configs import NO_DEFAULTS, TopicDefaults
from tidelog.storage.state import principal_shares, state_checkpoint, topic_checks
from tidelog.storage.state.access import Access
from tidelog.storage.state.applied_drafts import AppliedDrafts
from tidelog.storage.state.collection_holds import Holds
from tidelog.storage.state.committed_offsets import CommittedOffsets, check_group_id
from tidelog.storage.state.elapsed_time import ElapsedTime
from tidelog.storage.state.group_members import GroupMembers
from tidelog.storage.state.idempotency_records import IdempotencyRecord, IdempotencyRecords, recall
from tidelog.storage.state.outcome import Applied, Outcome
from tidelog.storage.state.partition import Partition, TailChunk
from tidelog.storage.state.principal_shares import Need, Shares
from tidelog.storage.state.producers import NOTHING, ProducerOwners, Producers
from tidelog.storage.state.state_checkpoint import (
    KafkaCheckpoint,
    OwnersCheckpoint,
    StateCheckpoint,
)
from tidelog.storage.state.tail_chunk_counts import TailChunks
from tidelog.storage.state.time_bounds_in_effect import ClusterBounds
from tidelog.storage.state.topic import DeletedTopic, Topic
from tidelog.storage.state.topic_owners import TopicOwners

__all__ = ["Applied", "ClusterState", "DeletedTopic", "Topic"]

ALONE = (CreateTopic, DeleteTopic, InitProducer, ReserveProducers, SetBounds)
"""A commit with one of these actions must have no other action."""


class ClusterState:
    """The state of a cluster after entry `seq`. A broker's WAL view owns it."""

    def __init__(
        self, cluster_id: str, level: int = format_levels.NEWEST, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        """Make the state before the first entry. `cluster.json` has the level and the bounds."""
        self.cluster_id = cluster_id
        self.level = level
        self.seq = 0
        self.hash = GENESIS
        self.time_ms = 0
        self.topics: dict[str, Topic] = {}
        self.deleted: list[DeletedTopic] = []
        self.hot_logs: dict[str, int] = {}
        self.origins = AppliedDrafts()
        self.shares = Shares()
        self.producers = Producers(self.shares)
        self.members = GroupMembers(self.topics, self.shares)
        self.committed_offsets = CommittedOffsets(self.members, shares=self.shares)
        self.access = Access(shares=self.shares)
        self.elapsed = ElapsedTime()
        self.bounds = ClusterBounds(bounds)
        self.holds = Holds()
        self._keys = IdempotencyRecords(self.shares)
        self._by_id: dict[str, Topic] = {}
        self._checks = topic_checks.TopicChecks(self._by_id, self.deleted)
        self.owners = TopicOwners(self._by_id, self.shares)
        self.tail_chunks = TailChunks(self._by_id, self.owners, self.shares)
        self._deleted_now: list[Topic] = []  # by the entry that is being applied
        self.defaults = NO_DEFAULTS

    # -- reading

    @property
    def elapsed_ms(self) -> int:
        return self.time_ms if self.level == format_levels.FIRST else self.elapsed.now_ms

    def topic(self, name: str) -> Topic:
        try:
            return self.topics[name]
        except KeyError:
            raise UnknownTopic(name) from None

    def partition(self, name: str, partition: int) -> Partition:
        topic = self.topic(name)
        if not 0 <= partition < len(topic.partitions):
            raise UnknownPartition(name, partition, len(topic.partitions))
        return topic.partitions[partition]

    def topic_of_id(self, topic_id: str) -> Topic | None:
        return self._by_id.get(topic_id)

    def idempotency_record(self, key: str, principal: str = "") -> IdempotencyRecord | None:
        """Return the record of the principal's request with this key, or None."""
        return self._keys.get(key, self.owner(principal))

    def check_new_key(self, principal: str, placements: int) -> LogError | None:
        """Return why a request with a new idempotency key is above a share now, or None.

        The request is of the principal, with so many placements.
        """
        if self.level < principal_shares.LEVEL:
            return None
        return self._keys.refusal(principal, placements, self.access.quota)

    @contextlib.contextmanager
    def admitted(self, actions: Sequence[AnyAction]) -> Iterator[None]:
        """Count what the actions add to bounds that `apply` does not check.

        They count as long as a broker commits them. Raises BoundReached, if that is above a share.
        """
        has_shares = self.level >= principal_shares.LEVEL
        needs = [need for action in actions if has_shares for need in self.members.growth(action)]
        if (refusal := self.shares.refusal(needs, self.access.quota)) is not None:
            raise refusal
        for need in needs:
            self.shares.add(need.bound, need.principal, need.more)
        try:
            yield
        finally:
            for need in needs:
                self.shares.add(need.bound, need.principal, -need.more)

    def owner(self, principal: str) -> str:
        """Return the owner of the data that a commit of this principal adds; "" below level 3."""
        return principal if self.level >= principal_shares.LEVEL else ""

    # -- applying

    def apply(self, decoded: DecodedEntry, object_key: str) -> Applied:
        """Apply the next entry and return its result. `object_key` is the entry's key.

        `entry.decode` must have checked the entry's number and previous hash. If the entry has
        another level than the cluster and does not raise it, raises Corrupt and changes nothing.
        """
        entry = decoded.entry
        assert entry.seq == self.seq + 1, f"entry {entry.seq} after {self.seq}"
        assert entry.previous == self.hash, f"entry {entry.seq} does not follow"
        if entry.level != self.level:
            self._raise_level(entry, object_key)
        self.seq = entry.seq
        self.hash = decoded.hash
        before_ms = self.elapsed_ms
        self._advance(entry)
        now_ms = self.elapsed_ms
        self.bounds.settle(now_ms)
        is_bounded = self.level < principal_shares.LEVEL
        self._keys.forget(now_ms, is_bounded=is_bounded)
        self.producers.forget(now_ms, is_bounded=is_bounded)
        self.holds.forget(now_ms)
        self.committed_offsets.forget(before_ms, now_ms)
        repeated = self.origins.see(entry, now_ms)
        outcomes = [
            Outcome([], is_duplicate=True)
            if number in repeated
            else self._apply_commit(commit, entry, object_key, decoded.body_start)
            for number, commit in enumerate(entry.commits)
        ]
        self.tail_chunks.settle()
        deleted, self._deleted_now = self._deleted_now, []
        return Applied(outcomes, deleted, self.members.settle())

    def _advance(self, entry: Entry) -> None:
        if self.level == format_levels.FIRST:
            self.time_ms = max(self.time_ms, entry.at_ms)
            return
        self.elapsed.see(entry.writer, entry.at_ms)
        self.time_ms = entry.time_ms

    def _raise_level(self, entry: Entry, object_key: str) -> None:
        """Raise the level by one.

        The entry has no commits and no chunks, so an older version can decode it and name its level
        in the error.
        """
        if entry.level != self.level + 1 or entry.commits or entry.chunks:
            raise Corrupt(object_key, f"it has level {entry.level} in a cluster of {self.level}")
        if self.level == format_levels.FIRST:
            self.elapsed.now_ms = self.time_ms  # keep older stamps comparable
        self.level = entry.level

    def _apply_commit(
        self, commit: Commit, entry: Entry, object_key: str, body_start: int
    ) -> Outcome:
        if commit.hot is not None and commit.hot.seq <= self.hot_logs.get(commit.hot.log_id, -1):
            return Outcome([], is_duplicate=True)
        if commit.hot is not None:
            # Set even if the commit is refused: a recovery must not commit it again.
            self.hot_logs[commit.hot.log_id] = commit.hot.seq
        owner = self.owner(commit.principal)
        if commit.key is not None:
            record = self._keys.get(commit.key.key, owner)
            if record is not None:
                return recall(record, commit.key.fingerprint)
        other_actions = [action for action in commit.actions if type(action) is not Append]
        # Each action is checked against the state before the commit. If one action of a commit
        # removed data that a later action needs, no broker could ever apply this entry.
        if len(commit.actions) > 1 and any(isinstance(action, ALONE) for action in other_actions):
            kinds = ", ".join(str(kind.__struct_config__.tag) for kind in ALONE)
            return Outcome([], InvalidRequest(f"a commit with one of {kinds} has no other action"))
        for action in commit.actions:
            refusal = self._check(action, entry.chunks)
            if refusal is not None:
                return Outcome([], refusal)
        batches = (
            self.producers.recognise(commit.actions, entry.chunks, self.elapsed_ms)
            if other_actions
            else NOTHING
        )
        if isinstance(batches, LogError):
            return Outcome([], batches)
        if (other_actions or commit.key is not None) and not batches.is_retry:
            refusal = self._check_together(commit, other_actions, entry.chunks)
            if refusal is not None:
                return Outcome([], refusal)
        placements: list[AppendedRange] = []
        producer = None
        for action in commit.actions:
            if isinstance(action, Append):
                chunk = entry.chunks[action.chunk]
                base_offset = batches.first_offsets.get(len(placements))
                if base_offset is None:
                    base_offset = self._append(action, chunk, object_key, body_start, owner)
                topic = self._by_id[chunk.topic_id]
                placements.append(
                    AppendedRange(topic.name, chunk.partition, base_offset, action.count)
                )
            elif isinstance(action, InitProducer):
                producer = self.producers.init(action, self.elapsed_ms, owner)
            elif isinstance(action, ReserveProducers):
                producer = self.producers.reserve(action, self.elapsed_ms)
            elif not batches.is_retry:
                self._do(action, owner)
        if commit.key is not None and not batches.is_retry:
            self._keys.remember(IdempotencyRecord(commit.key, self.elapsed_ms, placements), owner)
        return Outcome(placements, None, batches.is_retry, batches.repeated, producer)

    def _check_together(
        self, commit: Commit, other_actions: Sequence[AnyAction], chunks: Sequence[Chunk]
    ) -> LogError | None:
        """Return why the actions cannot be in one commit, or None.

        Call this after all other checks: a broker without `check_order` raises where it refuses, so
        no log has such a commit.
        """
        return self._check_shares(commit, other_actions, chunks) or self.holds.check_order(
            other_actions
        )

    def _check_shares(
        self, commit: Commit, other_actions: Sequence[AnyAction], chunks: Sequence[Chunk]
    ) -> LogError | None:
        """Return why the commit would exceed a bound or a share, or None.

        Do not refuse a commit of a hot log: its client has the answer already, and acknowledged
        records would be lost.
        """
        if self.level < principal_shares.LEVEL or commit.hot is not None:
            return None
        parts = (self.owners, self.producers, self.committed_offsets, self.members, self.access)
        needs: list[Need] = []
        for action in other_actions:
            for part in parts:
                needs += part.needs(action, commit.principal, chunks)
        if commit.key is not None:
            needs.append(self._keys.needs(commit.principal))
        return self.shares.refusal(needs, self.access.quota)

    def _check(self, action: AnyAction, chunks: Sequence[Chunk]) -> LogError | None:
        match action:
            case Append():
                return self._checks.check_append(action, chunks)
            case CommitOffsets(offsets=offsets):
                for group_offset in offsets:
                    refusal = self._checks.check_partition(
                        group_offset.topic_id, group_offset.partition
                    )
                    if refusal is not None:
                        return refusal
                return self.committed_offsets.check(action)
            case (
                Sealed(topic_id, partition, offset)
                | MoveLogStart(topic_id, partition, offset)
                | LoseRecords(topic_id, partition, _, offset)
            ):
                return self._checks.check_offset(topic_id, partition, offset)
            case CreateTopic(name, topic_id):
                if name in self.topics or topic_id in self._by_id:
                    return TopicExists(f"topic {name!r} already exists")
                return topic_checks.check_create(action, self.level)
            case AlterTopic() | SetTopicDefaults():
                return self._checks.check_configs(action, self.level)
            case AddPartitions(topic_id):
                topic = self._by_id.get(topic_id)
                if topic is None:
                    return self._checks.unknown(topic_id)
                return topic_checks.check_growth(action, topic.name, len(topic.partitions))
            case DeleteTopic(topic_id):
                return None if topic_id in self._by_id else self._checks.unknown(topic_id)
            case InitProducer() | ReserveProducers():
                return self.producers.check_ids(action, self.level)
            case RetireHotLog() | ForgetTopic() | DeleteOffsets():
                return None
            case SetBounds():
                return self.bounds.check(action)
            case _ if isinstance(action, AccessAction):
                return self.access.check(action, self.level)
            case _ if isinstance(action, HoldAction):
                return self.holds.check(action)
            case _:
                return check_group_id(action.group_id) or self.members.check(action)

    def _do(self, action: AnyAction, owner: str) -> None:
        match action:
            case CommitOffsets() | DeleteOffsets():
                self.committed_offsets.do(action, self.elapsed_ms, owner)
            case Sealed(topic_id, partition, end_offset):
                self.tail_chunks.growth[topic_id] -= (
                    self._by_id[topic_id].partitions[partition].trim(end_offset)
                )
            case CreateTopic(name, topic_id, count, configs):
                partitions = [Partition() for _ in range(count)]
                self._index(Topic(name, topic_id, self.time_ms, dict(configs), partitions))
                self.owners.created(topic_id, owner)
                self.members.topic_changed(name, topic_id)
            case AlterTopic(topic_id, changes):
                self._by_id[topic_id].alter(changes)
            case SetTopicDefaults(changes):
                self._set_defaults(self.defaults.changed(changes))
            case AddPartitions(topic_id, count):
                self.owners.grown(topic_id, self._by_id[topic_id].grow(count), owner)
                self.members.topic_changed(self._by_id[topic_id].name, topic_id)
            case DeleteTopic(topic_id):
                self._delete(self._by_id[topic_id])
            case RetireHotLog(log_id):
                self.hot_logs.pop(log_id, None)
            case MoveLogStart(topic_id, partition, offset):
                self._by_id[topic_id].partitions[partition].move_log_start(offset)
            case LoseRecords(topic_id, partition, first, end):
                self.tail_chunks.growth[topic_id] += (
                    self._by_id[topic_id].partitions[partition].lose(first, end)
                )
            case SetBounds():
                self.bounds.set(action, self.elapsed_ms)
            case ForgetTopic(topic_id):
                self.deleted[:] = [topic for topic in self.deleted if topic.topic_id != topic_id]
            case DeleteGroup(group_id):
                self.committed_offsets.delete(group_id)
                self.members.do(action, self.elapsed_ms)
            case Append() | InitProducer() | ReserveProducers():
                raise AssertionError("_apply_commit applies actions that have a result")
            case _ if isinstance(action, AccessAction):
                self.access.do(action, self.time_ms)
            case _ if isinstance(action, HoldAction):
                self.holds.do(action, self.time_ms, self.elapsed_ms)
            case _:
                self.members.do(action, self.elapsed_ms)

    def _delete(self, topic: Topic) -> None:
        del self.topics[topic.name]
        self.tail_chunks.removed(topic.topic_id)
        self.owners.removed(topic.topic_id)
        del self._by_id[topic.topic_id]
        self._deleted_now.append(topic)
        self.deleted.append(DeletedTopic(topic.name, topic.topic_id, self.time_ms))
        self.producers.forget_topic(topic.topic_id)
        self.committed_offsets.forget_topic(topic.topic_id)
        self.members.topic_changed(topic.name, topic.topic_id)

    def _append(
        self, action: Append, chunk: Chunk, object_key: str, body_start: int, owner: str
    ) -> int:
        topic = self._by_id[chunk.topic_id]
        partition = topic.partitions[chunk.partition]
        base_offset = partition.high_watermark
        tail_chunk = TailChunk.of_chunk(
            chunk,
            action,
            base_offset=base_offset,
            entry_key=object_key,
            body_start=body_start,
            committed_ms=self.time_ms,
            append_ms=self.time_ms if topic.config.is_log_append_time else -1,
        )
        self.tail_chunks.growth[chunk.topic_id] += partition.append(tail_chunk)
        if isinstance(action, ProducerAppend):
            self.producers.appended(action, chunk, base_offset, self.elapsed_ms, owner)
        return base_offset

    def _index(self, topic: Topic) -> None:
        self.topics[topic.name] = topic
        self._by_id[topic.topic_id] = topic
        topic.inherit(self.defaults)

    def _set_defaults(self, defaults: TopicDefaults) -> None:
        self.defaults = defaults
        for topic in self._by_id.values():  # cheap: a topic parses its configs at the next use
            topic.inherit(defaults)

    # -- checkpoints

    def encode(self) -> bytes:
        """Return the state as a checkpoint's body. Equal states give equal bytes."""
        return state_checkpoint.encode(self.snapshot())

    def equals(self, other: "ClusterState") -> bool:
        """Return whether both states are equal.

        The order of groups has no meaning: earlier versions did not keep it when a group changed
        its kind (FORMAT.md section 5).
        """
        ordered = state_checkpoint.with_groups_in_order
        return ordered(self.snapshot()) == ordered(other.snapshot())

    def snapshot(self) -> StateCheckpoint:
        records = self._keys.kept()
        return StateCheckpoint(
            self.level,
            self.cluster_id,
            self.seq,
            self.hash,
            self.time_ms,
            list(self.topics.values()),
            self.deleted,
            records.pop("", []),
            self.hot_logs,
            self.producers.kept(),
            self.committed_offsets.encoded(),
            self.members.kept(),
            list(self.origins),
            self.access.kept(),
            self.elapsed.kept() if self.level > format_levels.FIRST else None,
            self.bounds.kept() if self.level > format_levels.FIRST else None,
            list(self.holds),
            OwnersCheckpoint(
                self.owners.by_id, self.committed_offsets.owners, records, self.producers.owners()
            ),
            KafkaCheckpoint(self.producers.reserved, self.members.kept_of_clients()),
            self.defaults.values,
        )

    @classmethod
    def decode(cls, body: bytes, key: str, bounds: Bounds = DEFAULT_BOUNDS) -> "ClusterState":
        """Decode a checkpoint's body.

        Raises Corrupt with the checkpoint's `key`, or NewerLevel. A checkpoint of level 1 has no
        bounds; the state gets `bounds`, from `cluster.json`.
        """
        snapshot = state_checkpoint.decode(body, key)
        owners = snapshot.owners or OwnersCheckpoint({}, {}, {}, ProducerOwners())
        state = cls(snapshot.cluster_id, snapshot.level, bounds)
        state.seq = snapshot.seq
        state.hash = snapshot.hash
        state.time_ms = snapshot.time_ms
        state.deleted += snapshot.deleted
        state.hot_logs = snapshot.hot_logs
        state.producers = Producers.restored(snapshot.producers, state.shares, owners.producers)
        state.committed_offsets = CommittedOffsets(
            state.members, snapshot.committed_offsets, state.shares, owners.groups
        )
        state.access = Access(snapshot.access, state.shares)
        state.elapsed.load(snapshot.elapsed)
        state.bounds.load(snapshot.bounds)
        state.holds = Holds(snapshot.holds)
        state.defaults = TopicDefaults(snapshot.defaults)
        for topic in snapshot.topics:
            state._index(topic)
        state.owners.load(owners.topics)
        state.tail_chunks.load()
        kafka = snapshot.kafka or KafkaCheckpoint([], [])
        state.members.load(snapshot.members, kafka.groups)
        state._keys.load({"": snapshot.keys, **owners.keys})
        state.origins.load(snapshot.origins)
        state.producers.reserved += kafka.reserved_ids
        return state

    def partitions(self) -> Iterator[tuple[Topic, int, Partition]]:
        for topic in self.topics.values():
            for number, partition in enumerate(topic.partitions):
                yield topic, number, partition
