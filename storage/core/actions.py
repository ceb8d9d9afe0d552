"""The actions of a commit: every change of the cluster state, as plain data. Pure."""

from typing import NamedTuple

import msgspec

from tidelog.storage.core.acls import Acl
from tidelog.storage.core.model import TopicIdPartition

KAFKA_CODEC = "kafka"
"""The codec of a chunk that has the record batches of Kafka producers, as they came, instead of an
Arrow message."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The records of one partition in one closed hot segment.

    If `data` is empty, the chunk is in its entry, and `position` counts from the end of the header.
    Else `data` is the key of the object that contains the chunk, and `position` counts from the
    start of the object. Timestamps are ms. If `is_json`, the writer knows that every key and value
    is JSON text, so a reader does not check them.
    """

    topic_id: str
    partition: int
    position: int
    size: int
    crc32c: int
    rows: int
    timestamp_min: int
    timestamp_max: int
    is_json: bool
    codec: str
    raw_size: int
    data: str = ""


class Action(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    tag_field="kind",
    gc=False,
    forbid_unknown_fields=True,
):
    """A change that `apply` makes.

    The tag selects the class. An entry with an unknown tag or element does not decode.
    """


class Append(Action, frozen=True, array_like=True, tag="append", gc=False):
    """An append of rows [first_row, first_row + count) of the entry's chunk number `chunk`."""

    chunk: int
    first_row: int
    count: int


class ProducerBatch(NamedTuple):
    """The identity of a Kafka producer's batch, whose first record has `base_sequence`."""

    producer_id: int
    epoch: int
    base_sequence: int


class ProducerAppend(Append, frozen=True, array_like=True, tag="append-of-producer", gc=False):
    """An append of a Kafka producer's batch (ProducerBatch).

    `apply` appends each batch once, and a producer's batches in their order.

    This action has a tag of its own, so that the many other appends have no three empty fields.
    """

    producer_id: int
    epoch: int
    base_sequence: int


class InitProducer(Action, frozen=True, array_like=True, tag="init-producer", gc=False):
    """A request for a new producer id (`producer_id` -1), or for the next epoch of a known id.

    `epoch` is the producer's current epoch, or -1 if it is unknown. The commit must not have
    another action.
    """

    producer_id: int = -1
    epoch: int = -1


class ReserveProducers(Action, frozen=True, array_like=True, tag="reserve-producers", gc=False):
    """A broker reserves `count` consecutive producer ids, which it gives to producers.

    The commit must not have another action. Exists from level 4 on.
    """

    count: int


class GroupOffset(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """The next offset that a group reads in a partition. `leader_epoch` is for Kafka's clients."""

    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class CommitOffsets(Action, frozen=True, array_like=True, tag="commit-offsets", gc=False):
    """Offsets that a group commits.

    `generation` is -1 if the committer is no member, or is a member with a manual assignment.
    """

    group_id: str
    generation: int
    offsets: list[GroupOffset]
    member_id: str = ""


class DeleteOffsets(Action, frozen=True, array_like=True, tag="delete-offsets", gc=False):
    """The committed offsets of a group in these partitions are deleted. Exists from level 4 on."""

    group_id: str
    partitions: list[TopicIdPartition]


class MemberConfig(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """The settings of a consumer instance.

    The log stores them without interpretation, so that every broker serves the instance with the
    same settings. The service defines `format` and `dialect`. If authentication is on, `principal`
    is the instance's creator.
    """

    format: str = "binary"
    auto_offset_reset: str = "latest"
    auto_commit: bool = True
    fetch_min_bytes: int = -1
    request_timeout_ms: int = 1000
    session_timeout_ms: int = 300_000
    max_poll_interval_ms: int = 300_000
    dialect: str = ""
    client_id: str = ""
    principal: str = ""


class MemberAction(Action, frozen=True, array_like=True, gc=False):
    """A change of one member of a group."""

    group_id: str
    member_id: str


class JoinGroup(MemberAction, frozen=True, array_like=True, tag="join-group", gc=False):
    """A new member, without partitions.

    It replaces a member with the same `instance_id`. `assignor` sets the assignor of a group
    without members. If `assignor` is empty, the group keeps its assignor.
    """

    coordinator: str
    config: MemberConfig
    instance_id: str = ""
    assignor: str = ""


class LeaveGroup(MemberAction, frozen=True, array_like=True, tag="leave-group", gc=False):
    """The member leaves the group."""


class ExpireMember(MemberAction, frozen=True, array_like=True, tag="expire-member", gc=False):
    """The coordinator received no heartbeat of the member for a session timeout.

    `apply` refuses the action unless `term`, the coordinator's term, is the group's current term.
    """

    term: int


class TakeGroup(Action, frozen=True, array_like=True, tag="take-group", gc=False):
    """The broker `coordinator` becomes the group's coordinator. A new term begins."""

    group_id: str
    coordinator: str


class Subscribe(MemberAction, frozen=True, array_like=True, tag="subscribe", gc=False):
    """The member shares these topics' partitions with the other members.

    If there is a `pattern`, the coordinator has resolved it to `topics`. `apply` stores the
    pattern, but does not match it with names. If both are empty, the member reads nothing.
    """

    topics: list[str]
    pattern: str = ""


class AssignByHand(MemberAction, frozen=True, array_like=True, tag="assign-by-hand", gc=False):
    """A manual assignment: the member reads these partitions. Other members may read them too."""

    partitions: list[TopicIdPartition]


class SeekPosition(NamedTuple):
    """A member's next offset in a partition. It takes precedence over the committed offset."""

    topic_id: str
    partition: int
    offset: int


class Seek(MemberAction, frozen=True, array_like=True, tag="seek", gc=False):
    """The member continues at these offsets.

    `apply` drops a position when the member commits an offset of the position's partition, or loses
    the partition.
    """

    positions: list[SeekPosition]


class DeleteGroup(Action, frozen=True, array_like=True, tag="delete-group", gc=False):
    """The group and its committed offsets are deleted.

    `apply` refuses the action while the group has members.
    """

    group_id: str


class SettledMember(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """A member of a group that clients assign.

    The log does not interpret `metadata`, which is the member's subscription, and `assignment`.
    Timeouts are ms. If authentication is on, `principal` is the client that joined.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    metadata: bytes
    assignment: bytes
    principal: str = ""

    @property
    def size(self) -> int:
        """Return the bytes that count for the bound of a group."""
        texts = (self.member_id, self.instance_id, self.client_id, self.host)
        strings = sum(len(text.encode()) for text in texts)
        return strings + len(self.metadata) + len(self.assignment)


class SettleGroup(Action, frozen=True, array_like=True, tag="settle-group", gc=False):
    """The result of a rebalance of a group that clients assign: generation and assignments.

    `leader` is the member that computed the assignments of all members with the assignor
    `protocol`. Exists from level 4 on. `apply` refuses the action unless `coordinator` and `term`
    are the group's. `term` is 0 if the cluster has no such group. The generation may be the current
    one, if a static member joined again under another member id.
    """

    group_id: str
    coordinator: str
    term: int
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: list[SettledMember]


GroupAction = (
    JoinGroup
    | LeaveGroup
    | ExpireMember
    | TakeGroup
    | Subscribe
    | AssignByHand
    | Seek
    | DeleteGroup
    | SettleGroup
)


class CreateTopic(Action, frozen=True, array_like=True, tag="create-topic", gc=False):
    """A new topic.

    `apply` refuses it if a topic of that name exists. After a delete, a new topic of that name has
    another id.
    """

    name: str
    topic_id: str
    partitions: int
    configs: dict[str, str]


class DeleteTopic(Action, frozen=True, array_like=True, tag="delete-topic", gc=False):
    """The topic disappears for readers and writers. Its objects are collected later."""

    topic_id: str


class AlterTopic(Action, frozen=True, array_like=True, tag="alter-topic", gc=False):
    """New config values. None resets a config to its default."""

    topic_id: str
    configs: dict[str, str | None]


class SetTopicDefaults(Action, frozen=True, array_like=True, tag="set-topic-defaults", gc=False):
    """Defaults that the cluster sets for its topics, by the names of `topic_configs.DEFAULTS`.

    None removes a default. Other defaults stay. Exists from level 4 on.
    """

    values: dict[str, str | None]


class AddPartitions(Action, frozen=True, array_like=True, tag="add-partitions", gc=False):
    """The topic grows to `partitions` in total.

    `apply` refuses the action unless the topic has fewer partitions now.
    """

    topic_id: str
    partitions: int


class Sealed(Action, frozen=True, array_like=True, tag="sealed", gc=False):
    """The topic's table has all records of the partition below `end_offset`.

    So `apply` trims the partition's tail.
    """

    topic_id: str
    partition: int
    end_offset: int


class RetireHotLog(Action, frozen=True, array_like=True, tag="retire-hot-log", gc=False):
    """The hot log's file is deleted durably, so `apply` drops the hot mark of this log."""

    log_id: str


class MoveLogStart(Action, frozen=True, array_like=True, tag="log-start", gc=False):
    """Records below `offset` disappear for readers. Their bytes are collected later."""

    topic_id: str
    partition: int
    offset: int


class LoseRecords(Action, frozen=True, array_like=True, tag="lose-records", gc=False):
    """An operator gave up the tail's records [base_offset, end_offset), which cannot be read.

    Readers and seals pass over these records. Exists from level 2 on.
    """

    topic_id: str
    partition: int
    base_offset: int
    end_offset: int


class ForgetTopic(Action, frozen=True, array_like=True, tag="forget-topic", gc=False):
    """No object of a deleted topic is left, so `apply` drops the topic's `DeletedTopic`."""

    topic_id: str


class CreateKey(Action, frozen=True, array_like=True, tag="create-key", gc=False):
    """A new API key of `principal`.

    `digest` is the SHA-256 of its secret. If `expires_ms` is 0, the key never expires.
    """

    key_id: str
    principal: str
    digest: bytes
    expires_ms: int = 0
    note: str = ""


class DeleteKey(Action, frozen=True, array_like=True, tag="delete-key", gc=False):
    """The API key is revoked. If there is no such key, nothing happens."""

    key_id: str


class CreateAcls(Action, frozen=True, array_like=True, tag="create-acls", gc=False):
    """New ACL bindings. Existing bindings stay."""

    acls: list[Acl]


class DeleteAcls(Action, frozen=True, array_like=True, tag="delete-acls", gc=False):
    """The removal of exactly these ACL bindings."""

    acls: list[Acl]


class SetQuotas(Action, frozen=True, array_like=True, tag="set-quotas", gc=False):
    """Quotas of a principal, by name; None removes a quota, and other quotas stay.

    A quota is bytes or requests per second on each broker, or a share of a bound.
    """

    principal: str
    rates: dict[str, int | None]


class SetBounds(Action, frozen=True, array_like=True, tag="set-bounds", gc=False):
    """New bounds of the cluster, in milliseconds (core.time_bounds).

    None keeps the bound that was set last. Exists from level 2 on. A raised bound, and any view
    age, is in effect at once. A lowered retention or grace takes effect when no process relies on
    the old value any more (state.bounds_in_effect).
    """

    view_age_ms: int | None = None
    wal_retention_ms: int | None = None
    file_grace_ms: int | None = None


class TakeHold(Action, frozen=True, array_like=True, tag="take-hold", gc=False):
    """A hold begins: while it is in force, collection deletes nothing.

    It expires after `duration_ms` of elapsed time, unless it is renewed. All actions of holds exist
    from level 2 on.
    """

    hold_id: str
    duration_ms: int


class RenewHold(Action, frozen=True, array_like=True, tag="renew-hold", gc=False):
    """The hold is in force for `duration_ms` from this entry on.

    `apply` refuses the action if the hold has expired.
    """

    hold_id: str
    duration_ms: int


class ReleaseHold(Action, frozen=True, array_like=True, tag="release-hold", gc=False):
    """The hold ends. If there is no such hold, nothing happens."""

    hold_id: str


AccessAction = CreateKey | DeleteKey | CreateAcls | DeleteAcls | SetQuotas
HoldAction = TakeHold | RenewHold | ReleaseHold

SecondLevelAction = LoseRecords | SetBounds | HoldAction
"""The actions that level 1 of the format does not have."""
FourthLevelAction = ReserveProducers | SettleGroup | DeleteOffsets | SetTopicDefaults
"""The actions that level 3 of the format does not have."""

AnyAction = (
    Append
    | ProducerAppend
    | InitProducer
    | ReserveProducers
    | CommitOffsets
    | DeleteOffsets
    | CreateTopic
    | DeleteTopic
    | AlterTopic
    | AddPartitions
    | Sealed
    | RetireHotLog
    | MoveLogStart
    | ForgetTopic
    | GroupAction
    | AccessAction
    | SecondLevelAction
    | SetTopicDefaults
)
