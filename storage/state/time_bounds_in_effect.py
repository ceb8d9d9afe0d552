"""The bounds in effect, and the bounds that come into effect later.

`SetBounds` changes bounds. One process may obey the change while another has not seen it yet. So if
processes rely on a bound, `apply` delays a lower value until no process can rely on the old value:

- The view age limits only a process's own view, so a change of it is in effect at once. A view uses
  a raised view age only after it has applied the change. Then it does not need the entries that
  collection by the old retention deletes, because a checkpoint before the change covers them.
- A raised WAL retention or file grace is in effect at once.
- A lowered retention or grace is in effect when the elapsed time since the change reaches the old
  value. Then views that have not seen the change have expired (the retention is at least four view
  ages), and readers that rely on the old value have ended. One entry may add `STEP_MS_MAX` to the
  elapsed time in an instant, so `apply` waits `STEP_MS_MAX` longer.

Pure: a part of the cluster state, the same on every broker (I4).
"""

import msgspec

from tidelog.storage.core import time_bounds as rules
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.elapsed_time import STEP_MS_MAX

WAITING = ("wal_retention_ms", "file_grace_ms")
"""The bounds whose old value stays for a while after they are lowered, because processes that have
not seen the change may rely on it."""


class BoundsCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The bounds in a checkpoint.

    `now` and `set_to` are in the order of `Bounds`. `due_ms`, in the order of `WAITING`, has the
    elapsed time at which a value of `set_to` comes into effect, or 0 if it is in effect.
    """

    is_test: bool
    now: tuple[int, int, int]
    set_to: tuple[int, int, int]
    due_ms: tuple[int, int]


class ClusterBounds:
    """The cluster's bounds, owned by the cluster state.

    `first` are the bounds in `cluster.json`. If one of them is below its value in `LEAST`, the
    cluster is for tests, and `SetBounds` may set bounds below `LEAST` again.
    """

    def __init__(self, first: Bounds) -> None:
        self.now = first
        """The bounds in effect, which every process obeys."""
        self.set_to = first
        """The bounds as they were set last. If a lowered bound waits, `now` has its old value."""
        self.is_test = first.is_test
        self._due_ms: dict[str, int] = {}

    @property
    def due_ms(self) -> dict[str, int]:
        """Return the bounds that wait, with the elapsed time at which each comes into effect."""
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
        # If a bound waits already, another change begins its wait again, because a process may have
        # begun to rely on the value in effect since the first change.
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
        values = {name: getattr(action, name) for name in Bounds.__struct_fields__}
        named = {name: value for name, value in values.items() if value is not None}
        return msgspec.structs.replace(self.set_to, **named)

    def kept(self) -> BoundsCheckpoint:
        now, set_to = (msgspec.structs.astuple(bounds) for bounds in (self.now, self.set_to))
        wal_ms, file_ms = (self._due_ms.get(name, 0) for name in WAITING)
        return BoundsCheckpoint(self.is_test, now, set_to, (wal_ms, file_ms))

    def load(self, checkpoint: BoundsCheckpoint | None) -> None:
        if checkpoint is None:
            return  # level 1: the bounds of `cluster.json` stay in effect
        self.is_test = checkpoint.is_test
        self.now, self.set_to = Bounds(*checkpoint.now), Bounds(*checkpoint.set_to)
        pairs = zip(WAITING, checkpoint.due_ms, strict=True)
        self._due_ms = {name: due_ms for name, due_ms in pairs if due_ms}
