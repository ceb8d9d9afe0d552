"""Committed offsets of consumer groups, as a machine in the cluster state.

Pure, folded by `apply` (I4). A group without members is what Kafka calls a simple one: whoever
names it may commit, and each offset lives by itself. Where there are members they alone may, and
keep what is committed alive: both is asked of storage.group_members.

An offset is forgotten when it was not committed, and its group had no members, for a week of
entry time (`offsets.retention.minutes`), looked at every ten minutes
(`offsets.retention.check.interval.ms`);
with its topic; and with nothing else: at the bounds (I10) a commit is refused, because an offset
that was lost would be read as "begin anew".
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from storage.entry import CommitOffsets, GroupOffset
from storage.errors import InvalidRequest, LogError, OffsetMetadataTooLarge, Throttled
from storage.group_members import GroupMembers

GROUP_ID_BYTES_MAX = 255
METADATA_BYTES_MAX = 4096
"""Kafka's `offset.metadata.max.bytes`."""
OFFSET_MAX = 2**63 - 1
RETENTION_MS = 7 * 86_400_000
"""Kafka's `offsets.retention.minutes`, in entry time."""
CHECK_INTERVAL_MS = 600_000
OFFSETS_MAX = 500_000
"""Of all groups together (I10); ~200 bytes of state and ~20 of checkpoint each."""
ALL_METADATA_BYTES_MAX = 64 * 1024 * 1024
"""Of all offsets together (I10)."""


class CommittedOffset(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the group goes on: the next offset to read. `at_ms` is the entry's time."""

    partition: int
    offset: int
    leader_epoch: int
    metadata: str
    at_ms: int


KeptGroups: TypeAlias = dict[str, dict[str, list[CommittedOffset]]]
"""All of it as checkpoints carry it: by group and topic id, in the order of the commits."""


class Groups:
    """Part of the cluster state, owned by it: offsets by group, topic id and partition."""

    def __init__(self, members: GroupMembers, kept: KeptGroups | None = None) -> None:
        self._members = members
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
        self._count = self._metadata_bytes = 0
        for group_id, topics in (kept or {}).items():
            for topic_id, partitions in topics.items():
                for committed in partitions:
                    self._keep(group_id, topic_id, committed)

    def offsets(self, group_id: str) -> Mapping[str, Mapping[int, CommittedOffset]]:
        """By topic id and partition; empty for a group that never committed."""
        return self._groups.get(group_id, {})

    def __iter__(self) -> Iterator[str]:
        """Groups with committed offsets."""
        return iter(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    @property
    def count(self) -> int:
        """Offsets of all groups."""
        return self._count

    def check(self, commit: CommitOffsets) -> LogError | None:
        """Why the offsets cannot be committed; that their partitions exist is checked before."""
        refusal: LogError | None = None
        if commit.group_id not in self._groups:
            refusal = check_group_id(commit.group_id)
        refusal = refusal or self._members.check_commit(commit)
        size = 0
        for each in commit.offsets:
            refusal = refusal or check_offset(each)
            size += len(each.metadata.encode())
        return refusal or self._check_bounds(len(commit.offsets), size)

    def _check_bounds(self, count: int, size: int) -> LogError | None:
        # Counted as if all were new: who is so near to the bound is over it soon.
        if (
            self._count + count <= OFFSETS_MAX
            and self._metadata_bytes + size <= ALL_METADATA_BYTES_MAX
        ):
            return None
        return Throttled(
            f"{self._count} offsets with {self._metadata_bytes} bytes of metadata are committed, "
            f"the bounds are {OFFSETS_MAX} and {ALL_METADATA_BYTES_MAX}",
            retry_after_ms=CHECK_INTERVAL_MS,
        )

    def commit(self, commit: CommitOffsets, now_ms: int) -> None:
        """Checked before. Of several offsets of one partition the last counts."""
        for each in commit.offsets:
            self._keep(
                commit.group_id,
                each.topic_id,
                CommittedOffset(
                    each.partition, each.offset, each.leader_epoch, each.metadata, now_ms
                ),
            )
        self._members.committed(commit)

    def delete(self, group_id: str) -> None:
        """All that the group committed."""
        for partitions in self._groups.get(group_id, {}).values():
            for number in list(partitions):
                self._drop(partitions, number)
        self._sweep()

    def forget(self, before_ms: int, now_ms: int) -> None:
        """What is past its retention, looked for whenever the cluster's time, which goes from
        `before_ms` to `now_ms`, comes into another interval."""
        if before_ms // CHECK_INTERVAL_MS == now_ms // CHECK_INTERVAL_MS:
            return
        horizon = now_ms - RETENTION_MS
        for group_id, topics in self._groups.items():
            group = self._members.get(group_id)
            if group is not None and (group.members or group.emptied_ms >= horizon):
                continue
            for partitions in topics.values():
                for number, committed in list(partitions.items()):
                    if committed.at_ms < horizon:
                        self._drop(partitions, number)
        self._sweep()
        for group in list(self._members):
            if group.group_id not in self._groups:
                self._members.forget(group.group_id)

    def forget_topic(self, topic_id: str) -> None:
        """The topic is gone, and what was committed on it."""
        for topics in self._groups.values():
            partitions = topics.get(topic_id, {})
            for number in list(partitions):
                self._drop(partitions, number)
        self._sweep()

    def kept(self) -> KeptGroups | None:
        """All of it; None when there is nothing."""
        return {
            group_id: {topic_id: list(held.values()) for topic_id, held in topics.items()}
            for group_id, topics in self._groups.items()
        } or None

    def _keep(self, group_id: str, topic_id: str, committed: CommittedOffset) -> None:
        partitions = self._groups.setdefault(group_id, {}).setdefault(topic_id, {})
        self._drop(partitions, committed.partition)
        partitions[committed.partition] = committed
        self._count += 1
        self._metadata_bytes += len(committed.metadata.encode())

    def _drop(self, partitions: dict[int, CommittedOffset], number: int) -> None:
        gone = partitions.pop(number, None)
        if gone is not None:
            self._count -= 1
            self._metadata_bytes -= len(gone.metadata.encode())

    def _sweep(self) -> None:
        """Groups and topics without an offset are as if they had never been."""
        for group_id, topics in list(self._groups.items()):
            for topic_id in [topic_id for topic_id, left in topics.items() if not left]:
                del topics[topic_id]
            if not topics:
                del self._groups[group_id]


def check_group_id(group_id: str) -> InvalidRequest | None:
    """Why a group cannot be called so."""
    if 1 <= len(group_id.encode()) <= GROUP_ID_BYTES_MAX and group_id.isprintable():
        return None
    return InvalidRequest(
        f"a group id is 1 to {GROUP_ID_BYTES_MAX} bytes of printable characters, "
        f"not {group_id[:GROUP_ID_BYTES_MAX]!r}"
    )


def check_offset(each: GroupOffset) -> InvalidRequest | None:
    """Why this can be no committed offset."""
    if not 0 <= each.offset <= OFFSET_MAX:
        return InvalidRequest(f"a committed offset is 0 to {OFFSET_MAX}, not {each.offset}")
    size = len(each.metadata.encode())
    if size > METADATA_BYTES_MAX:
        return OffsetMetadataTooLarge(
            f"metadata of {size} bytes beside an offset: {METADATA_BYTES_MAX} at most"
        )
    return None
