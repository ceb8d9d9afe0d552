"""The cluster state: the fold of all WAL entries, and `apply`, which folds one more.

I4: `apply` reads no clock, no randomness and does no IO; two brokers that apply the same entries
hold the same state to the byte (`encode` is how tests compare them). A commit is checked whole
before any of it is done, so that it applies whole or leaves a recorded refusal. Time is the
entries' own.

Mutable and owned by one event loop: readers look, only `apply` writes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from storage import keys, topics
from storage.access import Access, KeptAccess
from storage.entry import (
    GENESIS,
    AccessAction,
    AddPartitions,
    AlterTopic,
    AnyAction,
    Append,
    Chunk,
    Commit,
    CommitOffsets,
    CreateTopic,
    Decoded,
    DeleteGroup,
    DeleteTopic,
    Entry,
    ForgetTopic,
    InitProducer,
    MoveLogStart,
    ProducerAppend,
    RetireHotLog,
    Sealed,
)
from storage.errors import (
    Corrupt,
    IdempotencyMismatch,
    InvalidRequest,
    LogError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from storage.group import KeptMembers
from storage.group_members import GroupMembers
from storage.groups import Groups, KeptGroups, check_group_id
from storage.model import Placement
from storage.origins import OriginMark, Origins
from storage.partition import Partition, Run
from storage.producers import KeptProducers, ProducerEpoch, Producers
from storage.requests import RememberedKey, RememberedKeys

FORMAT = 1
PARTITIONS_MAX = 10_000
"""Partitions of one topic (I10): each costs ~200 bytes of state and checkpoint on every broker."""

ELEMENTS_MIN = 9
"""Of a checkpoint's state: later ones are left out at its end while they are empty."""


class Topic(msgspec.Struct, array_like=True):
    """One topic. `topic_id` outlives neither deletion nor re-creation under the same name."""

    name: str
    topic_id: str
    created_ms: int
    configs: dict[str, str]
    partitions: list[Partition]

    @property
    def prefix(self) -> str:
        return keys.topic(self.name, self.topic_id)


class DeletedTopic(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tombstone: kept until nothing of the topic's prefix is left."""

    name: str
    topic_id: str
    deleted_ms: int


class Outcome(NamedTuple):
    """What became of a commit: placed (one placement per Append, in order), or refused with a
    reason.

    `is_duplicate`: an earlier commit of the same key, hot mark or origin was; its placements are
    given when they are remembered. `repeated` are the numbers of placements where a producer's
    batch lay already; `producer` answers an InitProducer.
    """

    placements: list[Placement]
    refusal: LogError | None = None
    is_duplicate: bool = False
    repeated: frozenset[int] = frozenset()
    producer: ProducerEpoch | None = None


class _Snapshot(msgspec.Struct, array_like=True):
    format: int
    cluster_id: str
    seq: int
    hash: bytes
    time_ms: int
    topics: list[Topic]
    deleted: list[DeletedTopic]
    keys: list[RememberedKey]
    hot_logs: dict[str, int]
    producers: KeptProducers | None = None
    groups: KeptGroups | None = None
    members: KeptMembers | None = None
    origins: list[OriginMark] = []
    access: KeptAccess | None = None


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(_Snapshot)


class ClusterState:
    """Everything that the WAL says, after entry `seq`."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.seq = 0
        self.hash = GENESIS
        self.time_ms = 0
        self.topics: dict[str, Topic] = {}
        self.deleted: list[DeletedTopic] = []
        self.hot_logs: dict[str, int] = {}
        self.origins = Origins()
        self.producers = Producers()
        self.members = GroupMembers(self.topics)
        self.groups = Groups(self.members)
        self.access = Access()
        self._keys = RememberedKeys()
        self._by_id: dict[str, Topic] = {}
        self._configs: dict[str, topics.TopicConfig] = {}

    # -- reading

    def topic(self, name: str) -> Topic:
        """The topic of that name; raises UnknownTopic."""
        try:
            return self.topics[name]
        except KeyError:
            raise UnknownTopic(name) from None

    def partition(self, name: str, partition: int) -> Partition:
        """The partition; raises UnknownTopic or UnknownPartition."""
        topic = self.topic(name)
        if not 0 <= partition < len(topic.partitions):
            raise UnknownPartition(name, partition, len(topic.partitions))
        return topic.partitions[partition]

    def topic_of_id(self, topic_id: str) -> Topic | None:
        return self._by_id.get(topic_id)

    def config(self, topic: Topic) -> topics.TopicConfig:
        """The topic's effective configs."""
        return self._configs[topic.topic_id]

    def remembered(self, key: str) -> RememberedKey | None:
        """What the request with this key was answered, as far back as the window goes."""
        return self._keys.get(key)

    # -- folding

    def apply(self, decoded: Decoded, object_key: str) -> list[Outcome]:
        """Fold the next entry in; one outcome per commit. `object_key` is where the entry lies.

        The caller has checked number and chain (`entry.decode` does).
        """
        entry = decoded.entry
        assert entry.seq == self.seq + 1, f"entry {entry.seq} after {self.seq}"
        assert entry.previous == self.hash, f"entry {entry.seq} does not follow"
        self.seq = entry.seq
        self.hash = decoded.hash
        before_ms, self.time_ms = self.time_ms, max(self.time_ms, entry.at_ms)
        self._keys.forget(self.time_ms)
        self.producers.forget(self.time_ms)
        self.groups.forget(before_ms, self.time_ms)
        repeated = self.origins.see(entry, self.time_ms)
        outcomes = [
            Outcome([], is_duplicate=True)
            if number in repeated
            else self._apply_commit(commit, entry, object_key, decoded.body_start)
            for number, commit in enumerate(entry.commits)
        ]
        self.members.settle()
        return outcomes

    def _apply_commit(
        self, commit: Commit, entry: Entry, object_key: str, body_start: int
    ) -> Outcome:
        if commit.hot is not None and commit.hot.seq <= self.hot_logs.get(commit.hot.log_id, -1):
            return Outcome([], is_duplicate=True)
        if commit.hot is not None:
            # Decided now, whatever becomes of it: a recovery must not bring it up again.
            self.hot_logs[commit.hot.log_id] = commit.hot.seq
        if commit.key is not None:
            known = self._keys.get(commit.key.key)
            if known is not None:
                return recall(known, commit.key.fingerprint)
        # Actions are checked against the state before the commit: one must not take from the next
        # what it needs, or every broker would fail at this entry for ever.
        if len(commit.actions) > 1 and any(
            isinstance(action, CreateTopic | DeleteTopic | InitProducer)
            for action in commit.actions
        ):
            why = "a topic is made or deleted, a producer begun, by a commit of its own"
            return Outcome([], InvalidRequest(why))
        for action in commit.actions:
            refusal = self._check(action, entry.chunks)
            if refusal is not None:
                return Outcome([], refusal)
        batches = self.producers.recognise(commit.actions, entry.chunks, self.time_ms)
        if isinstance(batches, LogError):
            return Outcome([], batches)
        placements: list[Placement] = []
        producer = None
        for action in commit.actions:
            if isinstance(action, Append):
                chunk = entry.chunks[action.chunk]
                base_offset = batches.first_offsets.get(len(placements))
                if base_offset is None:
                    base_offset = self._append(action, chunk, object_key, body_start)
                topic = self._by_id[chunk.topic_id]
                placements.append(Placement(topic.name, chunk.partition, base_offset, action.count))
            elif isinstance(action, InitProducer):
                producer = self.producers.init(action, self.time_ms)
            elif not batches.is_retry:
                self._do(action)
        if commit.key is not None and not batches.is_retry:
            self._keys.remember(RememberedKey(commit.key, self.time_ms, placements))
        return Outcome(placements, None, batches.is_retry, batches.repeated, producer)

    def _check(self, action: AnyAction, chunks: Sequence[Chunk]) -> LogError | None:
        match action:
            case Append():
                return self._check_append(action, chunks)
            case CommitOffsets(offsets=offsets):
                for each in offsets:
                    refusal = self._check_partition(each.topic_id, each.partition)
                    if refusal is not None:
                        return refusal
                return self.groups.check(action)
            case Sealed(topic_id, partition, offset) | MoveLogStart(topic_id, partition, offset):
                return self._check_offset(topic_id, partition, offset)
            case CreateTopic(name, topic_id, count, configs):
                if name in self.topics or topic_id in self._by_id:
                    return TopicExists(f"topic {name!r} already exists")
                if not 1 <= count <= PARTITIONS_MAX:
                    return InvalidRequest(f"a topic has 1 to {PARTITIONS_MAX} partitions: {count}")
                return topics.check_name(name) or topics.check_all(configs)
            case AlterTopic(topic_id, changes):
                if topic_id not in self._by_id:
                    return self._unknown(topic_id)
                return topics.check_all({k: v for k, v in changes.items() if v is not None})
            case AddPartitions(topic_id, count):
                topic = self._by_id.get(topic_id)
                if topic is None:
                    return self._unknown(topic_id)
                if not len(topic.partitions) < count <= PARTITIONS_MAX:
                    return InvalidRequest(
                        f"topic {topic.name!r} has {len(topic.partitions)} partitions: "
                        f"the number can only grow, to {PARTITIONS_MAX} at most, not to {count}"
                    )
                return None
            case DeleteTopic(topic_id):
                return None if topic_id in self._by_id else self._unknown(topic_id)
            case InitProducer():
                return self.producers.check_init(action)
            case RetireHotLog() | ForgetTopic():
                return None
            case _ if isinstance(action, AccessAction):
                return self.access.check(action)
            case _:
                return check_group_id(action.group_id) or self.members.check(action)

    def _check_append(self, action: Append, chunks: Sequence[Chunk]) -> LogError | None:
        if not 0 <= action.chunk < len(chunks):
            return InvalidRequest(f"append of chunk {action.chunk}, the entry has {len(chunks)}")
        chunk, first_row, count = chunks[action.chunk], action.first_row, action.count
        if first_row < 0 or count < 1 or first_row + count > chunk.rows:
            return InvalidRequest("append of rows that its chunk does not have")
        return self._check_partition(chunk.topic_id, chunk.partition)

    def _check_offset(self, topic_id: str, partition: int, offset: int) -> LogError | None:
        refusal = self._check_partition(topic_id, partition)
        if refusal is not None:
            return refusal
        if offset > self._by_id[topic_id].partitions[partition].high_watermark:
            return InvalidRequest(f"offset {offset} is beyond the high watermark")
        return None

    def _check_partition(self, topic_id: str, partition: int) -> LogError | None:
        topic = self._by_id.get(topic_id)
        if topic is None:
            return self._unknown(topic_id)
        if not 0 <= partition < len(topic.partitions):
            return UnknownPartition(topic.name, partition, len(topic.partitions))
        return None

    def _unknown(self, topic_id: str) -> UnknownTopic:
        """By the name that the topic had: nobody outside knows ids."""
        names = (gone.name for gone in self.deleted if gone.topic_id == topic_id)
        return UnknownTopic(next(names, topic_id))

    def _do(self, action: AnyAction) -> None:
        match action:
            case CommitOffsets():
                self.groups.commit(action, self.time_ms)
            case Sealed(topic_id, partition, end_offset):
                self._by_id[topic_id].partitions[partition].trim(end_offset)
            case CreateTopic(name, topic_id, count, configs):
                partitions = [Partition() for _ in range(count)]
                self._index(Topic(name, topic_id, self.time_ms, dict(configs), partitions))
                self.members.topic_changed(name, topic_id)
            case AlterTopic(topic_id, changes):
                topic = self._by_id[topic_id]
                for name, value in changes.items():
                    if value is None:
                        topic.configs.pop(name, None)
                    else:
                        topic.configs[name] = value
                self._index(topic)
            case AddPartitions(topic_id, count):
                topic = self._by_id[topic_id]
                topic.partitions += [Partition() for _ in range(count - len(topic.partitions))]
                self.members.topic_changed(topic.name, topic_id)
            case DeleteTopic(topic_id):
                self._delete(self._by_id.pop(topic_id))
            case RetireHotLog(log_id):
                self.hot_logs.pop(log_id, None)
            case MoveLogStart(topic_id, partition, offset):
                self._by_id[topic_id].partitions[partition].move_log_start(offset)
            case ForgetTopic(topic_id):
                self.deleted = [gone for gone in self.deleted if gone.topic_id != topic_id]
            case DeleteGroup(group_id):
                self.groups.delete(group_id)
                self.members.do(action, self.time_ms)
            case Append() | InitProducer():
                raise AssertionError("what has an answer is done by _apply_commit")
            case _ if isinstance(action, AccessAction):
                self.access.do(action, self.time_ms)
            case _:
                self.members.do(action, self.time_ms)

    def _delete(self, topic: Topic) -> None:
        del self.topics[topic.name]
        del self._configs[topic.topic_id]
        self.deleted.append(DeletedTopic(topic.name, topic.topic_id, self.time_ms))
        self.producers.forget_topic(topic.topic_id)
        self.groups.forget_topic(topic.topic_id)
        self.members.topic_changed(topic.name, topic.topic_id)

    def _append(self, action: Append, chunk: Chunk, object_key: str, body_start: int) -> int:
        """Where the rows begin."""
        topic = self._by_id[chunk.topic_id]
        partition = topic.partitions[chunk.partition]
        base_offset = partition.high_watermark
        inside = not chunk.data
        run = Run(
            base_offset=base_offset,
            count=action.count,
            first_row=action.first_row,
            object_key=object_key if inside else chunk.data,
            position=chunk.position + body_start if inside else chunk.position,
            size=chunk.size,
            crc32c=chunk.crc32c,
            rows=chunk.rows,
            timestamp_min=chunk.timestamp_min,
            timestamp_max=chunk.timestamp_max,
            committed_ms=self.time_ms,
            append_ms=self.time_ms if self._configs[topic.topic_id].log_append_time else -1,
            is_json=chunk.is_json,
            codec=chunk.codec,
            raw_size=chunk.raw_size,
        )
        partition.append(run)
        if isinstance(action, ProducerAppend):
            self.producers.appended(action, chunk, base_offset, self.time_ms)
        return base_offset

    def _index(self, topic: Topic) -> None:
        self.topics[topic.name] = topic
        self._by_id[topic.topic_id] = topic
        self._configs[topic.topic_id] = topics.effective(topic.configs)

    # -- checkpoints

    def encode(self) -> bytes:
        """The whole state; equal states give equal bytes."""
        snapshot = _Snapshot(
            FORMAT,
            self.cluster_id,
            self.seq,
            self.hash,
            self.time_ms,
            list(self.topics.values()),
            self.deleted,
            list(self._keys),
            self.hot_logs,
            self.producers.kept(),
            self.groups.kept(),
            self.members.kept(),
            list(self.origins),
            self.access.kept(),
        )
        elements = list(msgspec.structs.astuple(snapshot))
        # A cluster that never used what was added later has the bytes that it always had.
        while len(elements) > ELEMENTS_MIN and not elements[-1]:
            elements.pop()
        return _encoder.encode(elements)

    @classmethod
    def decode(cls, body: bytes, key: str) -> "ClusterState":
        """The state of a checkpoint; raises Corrupt naming `key`."""
        try:
            snapshot = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(key, f"checkpoint does not decode: {error}") from error
        if snapshot.format != FORMAT:
            raise Corrupt(key, f"checkpoint format {snapshot.format}, this version reads {FORMAT}")
        state = cls(snapshot.cluster_id)
        state.seq = snapshot.seq
        state.hash = snapshot.hash
        state.time_ms = snapshot.time_ms
        state.deleted = snapshot.deleted
        state.hot_logs = snapshot.hot_logs
        state.producers = Producers.restored(snapshot.producers)
        state.groups = Groups(state.members, snapshot.groups)
        state.access = Access(snapshot.access)
        for topic in snapshot.topics:
            state._index(topic)
        state.members.load(snapshot.members)
        for remembered in snapshot.keys:
            state._keys.remember(remembered)
        state.origins.load(snapshot.origins)
        return state

    def partitions(self) -> Iterator[tuple[Topic, int, Partition]]:
        """Every partition of every topic."""
        for topic in self.topics.values():
            for number, partition in enumerate(topic.partitions):
                yield topic, number, partition


def recall(known: RememberedKey, fingerprint: bytes) -> Outcome:
    """The answer to a request whose key is known: the first answer, or a refusal of another
    body."""
    if known.claim.fingerprint != fingerprint:
        return Outcome([], another_request(known.claim.key))
    return Outcome(known.placements, is_duplicate=True)


def another_request(key: str) -> IdempotencyMismatch:
    """What a request is told whose key stands for a request with another body."""
    return IdempotencyMismatch(f"idempotency key {key!r} was used for another request")
