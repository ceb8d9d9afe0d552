"""Committed offsets of consumer groups: a part of the cluster state.

Pure, changed by `apply` (I4). A group without members is a simple group in Kafka's terms: every
client may commit to it, and each offset expires separately. If a group has subscribed members, only
these members may commit. While a group has members, its offsets do not expire.

`apply` drops an offset if, for a week of elapsed time, it was not committed and its group had no
members (`offsets.retention.minutes`). `apply` checks this every ten minutes of elapsed time
(`offsets.retention.check.interval.ms`). It also drops the offsets of deleted topics and deleted
groups. If a commit would exceed a bound (I10), `apply` refuses the commit and drops no old offset,
because a dropped offset would reset its consumer.

From level 3 on a group belongs to the principal that commits the first of its offsets, and all its
offsets count for that principal's share (state.principal_shares). An offset has no owner of its
own, because each principal that may commit to a group may overwrite all its offsets. This also
keeps checkpoints small.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from tidelog.storage.core.actions import AnyAction, Chunk, CommitOffsets, DeleteOffsets, GroupOffset
from tidelog.storage.core.errors import (
    BoundReached,
    InvalidRequest,
    LogError,
    OffsetMetadataTooLarge,
)
from tidelog.storage.core.model import OFFSET_MAX
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.group_members import GroupMembers
from tidelog.storage.state.principal_shares import Need, Shares

GROUP_ID_BYTES_MAX = 255
METADATA_BYTES_MAX = 4096
"""Kafka's `offset.metadata.max.bytes`."""
RETENTION_MS = 7 * 86_400_000
"""Kafka's `offsets.retention.minutes`, in elapsed time."""
CHECK_INTERVAL_MS = 600_000
OFFSETS_MAX = 500_000
"""Bound of all groups' offsets (I10); ~200 bytes in memory and ~20 in a checkpoint each."""
ALL_METADATA_BYTES_MAX = 64 * 1024 * 1024
"""Bound of the metadata of all offsets (I10)."""


class CommittedOffset(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The next offset that a group reads in a partition. `at_ms` is the commit's elapsed time."""

    partition: int
    offset: int
    leader_epoch: int
    metadata: str
    at_ms: int


KeptGroups: TypeAlias = dict[str, dict[str, list[CommittedOffset]]]
"""Offsets in a checkpoint, by group and topic id, in the order of the commits."""
CHECKPOINT = msgspec.msgpack.Encoder(order="deterministic")
"""The encoder of checkpoints, of which a group's offsets are a part: equal values, equal bytes."""


class CommittedOffsets:
    """Offsets by group, topic id and partition. Owned by the cluster state."""

    def __init__(
        self,
        members: GroupMembers,
        kept_groups: KeptGroups | None = None,
        shares: Shares | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        self._members = members
        self._shares = shares or Shares()
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
        self._groups_of: dict[str, set[str]] = {}
        """The groups with offsets in a topic, by topic id."""
        self._encoded: dict[str, msgspec.Raw] = {}
        """Groups as bytes of a checkpoint, if they have not changed since they were encoded. A
        checkpoint comes each few seconds and blocks the event loop."""
        self.owners: dict[str, str] = dict(owners or {})
        """The owners of groups, by group id. A group's offsets count for the share of its owner."""
        for group_id, topics in (kept_groups or {}).items():
            for topic_id, partitions in topics.items():
                for committed_offset in partitions:
                    self._keep(group_id, topic_id, committed_offset)

    @property
    def count(self) -> int:
        return self._shares.total(rules.OFFSETS)

    @property
    def _metadata_bytes(self) -> int:
        return self._shares.total(rules.OFFSET_METADATA_BYTES)

    def of_group(self, group_id: str) -> Mapping[str, Mapping[int, CommittedOffset]]:
        """Return a group's offsets by topic id and partition."""
        return self._groups.get(group_id, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def check(self, commit: CommitOffsets) -> LogError | None:
        """Return the reason to refuse the commit, or None.

        The caller must check that the partitions exist.
        """
        refusal: LogError | None = None
        if commit.group_id not in self._groups:
            refusal = check_group_id(commit.group_id)
        refusal = refusal or self._members.check_commit(commit)
        size = 0
        for group_offset in commit.offsets:
            refusal = refusal or check_offset(group_offset)
            size += len(group_offset.metadata.encode())
        return refusal or self._check_bounds(len(commit.offsets), size)

    def _check_bounds(self, count: int, size: int) -> LogError | None:
        # All offsets count as new: near the bound, even a commit that replaces offsets is refused.
        if (
            self.count + count <= OFFSETS_MAX
            and self._metadata_bytes + size <= ALL_METADATA_BYTES_MAX
        ):
            return None
        return BoundReached(
            f"{self.count} offsets with {self._metadata_bytes} bytes of metadata are committed: "
            f"the maximum is {OFFSETS_MAX} offsets and {ALL_METADATA_BYTES_MAX} bytes",
            retry_after_ms=CHECK_INTERVAL_MS,
        )

    def needs(self, commit: AnyAction, principal: str, _: Sequence[Chunk]) -> list[Need]:
        """Return what the commit adds to the use of two bounds.

        They are the bounds of the group's owner, or of `principal` if the group has no owner. An
        offset that replaces another adds only the growth of its metadata.
        """
        if not isinstance(commit, CommitOffsets):
            return []
        owner = self.owners.get(commit.group_id, principal)
        topics = self._groups.get(commit.group_id, {})
        count = size = 0
        for group_offset in commit.offsets:
            old_offset = topics.get(group_offset.topic_id, {}).get(group_offset.partition)
            size += len(group_offset.metadata.encode())
            if old_offset is None:
                count += 1
            else:
                size -= len(old_offset.metadata.encode())
        return [
            Need(rules.OFFSETS, owner, count, OFFSETS_MAX),
            Need(rules.OFFSET_METADATA_BYTES, owner, size, ALL_METADATA_BYTES_MAX),
        ]

    def do(self, commit: CommitOffsets | DeleteOffsets, now_ms: int, principal: str = "") -> None:
        """Store or delete the offsets, after `check`.

        If a partition occurs more than once, keep the last. If the group has no owner and
        `principal` is not empty, `principal` becomes its owner.
        """
        if isinstance(commit, DeleteOffsets):
            for topic_id, number in commit.partitions:
                self._drop(commit.group_id, topic_id, [number])
            return
        if principal and commit.offsets and commit.group_id not in self.owners:
            self._own(commit.group_id, principal)
        for group_offset in commit.offsets:
            self._keep(
                commit.group_id,
                group_offset.topic_id,
                CommittedOffset(
                    group_offset.partition,
                    group_offset.offset,
                    group_offset.leader_epoch,
                    group_offset.metadata,
                    now_ms,
                ),
            )
        self._members.committed(commit)

    def delete(self, group_id: str) -> None:
        for topic_id, partitions in list(self._groups.get(group_id, {}).items()):
            self._drop(group_id, topic_id, list(partitions))

    def forget(self, before_ms: int, now_ms: int) -> None:
        """Drop expired offsets, then groups without offsets and members.

        Do nothing unless a multiple of CHECK_INTERVAL_MS is greater than `before_ms` and at most
        `now_ms`.
        """
        if before_ms // CHECK_INTERVAL_MS == now_ms // CHECK_INTERVAL_MS:
            return
        horizon = now_ms - RETENTION_MS
        for group_id, topics in list(self._groups.items()):
            group = self._members.get(group_id)
            if group is not None and (group.members or group.emptied_ms >= horizon):
                continue
            for topic_id, partitions in list(topics.items()):
                old = [
                    number
                    for number, committed_offset in partitions.items()
                    if committed_offset.at_ms < horizon
                ]
                self._drop(group_id, topic_id, old)
        for group in list(self._members):
            if group.group_id not in self._groups:
                self._members.forget(group.group_id)

    def forget_topic(self, topic_id: str) -> None:
        for group_id in list(self._groups_of.get(topic_id, ())):
            self._drop(group_id, topic_id, list(self._groups[group_id][topic_id]))

    def encoded(self) -> KeptGroups | None:
        """Return the offsets as part of a checkpoint, to be encoded at once, or None without any.

        The value of each group is encoded already, and encodes as itself.
        """
        if len(self._encoded) < len(self._groups):
            for group_id, topics in self._groups.items():
                if group_id not in self._encoded:
                    self._encoded[group_id] = _encoded(topics)
        return cast(KeptGroups, self._encoded) or None

    def _keep(self, group_id: str, topic_id: str, committed_offset: CommittedOffset) -> None:
        partitions = self._groups.setdefault(group_id, {}).setdefault(topic_id, {})
        self._groups_of.setdefault(topic_id, set()).add(group_id)
        self._pop(group_id, partitions, committed_offset.partition)
        partitions[committed_offset.partition] = committed_offset
        self._count(self.owners.get(group_id, ""), 1, committed_offset)

    def _pop(self, group_id: str, partitions: dict[int, CommittedOffset], number: int) -> None:
        self._encoded.pop(group_id, None)
        committed_offset = partitions.pop(number, None)
        if committed_offset is not None:
            self._count(self.owners.get(group_id, ""), -1, committed_offset)

    def _drop(self, group_id: str, topic_id: str, numbers: Iterable[int]) -> None:
        """Drop a group's offsets in these partitions of a topic.

        Then drop the topic and the group if they have no offset left.
        """
        topics = self._groups.get(group_id, {})
        partitions = topics.get(topic_id)
        if partitions is None:
            return
        for number in numbers:
            self._pop(group_id, partitions, number)
        if partitions:
            return
        del topics[topic_id]
        groups = self._groups_of[topic_id]
        groups.remove(group_id)
        if not groups:
            del self._groups_of[topic_id]
        if not topics:
            del self._groups[group_id]
            self.owners.pop(group_id, None)

    def _count(self, owner: str, count: int, committed_offset: CommittedOffset) -> None:
        self._shares.add(rules.OFFSETS, owner, count)
        if committed_offset.metadata:
            size = len(committed_offset.metadata.encode())
            self._shares.add(rules.OFFSET_METADATA_BYTES, owner, count * size)

    def _own(self, group_id: str, principal: str) -> None:
        """Make the principal the group's owner. Count the group's offsets for the principal."""
        self.owners[group_id] = principal
        for partitions in self._groups.get(group_id, {}).values():
            for committed_offset in partitions.values():
                self._count("", -1, committed_offset)
                self._count(principal, 1, committed_offset)


def _encoded(topics: Mapping[str, Mapping[int, CommittedOffset]]) -> msgspec.Raw:
    offsets = {topic_id: list(partitions.values()) for topic_id, partitions in topics.items()}
    return msgspec.Raw(CHECKPOINT.encode(offsets))


def check_group_id(group_id: str) -> InvalidRequest | None:
    """Return why the group id is not valid, or None if it is valid."""
    if 1 <= len(group_id.encode()) <= GROUP_ID_BYTES_MAX and group_id.isprintable():
        return None
    return InvalidRequest(
        f"a group id has 1 to {GROUP_ID_BYTES_MAX} bytes of printable characters, "
        f"not {group_id[:GROUP_ID_BYTES_MAX]!r}"
    )


def check_offset(group_offset: GroupOffset) -> InvalidRequest | None:
    """Return why the offset cannot be committed, or None if it can."""
    if not 0 <= group_offset.offset <= OFFSET_MAX:
        return InvalidRequest(f"a committed offset is 0 to {OFFSET_MAX}, not {group_offset.offset}")
    size = len(group_offset.metadata.encode())
    if size > METADATA_BYTES_MAX:
        return OffsetMetadataTooLarge(
            f"offset metadata has {size} bytes: the maximum is {METADATA_BYTES_MAX}"
        )
    return None
