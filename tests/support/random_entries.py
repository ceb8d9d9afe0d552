"""Random entries for one cluster state, with actions of all kinds in one commit.

Names, ids and offsets come from small pools and from the state itself, so that most actions concern
what exists: they are applied, or a rule refuses them. A new kind of action needs a row in `KINDS`.
"""

import random
from collections.abc import Callable, Collection
from typing import get_args

from tidelog.storage.codec import entry
from tidelog.storage.codec.entry import (
    Commit,
    DecodedEntry,
    DraftId,
    Entry,
    HotMark,
    IdempotencyKey,
)
from tidelog.storage.core import acls, actions, format_levels
from tidelog.storage.core.acls import Acl
from tidelog.storage.core.actions import AnyAction, Chunk
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.group_state import ConsumerGroup

START_MS = 1_700_000_000_000
STEPS_MS = (0, 1, 10, 1_000, 60_000, 599_000, 3_600_000, 86_400_000)
"""Steps of a writer's clock. The longest let holds, keys, producers and offsets expire."""
WRITERS = ("a", "b", "c")
GROUPS = ("g0", "g1", "g2", "g3")
TOPICS = ("t", "u", "v", "w")
PRINCIPALS = ("", "User:a", "User:b", acls.ADMIN)
HOLDS = ("h0", "h1", "h2")
KEYS = ("k0", "k1", "k2")
NO_TOPIC = "f" * 32
ACLS = tuple(
    Acl(acls.TOPIC, name, acls.LITERAL, principal, acls.WILDCARD, acls.READ, acls.ALLOW)
    for name in TOPICS[:2]
    for principal in PRINCIPALS[1:]
)


class RandomEntries:
    """The next entry of a state, again and again.

    All draws come from `draw`. `kinds` are the kinds of its actions, all of them if it is empty.
    """

    def __init__(
        self, draw: random.Random, kinds: Collection[type[AnyAction]] = frozenset()
    ) -> None:
        self.draw = draw
        self._kinds = kinds or KINDS.keys()
        self._clocks = dict.fromkeys(WRITERS, START_MS)

    def next(self, state: ClusterState) -> DecodedEntry:
        """Return an entry that follows the state's last entry.

        `apply` may apply it to this state, and to each equal state. The object's key is
        `entry_key`.
        """
        draw = self.draw
        raises = state.level < format_levels.NEWEST and draw.random() < 0.01
        level = state.level + raises
        writer = draw.choice(WRITERS)
        self._clocks[writer] += draw.choice(STEPS_MS)
        content = RandomActions(draw, state, self._clocks[writer], self._kinds)
        commits = [] if raises else [content.commit() for _ in range(draw.randint(1, 3))]
        origins: list[DraftId] = []
        if commits and draw.random() < 0.2:
            origins.append(DraftId(draw.choice(WRITERS), draw.randint(1, 9), len(commits)))
        return written(
            Entry(
                level,
                state.seq + 1,
                state.hash,
                draw.randbytes(16),
                writer,
                self._clocks[writer],
                content.chunks,
                commits,
                origins,
            )
        )


def written(new: Entry) -> DecodedEntry:
    """Return the entry as a broker decodes it from its object."""
    head, _ = entry.encode_header(new)
    return entry.decode(head, entry_key(new.seq), seq=new.seq, previous=new.previous)


def entry_key(seq: int) -> str:
    return f"wal/{seq:020d}"


class RandomActions:
    """The commits and chunks of one entry."""

    def __init__(
        self,
        draw: random.Random,
        state: ClusterState,
        now_ms: int,
        kinds: Collection[type[AnyAction]],
    ) -> None:
        self.draw = draw
        self.state = state
        self.now_ms = now_ms
        self.chunks: list[Chunk] = []
        self._kinds = [kind for kind in kinds if level_of(kind) <= state.level]

    def commit(self) -> Commit:
        """Return a commit of one to four actions.

        Some have a key, a hot mark, a principal and the same actions again in another order.
        """
        draw = self.draw
        count = draw.choice((1, 1, 2, 3, 4))
        drawn = [KINDS[draw.choice(self._kinds)](self) for _ in range(count)]
        if draw.random() < 0.2:
            drawn += draw.sample(drawn, draw.randint(1, count))
        key = hot = None
        if draw.random() < 0.2:
            key = IdempotencyKey(draw.choice(KEYS), b"f" * 16, 1)
        if draw.random() < 0.1:
            hot = HotMark(draw.choice(("l0", "l1")), draw.randrange(50))
        principal = "" if self.state.level == format_levels.FIRST else draw.choice(PRINCIPALS)
        return Commit(draw.randbytes(16), drawn, key, hot, principal)

    # -- what the actions name

    def topic_id(self) -> str:
        topics = list(self.state.topics.values())
        return self.draw.choice(topics).topic_id if topics and self.is_likely() else NO_TOPIC

    def partition(self) -> TopicIdPartition:
        topic = self.state.topic_of_id(self.topic_id())
        if topic is None:
            return TopicIdPartition(NO_TOPIC, 0)
        count = len(topic.partitions)
        return TopicIdPartition(topic.topic_id, self.draw.randrange(count + (not self.is_likely())))

    def offset(self, topic_partition: TopicIdPartition) -> int:
        topic = self.state.topic_of_id(topic_partition.topic_id)
        if topic is None or topic_partition.partition >= len(topic.partitions):
            return self.draw.randrange(5)
        end = topic.partitions[topic_partition.partition].high_watermark
        return self.draw.randint(0, end + (not self.is_likely()))

    def group(self) -> tuple[str, ConsumerGroup | None]:
        group_id = self.draw.choice(GROUPS)
        return group_id, self.state.members.get(group_id)

    def member(self) -> tuple[str, str, ConsumerGroup | None]:
        """Return a group's id, a member's id, and the group. Most groups have this member."""
        group_id, group = self.group()
        if group is None or not group.members or not self.is_likely():
            return group_id, f"m{self.draw.randrange(6)}", group
        return group_id, self.draw.choice(list(group.members)), group

    def is_likely(self) -> bool:
        return self.draw.random() < 0.95

    # -- records

    def chunk(self) -> tuple[int, int]:
        """Add a chunk; return its number and its rows."""
        topic_partition = self.partition()
        rows = self.draw.randint(1, 4)
        position = sum(chunk.size for chunk in self.chunks)
        self.chunks.append(
            Chunk(*topic_partition, position, 10, 0, rows, self.now_ms, self.now_ms, False, "", 10)
        )
        return len(self.chunks) - 1, rows

    def append(self) -> AnyAction:
        number, rows = self.chunk()
        return actions.Append(number, 0, rows)

    def append_of_producer(self) -> AnyAction:
        draw = self.draw
        number, rows = self.chunk()
        sequence = draw.choice((0, 0, rows, 2 * rows, 3, 2**31 - 1))
        producer_id = draw.randrange(6)
        return actions.ProducerAppend(
            number, 0, rows, producer_id, draw.choice((0, 0, 0, 1)), sequence
        )

    def init_producer(self) -> AnyAction:
        draw = self.draw
        return actions.InitProducer(draw.choice((-1, 0, 1, 2)), draw.choice((-1, 0, 1)))

    def reserve_producers(self) -> AnyAction:
        return actions.ReserveProducers(self.draw.choice((1, 3)))

    def lose_records(self) -> AnyAction:
        topic_partition = self.partition()
        first, end = sorted((self.offset(topic_partition), self.offset(topic_partition)))
        return actions.LoseRecords(*topic_partition, first, end)

    def move_log_start(self) -> AnyAction:
        topic_partition = self.partition()
        return actions.MoveLogStart(*topic_partition, self.offset(topic_partition))

    def sealed(self) -> AnyAction:
        topic_partition = self.partition()
        return actions.Sealed(*topic_partition, self.offset(topic_partition))

    # -- topics

    def create_topic(self) -> AnyAction:
        draw = self.draw
        topic_id = draw.randbytes(16).hex()
        return actions.CreateTopic(draw.choice(TOPICS), topic_id, draw.randint(1, 3), {})

    def delete_topic(self) -> AnyAction:
        return actions.DeleteTopic(self.topic_id() if self.draw.random() < 0.3 else NO_TOPIC)

    def alter_topic(self) -> AnyAction:
        value = self.draw.choice(("1000", None))
        return actions.AlterTopic(self.topic_id(), {"retention.ms": value})

    def set_topic_defaults(self) -> AnyAction:
        name = self.draw.choice(("log.retention.ms", "num.partitions"))
        return actions.SetTopicDefaults({name: self.draw.choice(("3", None))})

    def add_partitions(self) -> AnyAction:
        return actions.AddPartitions(self.topic_id(), self.draw.randint(1, 6))

    def forget_topic(self) -> AnyAction:
        deleted = [topic.topic_id for topic in self.state.deleted]
        return actions.ForgetTopic(self.draw.choice([*deleted, self.topic_id()]))

    # -- groups

    def commit_offsets(self) -> AnyAction:
        group_id, member_id, group = self.member()
        draw = self.draw
        if group is None or not group.members or draw.random() < 0.2:
            member_id = ""
        offsets = [
            actions.GroupOffset(
                *topic_partition, self.offset(topic_partition), -1, draw.choice(("", "m"))
            )
            for topic_partition in (self.partition() for _ in range(draw.randint(1, 2)))
        ]
        generation = group.generation if group is not None and member_id else -1
        return actions.CommitOffsets(group_id, generation, offsets, member_id)

    def delete_offsets(self) -> AnyAction:
        return actions.DeleteOffsets(self.group()[0], [self.partition()])

    def join_group(self) -> AnyAction:
        draw = self.draw
        return actions.JoinGroup(
            self.group()[0],
            f"m{draw.randrange(6)}",
            draw.choice(WRITERS),
            actions.MemberConfig(principal=draw.choice(PRINCIPALS)),
            draw.choice(("", "", "i0", "i1")),
            draw.choice(("", "range", "sticky")),
        )

    def settle_group(self) -> AnyAction:
        draw = self.draw
        group_id, group = self.group()
        coordinator, term = draw.choice(WRITERS), 0
        generation = self.state.members.generation_floor
        if group is not None:
            coordinator, term, generation = group.coordinator, group.term, group.generation
        members = [
            actions.SettledMember(
                f"m{number}",
                draw.choice(("", f"i{number}")),
                "client",
                "host",
                10_000,
                10_000,
                b"x" * draw.randrange(9),
                b"y",
                draw.choice(PRINCIPALS),
            )
            for number in draw.sample(range(6), draw.randint(1, 3))
        ]
        generation += draw.choice((0, 1, 1, 2))
        leader = members[0].member_id
        return actions.SettleGroup(
            group_id, coordinator, term, generation, "consumer", "range", leader, members
        )

    def leave_group(self) -> AnyAction:
        return actions.LeaveGroup(*self.member()[:2])

    def expire_member(self) -> AnyAction:
        group_id, member_id, group = self.member()
        return actions.ExpireMember(group_id, member_id, 0 if group is None else group.term)

    def take_group(self) -> AnyAction:
        return actions.TakeGroup(self.group()[0], self.draw.choice(WRITERS))

    def subscribe(self) -> AnyAction:
        topics = self.draw.sample(TOPICS, self.draw.randint(0, 2))
        return actions.Subscribe(*self.member()[:2], topics, self.draw.choice(("", "", "t.*")))

    def assign_by_hand(self) -> AnyAction:
        partitions = [self.partition() for _ in range(self.draw.randint(0, 2))]
        return actions.AssignByHand(*self.member()[:2], partitions)

    def seek(self) -> AnyAction:
        group_id, member_id, group = self.member()
        member = None if group is None else group.members.get(member_id)
        partitions = [] if member is None else self.state.members.partitions_of(member)
        topic_partition = self.draw.choice(partitions) if partitions else self.partition()
        return actions.Seek(
            group_id,
            member_id,
            [actions.SeekPosition(*topic_partition, self.offset(topic_partition))],
        )

    def delete_group(self) -> AnyAction:
        return actions.DeleteGroup(self.group()[0])

    # -- access, bounds, holds, hot logs

    def create_key(self) -> AnyAction:
        draw = self.draw
        digest = bytes([draw.randrange(4)]) * 32
        expires_ms = draw.choice((0, self.now_ms))
        return actions.CreateKey(draw.choice(KEYS), draw.choice(PRINCIPALS), digest, expires_ms)

    def delete_key(self) -> AnyAction:
        return actions.DeleteKey(self.draw.choice(KEYS))

    def create_acls(self) -> AnyAction:
        return actions.CreateAcls(self.draw.sample(ACLS, self.draw.randint(1, 3)))

    def delete_acls(self) -> AnyAction:
        return actions.DeleteAcls(self.draw.sample(ACLS, self.draw.randint(1, 3)))

    def set_quotas(self) -> AnyAction:
        draw = self.draw
        name = draw.choice(("producer_byte_rate", "request_rate", "topics", "no such quota"))
        return actions.SetQuotas(draw.choice(PRINCIPALS), {name: draw.choice((1, 5, 10**6, None))})

    def set_bounds(self) -> AnyAction:
        bounds = (None, 1, 60_000, 1_800_000, 3_600_000, 7_200_000)
        return actions.SetBounds(*(self.draw.choice(bounds) for _ in range(3)))

    def take_hold(self) -> AnyAction:
        return actions.TakeHold(self.draw.choice(HOLDS), self.draw.choice((1_000, 900_000)))

    def renew_hold(self) -> AnyAction:
        return actions.RenewHold(self.draw.choice(HOLDS), self.draw.choice((1_000, 900_000)))

    def release_hold(self) -> AnyAction:
        return actions.ReleaseHold(self.draw.choice(HOLDS))

    def retire_hot_log(self) -> AnyAction:
        return actions.RetireHotLog(self.draw.choice(("l0", "l1")))


KINDS: dict[type[AnyAction], Callable[[RandomActions], AnyAction]] = {
    actions.Append: RandomActions.append,
    actions.ProducerAppend: RandomActions.append_of_producer,
    actions.InitProducer: RandomActions.init_producer,
    actions.ReserveProducers: RandomActions.reserve_producers,
    actions.LoseRecords: RandomActions.lose_records,
    actions.MoveLogStart: RandomActions.move_log_start,
    actions.Sealed: RandomActions.sealed,
    actions.CreateTopic: RandomActions.create_topic,
    actions.DeleteTopic: RandomActions.delete_topic,
    actions.AlterTopic: RandomActions.alter_topic,
    actions.SetTopicDefaults: RandomActions.set_topic_defaults,
    actions.AddPartitions: RandomActions.add_partitions,
    actions.ForgetTopic: RandomActions.forget_topic,
    actions.CommitOffsets: RandomActions.commit_offsets,
    actions.DeleteOffsets: RandomActions.delete_offsets,
    actions.JoinGroup: RandomActions.join_group,
    actions.SettleGroup: RandomActions.settle_group,
    actions.LeaveGroup: RandomActions.leave_group,
    actions.ExpireMember: RandomActions.expire_member,
    actions.TakeGroup: RandomActions.take_group,
    actions.Subscribe: RandomActions.subscribe,
    actions.AssignByHand: RandomActions.assign_by_hand,
    actions.Seek: RandomActions.seek,
    actions.DeleteGroup: RandomActions.delete_group,
    actions.CreateKey: RandomActions.create_key,
    actions.DeleteKey: RandomActions.delete_key,
    actions.CreateAcls: RandomActions.create_acls,
    actions.DeleteAcls: RandomActions.delete_acls,
    actions.SetQuotas: RandomActions.set_quotas,
    actions.SetBounds: RandomActions.set_bounds,
    actions.TakeHold: RandomActions.take_hold,
    actions.RenewHold: RandomActions.renew_hold,
    actions.ReleaseHold: RandomActions.release_hold,
    actions.RetireHotLog: RandomActions.retire_hot_log,
}


def level_of(kind: type[AnyAction]) -> int:
    """Return the level of the format from which the action exists."""
    if kind in get_args(actions.FourthLevelAction):
        return format_levels.KAFKA
    return 2 if kind in get_args(actions.SecondLevelAction) else format_levels.FIRST
