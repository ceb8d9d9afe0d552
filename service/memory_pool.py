"""Bytes within a limit that many clients share.

Each taker has an owner: a principal, or UNPROVED. Without shares, one principal could take all
bytes and keep them, and then no other client is served. Invariants:
M1 `used` is the sum of what the owners hold. The owner that took a byte gives it back, once.
M2 An owner takes bytes only while it then holds at most as many as are free. So an owner that is
   alone gets half of the limit, two get a third each, and a new owner finds room (Choudhury and
   Hahne 1998, "dynamic threshold", with alpha 1). An owner that holds nothing may take any size
   that fits, so few large takes may fill the limit.
M3 Takers of one owner get bytes in the order of their requests. An owner that holds nothing and
   waits for room is passed by none that came later, because small requests could delay a large one
   without end. Each taker that is served puts its owner behind the others that wait, so an owner
   whose queue never empties passes another one once. An owner that waits only because of its share
   delays no other owner.
M4 A taker waits under the owner of its last request. The owner of a connection changes at its
   login. If the connection stayed under its first owner too, it would take nothing there, and all
   others of this owner would wait behind it.

Pure: no IO but a line of the log about a bug, no clock.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

log = logging.getLogger("tidelog.memory")

UNPROVED = "unproved"
"""The owner of connections whose clients have not proved their principal. A principal's name has a
colon."""
WOKEN_AT_ONCE = 64
"""Takers that go on in one iteration of the event loop."""
UNPROVED_PART = 16
"""UNPROVED holds at most the limit divided by this number."""
EVERYONE = ""
"""The owner of all connections of a listener without security, and of other brokers. It may hold
the whole limit, because its clients are not known apart."""


class Taker(Protocol):
    """A client of the pool, which may wait for room."""

    @property
    def owner(self) -> str:
        """The owner of the bytes that the client takes."""
        ...

    def on_memory(self) -> None:
        """Try again to take the bytes: there may be room now."""


class MemoryPool:
    """Bytes within a limit, shared by owners (M1 to M3). Owned by one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0
        """Calls of `change` that did not fit."""
        self._held_bytes: dict[str, int] = {}
        """Of the owners that hold any."""
        self._waiting: dict[str, dict[Taker, None]] = {}
        """By owner: first the one that has waited longest since it began to wait, or was served."""
        self._owner_of: dict[Taker, str] = {}
        """The owner that each of these takers waits under."""
        self._is_waking = self._has_changed = False
        """Whether a round is under way or due, and whether it needs another one."""

    def take(self, taker: Taker, size: int) -> bool:
        """Hold `size` bytes for the owner of the taker, and return True.

        If they do not fit, return False; `on_memory` of the taker is called when there may be room.
        Bytes of any size fit if no others are held.
        """
        owner = taker.owner
        if self._waiting:
            return self._take_behind_others(taker, owner, size)
        if self._has_room(owner, size):
            self._hold(owner, size)
            return True
        self._wait(taker, owner)
        return False

    def _take_behind_others(self, taker: Taker, owner: str, size: int) -> bool:
        """Hold the bytes if they fit, and if it is the taker's turn (M3); else wait."""
        if self._owner_of.get(taker, owner) != owner:
            self._forget(taker)
        takers = self._waiting.get(owner)
        is_first = not takers or next(iter(takers)) is taker
        if not (is_first and self._has_room(owner, size)) or self._is_behind_newcomer(owner):
            self._wait(taker, owner)
            return False
        self._hold(owner, size)
        if takers:
            self._forget(taker)
            if takers:
                self._waiting[owner] = self._waiting.pop(owner)
            if self._waiting and not self._is_waking and not self._wakes_soon():
                self.wake()  # a taker that is late: those behind it waited for it
        return True

    def _hold(self, owner: str, size: int) -> None:
        self.used += size
        self._held_bytes[owner] = self._held_bytes.get(owner, 0) + size

    def _wait(self, taker: Taker, owner: str) -> None:
        self._waiting.setdefault(owner, {})[taker] = None
        self._owner_of[taker] = owner

    def change(self, owner: str, old_size: int, size: int) -> bool:
        """Hold `size` bytes for the owner in place of `old_size` bytes, and return True.

        If `size` is more and does not fit, change nothing and return False: the caller does not
        wait (M3).
        """
        if size <= old_size:
            self.give(owner, old_size - size)
            return True
        if not self._has_room(owner, size, old_size):
            self.refused += 1
            return False
        self._hold(owner, size - old_size)
        return True

    def give(self, owner: str, size: int) -> None:
        """Give bytes back that an owner holds."""
        if not size:
            return
        self.used -= size
        remaining_bytes = self._held_bytes[owner] - size
        assert remaining_bytes >= 0, "what is given back was taken"
        if remaining_bytes:
            self._held_bytes[owner] = remaining_bytes
        else:
            del self._held_bytes[owner]
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Let the takers try again while their bytes fit: the first of each owner, in rounds.

        A taker that goes on may give bytes back at once. This asks for another round: calls within
        calls would go as deep as there are takers. After WOKEN_AT_ONCE takers, the next iteration
        of the event loop continues.
        """
        self._has_changed = True
        if self._is_waking:
            return
        self._is_waking, woken = True, 0
        while self._has_changed:
            self._has_changed = False
            gone_on = sum(self._has_gone_on(owner) for owner in list(self._waiting))
            self._has_changed |= gone_on > 0
            woken += gone_on
            if woken >= WOKEN_AT_ONCE and self._wakes_soon():
                return
        self._is_waking = False

    def _wakes_soon(self) -> bool:
        """Begin a round in the next iteration of the event loop; False without an event loop.

        A taker that has just taken bytes has not noted it: if it were woken by another pool within
        its call, it would take the bytes for the same frame again.
        """
        with suppress(RuntimeError):
            asyncio.get_running_loop().call_soon(self._wake_again)
            self._is_waking = True
            return True
        return False

    def _wake_again(self) -> None:
        self._is_waking = False
        self.wake()

    def _has_gone_on(self, owner: str) -> bool:
        """Let the first taker of an owner try again.

        Return whether it waits no longer. A taker that raises an error is forgotten: its caller is
        another one, which must not fail.
        """
        takers = self._waiting.get(owner)
        if not takers:
            return False
        taker = next(iter(takers))
        try:
            taker.on_memory()
        except Exception:
            log.exception("bug in a client of %s that waited for memory", owner or "the broker")
            if self._owner_of.get(taker) == owner:
                self._forget(taker)
        return next(iter(takers), None) is not taker

    def leave(self, taker: Taker) -> None:
        """Forget a taker that waits, because its connection has ended or may not go on."""
        if taker in self._owner_of:
            self._forget(taker)
            self.wake()

    def _has_room(self, owner: str, size: int, old_size: int = 0) -> bool:
        """Whether `size` bytes fit in place of the `old_size` bytes that the owner holds."""
        others_bytes = self.used - old_size
        free, owner_bytes = self.limit - others_bytes, self._held_bytes.get(owner, 0) - old_size
        if owner == UNPROVED:
            return owner_bytes + size <= self.limit // UNPROVED_PART and size <= free
        if not others_bytes:
            return True
        return size <= free and (not owner_bytes or owner == EVERYONE or owner_bytes + size <= free)

    def _is_behind_newcomer(self, owner: str) -> bool:
        """Whether an owner that holds nothing waits since before this owner."""
        for other in self._waiting:
            if other == owner:
                return False
            if other != UNPROVED and other not in self._held_bytes:
                return True
        return False

    def _forget(self, taker: Taker) -> None:
        owner = self._owner_of.pop(taker)
        takers = self._waiting[owner]
        del takers[taker]
        if not takers:
            del self._waiting[owner]


class Share:
    """The bytes that one request holds of a pool.

    The request ends its share, and what still runs for the request then, for example a cancelled
    task, gets no bytes. A thread cannot be cancelled: while one uses the bytes, they are held also
    beyond the end.

    A share does not wait in the queue of M3. Its bytes are held until a client has taken its
    answer, perhaps for minutes, and all others would wait behind the first that does not fit.
    """

    __slots__ = ("_users", "is_ended", "owner", "pool", "size")

    def __init__(self, pool: MemoryPool, owner: str) -> None:
        self.pool = pool
        self.owner = owner
        self.size = 0
        self.is_ended = False
        self._users = 0

    def set(self, size: int) -> bool:
        """Hold `size` bytes from now on, and return True.

        If `size` is more than before and does not fit, or if the share has ended, change nothing
        and return False.
        """
        if self.is_ended:
            return not size
        if not self.pool.change(self.owner, self.size, size):
            return False
        self.size = size
        return True

    def end(self) -> None:
        """Give the bytes back when no thread uses them, and take none from now on."""
        self.is_ended = True
        self._give_unused()

    def begin_use(self) -> None:
        """Hold the bytes until `end_use`, because a thread uses them."""
        self._users += 1

    def end_use(self) -> None:
        self._users -= 1
        self._give_unused()

    def _give_unused(self) -> None:
        if self.is_ended and not self._users:
            self.pool.give(self.owner, self.size)
            self.size = 0
