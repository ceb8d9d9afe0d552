"""`apply` handles every entry that decodes: it applies or refuses each commit, and never raises."""

import random
from collections import Counter
from typing import get_args

from tests.support.random_entries import KINDS, RandomEntries, entry_key
from tidelog.storage.core import levels
from tidelog.storage.core.actions import AnyAction
from tidelog.storage.state.cluster_state import ALONE, ClusterState

SEEDS = 60
ENTRIES = 120


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
