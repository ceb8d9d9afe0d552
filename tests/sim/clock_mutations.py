"""Deliberate faults of clocks and bounds, for tests/sim/mutations.py."""

import math
from collections.abc import Iterator
from typing import Any

from tests.sim.plans import Plan
from tidelog.compaction import garbage
from tidelog.storage.cluster import sequencer
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.state import elapsed_time
from tidelog.storage.state.time_bounds_in_effect import ClusterBounds
from tidelog.storage.store import moments

Patch = tuple[Any, str, Any]


def store_time_ages_no_view() -> list[Patch]:
    return [(moments, "STORE_CLOCK_STEP_S", math.inf)]


def any_step() -> list[Patch]:
    return [(elapsed_time, "STEP_MS_MAX", 2**60)]


def uploads_are_named_for_ever() -> list[Patch]:
    return [(sequencer, "not_after_ms", lambda draft: float("inf"))]


def collect_uploads_by_age() -> list[Patch]:
    def of_data(infos: Any, base: Any, live: Any, now_ms: int, grace: Any) -> Iterator[Any]:
        for info in infos:
            if info.key not in live and now_ms - info.modified_ms >= grace.wal_ms:
                yield garbage._garbage(info, "sealed or never committed")

    return [(garbage, "of_data", of_data)]


def bounds_lowered_at_once() -> list[Patch]:
    def set_at_once(self: ClusterBounds, action: SetBounds, elapsed_ms: int) -> None:
        self.now = self.set_to = self._wanted(action)

    return [(ClusterBounds, "set", set_at_once)]


def own_retention() -> list[Patch]:
    return [(garbage.Grace, "obeying", lambda self, bounds: self)]


def _has_jumps(plan: Plan) -> bool:
    return "days" in plan.troubles


def _is_hasty(plan: Plan) -> bool:
    return plan.is_hasty and "lowered" not in plan.troubles


def _changes_bounds(plan: Plan) -> bool:
    return "lowered" in plan.troubles


def _stops_after_uploads(plan: Plan) -> bool:
    return "uploaded" in plan.troubles


MUTATIONS: tuple[tuple[Any, ...], ...] = (
    ("the store's time does not age a view", store_time_ages_no_view, ("sleepers",), 150),
    ("elapsed time takes any step", any_step, ("brokers",), 60, _has_jumps),
    (
        "uploads are named without a limit of time",
        uploads_are_named_for_ever,
        ("sleepers",),
        40,
        _stops_after_uploads,
    ),
    (
        "collects uploads by their age",
        collect_uploads_by_age,
        ("sleepers",),
        40,
        _stops_after_uploads,
    ),
    ("a collector obeys its own retention", own_retention, ("sleepers",), 40, _is_hasty),
    ("bounds are lowered at once", bounds_lowered_at_once, ("sleepers",), 100, _changes_bounds),
)
