"""`apply` handles every entry that decodes: it applies or refuses each commit, and never raises."""

import random
from collections import Counter
from typing import get_args

import pytest

from tests.support.random_entries import GROUPS, KINDS, RandomEntries, entry_key
from tidelog.storage.core import actions, levels
from tidelog.storage.core.actions import AnyAction
from tidelog.storage.state import state_checkpoint
from tidelog.storage.state.cluster_state import ALONE, Applied, ClusterState

SEEDS = 60
ENTRIES = 120
STATE_SEEDS = 40
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
        state = ClusterState("c", random.Random(seed).randint(levels.FIRST, levels.NEWEST))
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
def test_i4_states_from_checkpoints_stay_equal_to_the_state_that_applied_everything(
    kinds: frozenset[type[AnyAction]],
) -> None:
    """To the byte, and with equal outcomes. A state from a checkpoint with its groups in another
    order stays equal but for this order, and has equal outcomes."""
    changes_of_kind = 0
    for seed in range(STATE_SEEDS):
        draw = random.Random(seed)
        entries = RandomEntries(draw, kinds)
        state = ClusterState("c", draw.randint(levels.KAFKA if kinds else 2, levels.NEWEST))
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
        (one.placements, repr(one.refusal), one.is_duplicate, one.repeated, one.producer)
        for one in applied.outcomes
    ]


def test_states_that_differ_in_a_group_are_not_equal() -> None:
    state = ClusterState("c", levels.NEWEST)
    entries = RandomEntries(random.Random(1))
    while (members := state.members.kept()) is None or not members.groups:
        decoded = entries.next(state)
        state.apply(decoded, entry_key(decoded.entry.seq))
    snapshot = state_checkpoint.decode(state.encode(), "checkpoint")
    assert snapshot.members is not None
    assert ClusterState.decode(state_checkpoint.encode(snapshot), "checkpoint").equals(state)
    snapshot.members.groups[0].generation += 1
    assert not ClusterState.decode(state_checkpoint.encode(snapshot), "checkpoint").equals(state)
