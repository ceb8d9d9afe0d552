"""Deliberate faults of the level of the format, for tests/sim/mutations.py."""

from typing import Any

from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import format_levels
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.wal.view import Committed, WalView
from tidelog.storage.wal.wal_objects import WalObjects

Patch = tuple[Any, str, Any]


def entries_of_the_first_level() -> list[Patch]:
    real = WalView._attempt

    async def attempt(self: WalView, draft: Draft) -> Committed | None:
        return await real(self, draft._replace(level=draft.level or self.cluster.format))

    return [(WalView, "_attempt", attempt)]


def checkpoints_of_the_first_level() -> list[Patch]:
    real = WalObjects.write_checkpoint

    async def write(self: WalObjects, seq: int, state: bytes) -> int:
        cluster_state = ClusterState.decode(state, "it")
        cluster_state.level = format_levels.FIRST
        return await real(self, seq, cluster_state.encode())

    return [(WalObjects, "write_checkpoint", write)]


def raised_with_records() -> list[Patch]:
    real = WalView._attempt

    async def attempt(self: WalView, draft: Draft) -> Committed | None:
        level = format_levels.NEWEST if draft.chunks else draft.level
        return await real(self, draft._replace(level=level))

    return [(WalView, "_attempt", attempt)]


MUTATIONS = (
    ("a writer stays at the first level", entries_of_the_first_level, ("brokers",), 20),
    ("checkpoints stay at level 1", checkpoints_of_the_first_level, ("brokers",), 5),
    ("records raise the level", raised_with_records, ("brokers",), 20),
)
