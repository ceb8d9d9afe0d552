"""Mutations of what a broker does after an exception or a refusal: see `mutations`.

Two guards are not here, because a seed seldom meets the moment: the old mark of a request set aside
is used up, and a recovery takes it from one file.
tests/storage/write/test_set_aside_requests.py has both.
"""

from typing import Any

from tests.sim.faults import Panic
from tests.sim.plans import Plan
from tidelog.storage.core.errors import CommitUnknown, LogError, SetAside, Unavailable
from tidelog.storage.wal.view import WalView
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.set_aside_requests import SetAsideRequests
from tidelog.storage.write.writer import Writer

Patches = list[tuple[Any, str, Any]]


def _half_applied_is_served() -> Patches:
    real = WalView._apply

    def apply(self: WalView, state: Any, decoded: Any) -> Any:
        try:
            return real(self, state, decoded)
        finally:
            self._is_half_applied = False

    return [(WalView, "_apply", apply)]


def _unforeseen_is_refused() -> Patches:
    real = Writer.commit

    async def commit(self: Writer, requests: Any) -> Any:
        try:
            return await real(self, requests)
        except CommitUnknown as error:
            if isinstance(error.__cause__, RuntimeError | MemoryError | OSError | Panic):
                raise Unavailable(str(error)) from error
            raise

    return [(Writer, "commit", commit)]


def _failed_frames_are_refused() -> Patches:
    real = HotLog._fail

    def fail(self: HotLog, batch: Any, error: LogError) -> None:
        real(self, batch, Unavailable(str(error)))

    return [(HotLog, "_fail", fail)]


def _refused_is_dropped() -> Patches:
    async def set_aside(
        self: SetAsideRequests, hot_log: HotLog, request: AppendRequest, mark: Any
    ) -> None:
        self._flusher.answer(request, [], SetAside("dropped"))

    return [(SetAsideRequests, "_set_aside", set_aside)]


def _later_marks_pass() -> Patches:
    def take(self: Writer) -> list[AppendRequest]:
        return self._take_first(self.fitting(self._open))

    return [(Writer, "_take", take)]


def _raises(plan: Plan) -> bool:
    return plan.weather.raises > 0


def _refuses(plan: Plan) -> bool:
    return plan.weather.refused_part != b""


MUTATIONS: tuple[tuple[Any, ...], ...] = (
    ("a state that is half applied is served", _half_applied_is_served, ("brokers",), 40),
    ("an exception after the PUT is a refusal", _unforeseen_is_refused, ("brokers",), 120),
    ("frames that failed are refused", _failed_frames_are_refused, ("disks",), 100, _raises),
    ("a request that the store refuses is dropped", _refused_is_dropped, ("disks",), 40, _refuses),
    ("marks pass a request that is refused", _later_marks_pass, ("disks",), 100, _refuses),
)
