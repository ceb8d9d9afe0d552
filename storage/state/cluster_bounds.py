"""The bounds in effect, and those that come into effect later.

`SetBounds` changes them. One process may not have seen the change yet while another obeys it. So,
if processes rely on a bound, `apply` lowers it only when none can rely on the old value any more:

- The view age is a limit of each process for itself, so its change is in effect at once. A view
  uses a raised view age only after it has applied the change. Then it does not need the entries
  that collection by the old retention deletes: a checkpoint before the change covers them.
- A raised WAL retention or file grace is in effect at once.
- A lowered retention or grace is in effect when the elapsed time since the change is the old value.
  Then views that have not seen the change have expired (the retention is at least four view ages),
  and readers that rely on the old value have ended. One entry may add `STEP_MS_MAX` to the elapsed
  time in an instant, so `apply` waits that much longer.

Pure: a part of the cluster state, the same on every broker (I4).
"""

import msgspec

from tidelog.storage.core import bounds as rules
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.bounds import Bounds
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.elapsed import STEP_MS_MAX

WAITING = ("wal_retention_ms", "file_grace_ms")
"""Processes that have not seen the change yet may rely on these bounds."""


class BoundsCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`now` and `set_to` are in the order of `Bounds`, `due_ms` in that of `WAITING`. `due_ms` is
    the elapsed time at which the value of `set_to` comes into effect, 0 if it is in effect."""

    is_test: bool
    now: tuple[int, int, int]
    set_to: tuple[int, int, int]
    due_ms: tuple[int, int]


class ClusterBounds:
    """Owned by the cluster state. `first` are the bounds in `cluster.json`. If they are below
    the minimum, the cluster is for tests, and `SetBounds` may set such bounds again."""

    def __init__(self, first: Bounds) -> None:
        self.now = first
        """In effect. Every process obeys these."""
        self.set_to = first
        """As they were set last. If a lowered bound waits, `now` still has its old value."""
        self.is_test = first.is_test
        self._due_ms: dict[str, int] = {}

    @property
    def due_ms(self) -> dict[str, int]:
        """Return the bounds that wait, each with the elapsed time at which it is in effect."""
        return dict(self._due_ms)

    def check(self, action: SetBounds) -> InvalidRequest | None:
        return rules.check_choice(self._wanted(action), is_test=self.is_test)

    def set(self, action: SetBounds, elapsed_ms: int) -> None:
        self.set_to = self._wanted(action)
        values = msgspec.structs.asdict(self.set_to)
        waiting: dict[str, int] = {}
        for name in WAITING:
            held_ms = getattr(self.now, name)
            if values[name] < held_ms:
                values[name] = held_ms
                waiting[name] = elapsed_ms + held_ms + STEP_MS_MAX
        # A new change begins the wait of a bound again: after the first change, a process may have
        # begun to rely on the value in effect.
        self.now, self._due_ms = Bounds(**values), waiting

    def settle(self, elapsed_ms: int) -> None:
        """Lower the bounds whose wait has ended."""
        if not self._due_ms:
            return
        due = [name for name, due_ms in self._due_ms.items() if elapsed_ms >= due_ms]
        for name in due:
            del self._due_ms[name]
        lowered = {name: getattr(self.set_to, name) for name in due}
        self.now = msgspec.structs.replace(self.now, **lowered)

    def _wanted(self, action: SetBounds) -> Bounds:
        given = {name: getattr(action, name) for name in Bounds.__struct_fields__}
        named = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(self.set_to, **named)

    def kept(self) -> BoundsCheckpoint:
        now, set_to = (msgspec.structs.astuple(each) for each in (self.now, self.set_to))
        wal_ms, file_ms = (self._due_ms.get(name, 0) for name in WAITING)
        return BoundsCheckpoint(self.is_test, now, set_to, (wal_ms, file_ms))

    def load(self, kept: BoundsCheckpoint | None) -> None:
        if kept is None:
            return  # level 1: those of `cluster.json`
        self.is_test = kept.is_test
        self.now, self.set_to = Bounds(*kept.now), Bounds(*kept.set_to)
        pairs = zip(WAITING, kept.due_ms, strict=True)
        self._due_ms = {name: due_ms for name, due_ms in pairs if due_ms}
