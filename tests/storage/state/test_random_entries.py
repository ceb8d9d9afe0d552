"""`apply` handles every entry that decodes: it applies or refuses each commit, and never raises."""

import random
from collections import Counter
from typing import get_args

import pytest

from tests.support.random_entries import GROUPS, KINDS, RandomEntries, entry_key
from tidelog.storage.core import actions, format_levels
from tidelog.storage.core.actions import AnyAction, CommitOffsets, DeleteOffsets
from tidelog.storage.state import state_checkpoint
from tidelog.storage.state.cluster_state import ALONE, Applied, ClusterState
from tidelog.storage.state.committed_offsets import (
    CHECK_INTERVAL_MS,
    RETENTION_MS,
    CommittedOffsets,
)

SEEDS = 60
ENTRIES = 120
STATE_SEEDS = 40
DELETING_SEEDS = 10
OF_GROUPS: frozenset[type[AnyAction]] = frozenset(
    {
        *(actions.CreateTopic, actions.CommitOffsets, actions.DeleteGroup, actions.Subscribe),
        *(actions.JoinGroup, actions.LeaveGroup, actions.ExpireMember, actions.TakeGroup),
        *(actions.SettleGroup, actions.AssignByHand, actions.Seek),
    }
)


def test_every_kind_of_action_is_drawn() -> None:
    assert set(KINDS) == set(get_args(AnyAction))


def test_apply_of_any_actions_in_any_order_never_raises() -> None:
    """If `apply` raised, no broker could start again: the entry stays in the WAL."""
    alone: Counter[type[AnyAction]] = Counter()
    together: Counter[type[AnyAction]] = Counter()
    for seed in range(SEEDS):
        entries = RandomEntries(random.Random(seed))
        state = ClusterState(
            "c", random.Random(seed).randint(format_levels.FIRST, format_levels.NEWEST)
        )
        for _ in range(ENTRIES):
            decoded = entries.next(state)
            try:
                applied = state.apply(decoded, entry_key(decoded.entry.seq))
            except Exception as error:
                error.add_note(f"seed {seed}, entry {decoded.entry}")
                raise
            for commit, outcome in zip(decoded.entry.commits, applied.outcomes, strict=True):
                if outcome.refusal is None and not outcome.is_duplicate:
                    kinds = {type(action) for action in commit.actions}
                    (alone if len(commit.actions) == 1 else together).update(kinds)
    assert set(alone) == set(KINDS), "a kind that no commit applied"
    assert set(together) == set(KINDS) - set(ALONE), "a kind that no commit applied beside others"


def reordered(body: bytes) -> bytes:
    """Return the checkpoint with the groups of each kind in reverse order."""
    snapshot = state_checkpoint.decode(body, "checkpoint")
    for groups in (snapshot.members, snapshot.kafka):
        if groups is not None:
            groups.groups.reverse()
    return state_checkpoint.encode(snapshot)


@pytest.mark.parametrize("kinds", [frozenset(), OF_GROUPS], ids=["all", "groups"])
def test_i4_states_from_checkpoints_stay_equal(kinds: frozenset[type[AnyAction]]) -> None:
    """To the byte, and with equal outcomes.

    A state from a checkpoint with its groups in another order stays equal but for this order, and
    has equal outcomes.
    """
    changes_of_kind = 0
    for seed in range(STATE_SEEDS):
        draw = random.Random(seed)
        entries = RandomEntries(draw, kinds)
        state = ClusterState(
            "c", draw.randint(format_levels.KAFKA if kinds else 2, format_levels.NEWEST)
        )
        loaded: list[ClusterState] = []
        in_other_order: list[ClusterState] = []
        of_clients: dict[str, bool] = {}
        for _ in range(ENTRIES):
            decoded = entries.next(state)
            key = entry_key(decoded.entry.seq)
            outcomes = _outcomes(state.apply(decoded, key))
            for group_id in GROUPS:
                if (group := state.members.get(group_id)) is not None:
                    is_of_clients = group.is_assigned_by_clients
                    changes_of_kind += of_clients.get(group_id, is_of_clients) != is_of_clients
                    of_clients[group_id] = is_of_clients
            for other in (*loaded, *in_other_order):
                assert _outcomes(other.apply(decoded, key)) == outcomes, f"seed {seed}, {key}"
            if draw.random() < 0.9:
                continue
            copy = ClusterState.decode(state.encode(), key)
            assert _groups(copy) == _groups(state), f"seed {seed}, {key}"
            assert copy.shares._used == state.shares._used, f"seed {seed}, {key}"
            assert copy.tail_chunks._counts == state.tail_chunks._counts, f"seed {seed}, {key}"
            for other in (*loaded, *in_other_order):
                assert other.equals(state), f"seed {seed}, {key}"
            for other in loaded:
                assert other.encode() == state.encode(), f"seed {seed}, {key}"
            loaded = [*loaded[-1:], copy]
            in_other_order = [ClusterState.decode(reordered(state.encode()), key)]
    assert changes_of_kind > STATE_SEEDS or not kinds


def _groups(state: ClusterState) -> dict[str, dict[str, object]]:
    """Return all values of the groups, also those that no checkpoint names."""
    return {group.group_id: vars(group) for group in state.members}


def _outcomes(applied: Applied) -> list[object]:
    return [
        (
            outcome.placements,
            repr(outcome.refusal),
            outcome.is_duplicate,
            outcome.repeated,
            outcome.producer,
        )
        for outcome in applied.outcomes
    ]


class _SweptOffsets(CommittedOffsets):
    """Deletes as the first versions of `apply` did: each deletion looked at all groups."""

    def do(self, commit: CommitOffsets | DeleteOffsets, now_ms: int, principal: str = "") -> None:
        if isinstance(commit, CommitOffsets):
            super().do(commit, now_ms, principal)
            return
        topics = self._groups.get(commit.group_id, {})
        for topic_id, number in commit.partitions:
            self._pop(commit.group_id, topics.get(topic_id, {}), number)
        self._sweep()

    def delete(self, group_id: str) -> None:
        for partitions in self._groups.get(group_id, {}).values():
            for number in list(partitions):
                self._pop(group_id, partitions, number)
        self._sweep()

    def forget(self, before_ms: int, now_ms: int) -> None:
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
                        self._pop(group_id, partitions, number)
        self._sweep()
        for group in list(self._members):
            if group.group_id not in self._groups:
                self._members.forget(group.group_id)

    def forget_topic(self, topic_id: str) -> None:
        for group_id, topics in self._groups.items():
            partitions = topics.get(topic_id, {})
            for number in list(partitions):
                self._pop(group_id, partitions, number)
        self._sweep()

    def _sweep(self) -> None:
        for group_id, topics in list(self._groups.items()):
            for topic_id in [topic_id for topic_id, offsets in topics.items() if not offsets]:
                del topics[topic_id]
            if not topics:
                del self._groups[group_id]
                self.owners.pop(group_id, None)


def test_i4_offsets_are_deleted_as_by_versions_that_looked_at_all_groups() -> None:
    kinds = {actions.CreateTopic, actions.DeleteTopic, actions.DeleteGroup, actions.JoinGroup}
    kinds |= {actions.CommitOffsets, actions.DeleteOffsets, actions.LeaveGroup}
    deleted = 0
    for seed in range(DELETING_SEEDS):
        draw = random.Random(seed)
        entries = RandomEntries(draw, kinds)
        state = ClusterState("c", draw.randint(format_levels.KAFKA, format_levels.NEWEST))
        old = ClusterState("c", state.level)
        old.committed_offsets = _SweptOffsets(old.members, shares=old.shares)
        for _ in range(ENTRIES):
            decoded = entries.next(state)
            key = entry_key(decoded.entry.seq)
            old_count = state.committed_offsets.count
            assert _outcomes(state.apply(decoded, key)) == _outcomes(old.apply(decoded, key))
            assert state.encode() == old.encode(), f"seed {seed}, {key}"
            offsets = state.committed_offsets
            assert offsets._shares._used == old.committed_offsets._shares._used
            deleted += offsets.count < old_count
            groups_of: dict[str, set[str]] = {}
            for group_id in offsets:
                for topic_id in offsets.of_group(group_id):
                    groups_of.setdefault(topic_id, set()).add(group_id)
            assert offsets._groups_of == groups_of
    assert deleted > DELETING_SEEDS


def test_states_that_differ_in_a_group_are_not_equal() -> None:
    state = ClusterState("c", format_levels.NEWEST)
    entries = RandomEntries(random.Random(1))
    while (members := state.members.kept()) is None or not members.groups:
        decoded = entries.next(state)
        state.apply(decoded, entry_key(decoded.entry.seq))
    snapshot = state_checkpoint.decode(state.encode(), "checkpoint")
    assert snapshot.members is not None
    assert ClusterState.decode(state_checkpoint.encode(snapshot), "checkpoint").equals(state)
    snapshot.members.groups[0].generation += 1
    assert not ClusterState.decode(state_checkpoint.encode(snapshot), "checkpoint").equals(state)
