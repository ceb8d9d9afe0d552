"""Holds: while a hold is in force, collection deletes nothing.

A backup takes a hold before it reads which objects the tables and the WAL name. It renews the hold
until it has copied all these objects. A hold lasts for a duration of elapsed time, and expires if
it is not renewed. So after a crash of a backup, collection waits for an hour of elapsed time at
most. In a cluster without new entries a hold does not expire, but no garbage is made there either.

An entry adds ten minutes of elapsed time at most (elapsed.py). So one jump of a writer's clock does
not end a hold of a quarter of an hour, but two jumps between two renewals may end it early. A hold
that has ended is never in force again. So if `apply` accepts a renewal, the hold was in force at
each entry since it was taken. A backup relies only on such a renewal
(compaction/backups/backup.py).

Pure: a part of the cluster state, the same on every broker (I4).
"""

from collections.abc import Iterator, Sequence

import msgspec

from tidelog.storage.core.actions import AnyAction, HoldAction, ReleaseHold, RenewHold, TakeHold
from tidelog.storage.core.errors import InvalidRequest

HOLDS_MAX = 16
"""Bound of the holds (I10). Each running backup has one."""
HOLD_MS_MAX = 3_600_000
"""The longest duration of a hold without a renewal."""
HOLD_ID_CHARS_MAX = 64


class Hold(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A hold in force.

    `taken_ms` is the time of the entry that took the hold. The hold expires at the elapsed time
    `until_ms`.
    """

    hold_id: str
    taken_ms: int
    until_ms: int


class Holds:
    """The holds in force, the oldest first. Owned by the cluster state."""

    def __init__(self, holds: Sequence[Hold] = ()) -> None:
        self._holds = {hold.hold_id: hold for hold in holds}

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def __len__(self) -> int:
        return len(self._holds)

    def check(self, action: HoldAction) -> InvalidRequest | None:
        """Return the reason to refuse the action, or None."""
        if isinstance(action, ReleaseHold):
            return None
        if not 1 <= action.duration_ms <= HOLD_MS_MAX:
            return InvalidRequest(f"a hold lasts 1 to {HOLD_MS_MAX} ms, not {action.duration_ms}")
        is_known = action.hold_id in self._holds
        if isinstance(action, RenewHold):
            why = (
                f"hold {action.hold_id[:HOLD_ID_CHARS_MAX]!r} is over, because it was not renewed "
                "in time: run the backup again"
            )
            return None if is_known else InvalidRequest(why)
        if not 1 <= len(action.hold_id) <= HOLD_ID_CHARS_MAX or is_known:
            return InvalidRequest(f"a hold needs a new id of 1 to {HOLD_ID_CHARS_MAX} characters")
        if len(self) >= HOLDS_MAX:
            return InvalidRequest(
                f"there are {HOLDS_MAX} holds, which is the maximum: wait until a backup ends, or "
                "until the hold of a crashed backup expires"
            )
        return None

    def check_order(self, actions: Sequence[AnyAction]) -> InvalidRequest | None:
        """Return the reason to refuse a commit of these actions, or None.

        `check` sees the state before the commit, so it cannot see that an earlier action of the
        commit ends the hold.
        """
        released: set[str] = set()
        for action in actions:
            if isinstance(action, ReleaseHold):
                released.add(action.hold_id)
            elif isinstance(action, RenewHold) and action.hold_id in released:
                return InvalidRequest(
                    f"hold {action.hold_id[:HOLD_ID_CHARS_MAX]!r} cannot be released and then "
                    "renewed in one commit"
                )
        return None

    def do(self, action: HoldAction, now_ms: int, elapsed_ms: int) -> None:
        """Apply the action, after `check` and `check_order`. `now_ms` is the entry's time."""
        match action:
            case TakeHold(hold_id, duration_ms):
                self._holds[hold_id] = Hold(hold_id, now_ms, elapsed_ms + duration_ms)
            case RenewHold(hold_id, duration_ms):
                taken_ms = self._holds[hold_id].taken_ms
                self._holds[hold_id] = Hold(hold_id, taken_ms, elapsed_ms + duration_ms)
            case ReleaseHold(hold_id):
                self._holds.pop(hold_id, None)

    def forget(self, elapsed_ms: int) -> None:
        """Drop the holds that have expired."""
        for hold in [hold for hold in self if hold.until_ms <= elapsed_ms]:
            del self._holds[hold.hold_id]
