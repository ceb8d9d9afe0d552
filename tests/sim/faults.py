"""Exceptions at any await of a flush, a seal or a fold: before the call or after it."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.sim import machine
from tests.sim.stores import Way, Weather
from tidelog.storage.log_engine import Log
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.wal.view import WalView
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.set_aside_requests import SetAsideRequests
from tidelog.storage.write.tail_cache_fill import CommittedTail

RARE = 0.1
"""Of functions that are called for each record."""


class Panic(BaseException):
    """A panic of a Rust library comes to Python as such an exception."""


KINDS = (RuntimeError, MemoryError, OSError, Panic)
INJECTED = "injected into "

CALLS: tuple[tuple[type, str, float], ...] = (
    (ClosedSegment, "encode", 1.0),
    (ClosedSegment, "answers", 1.0),
    (WalView, "_attempt", 1.0),
    (ClusterState, "_append", RARE),
    (Log, "on_applied", RARE),
    (CommittedTail, "add", 1.0),
    (HotLog, "_write", 1.0),
    (HotLog, "keep", 1.0),
    (SetAsideRequests, "_commit", 1.0),
    (Sealer, "_plan", 1.0),
    (Sealer, "_upload", 1.0),
    (Sealer, "_add", 1.0),
    (Way, "create", 1.0),
)


def _fragile(
    owner: type,
    name: str,
    weight: float,
    draws: random.Random,
    weather: Callable[[], Weather],
    count: Callable[[str], None],
) -> Callable[..., Any]:
    """The function as it is, but that it raises now and then in the process of a broker."""
    real = getattr(owner, name)

    async def done_and_raised(awaited: Awaitable[object], error: BaseException) -> None:
        await awaited
        raise error

    def call(*arguments: Any, **named: Any) -> Any:
        raises = weather().raises * weight
        if not raises or not machine.current().startswith("b") or draws.random() >= raises:
            return real(*arguments, **named)
        count("raised")
        error = draws.choice(KINDS)(INJECTED + name)
        if draws.random() < 0.5:
            raise error
        result = real(*arguments, **named)
        if isinstance(result, Awaitable):
            return done_and_raised(result, error)
        raise error

    return call


def fragile_calls(
    draws: random.Random, weather: Callable[[], Weather], count: Callable[[str], None]
) -> list[tuple[type, str, Any]]:
    """Return what to patch: owner, name, function."""
    return [
        (owner, name, _fragile(owner, name, weight, draws, weather, count))
        for owner, name, weight in CALLS
    ]
