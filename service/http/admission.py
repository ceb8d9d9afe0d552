"""Admission: which connections a listener keeps, for how long, and how many bytes they hold.

Pure: no IO, no clock; the listener (service.http.protocol) gives the time and closes what
`Admission` names. Invariants:
A1 What is taken from a `Budget` is given back once; the sum is never negative.
A2 A budget is exceeded only by one share that alone is larger than the budget.
A3 A client that has sent no whole head (or, at the port for peers, no token) is unproved. Unproved
   connections give way to new ones, so they cannot lock out clients.
A4 No clock runs while the client waits for the broker.

The bound of the memory is the sum of the budgets (`Admission.bounds`), with CONNECTION_BYTES for
each connection. A request whose body arrives in one packet is not charged: its bytes are in the
write buffer of the log (`buffer_bytes_max`) or gone before the next packet is read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

HEAD_BYTES_MAX = 64 * 1024
HEAD_FIELDS_MAX = 100
PIPELINED_MAX = 100
"""Requests of one connection that wait for the answer before. Later ones are not served."""
CONNECTION_BYTES = 2 * 64 * 1024
"""Of a connection, beside the budgets: its head, and what the socket has not taken of answers."""
BODY_STEP_BYTES = 64 * 1024
"""A body without a declared length is charged in such steps."""
BYTES_PER_S_MIN = 512
"""Of a body, and of an answer, over the time of its clock."""
WATCHED_MAX = 1000
"""Connections that one call of `overdue` looks at: about 1 ms."""
LOG_LINES = 10
LOG_PERIOD_S = 10.0


class Phase(Enum):
    """The event that a connection waits for; the value is the reason if its time is over."""

    HANDSHAKE = "handshake"
    """The end of the TLS handshake."""
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    STREAM = "stream"
    """A body whose answer has begun: records as they come."""
    ANSWER = "answer"
    SERVED = "served"
    """The broker: no clock runs (A4)."""


class Guest(Protocol):
    """A connection, as Admission sees it."""

    def observed(self) -> tuple[Phase, int]:
        """Return the phase, and a number that grows with progress: requests in IDLE and HEAD, bytes
        in the others."""
        ...


G = TypeVar("G", bound=Guest)


class Limits(NamedTuple):
    """Bounds of one listener. Times are in seconds."""

    connections_max: int = 10_000
    unproved_max: int = 10_000
    address_max: int = 2_500
    """Connections of one address."""
    spare_max: int = 64
    """Connections above the bound: only routes of health are served to them."""
    bodies_bytes_max: int = 256 * 1024 * 1024
    answers_bytes_max: int = 256 * 1024 * 1024
    first_byte_s: float = 10.0
    head_s: float = 10.0
    body_s: float = 30.0
    stream_s: float = 600.0
    answer_s: float = 60.0
    idle_s: float = 75.0


class Budget:
    """Bytes of one kind that are held at a time, in shares. Owned by an Admission."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0


class Share:
    """The bytes that one request holds of a budget. Its owner ends it with `set(0)`."""

    __slots__ = ("budget", "size")

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.size = 0

    def set(self, size: int) -> bool:
        """Hold `size` bytes; if more than before do not fit (A2), hold what was held, and return
        False."""
        budget = self.budget
        others = budget.used - self.size
        assert others >= 0, "A1: what is given back was taken"
        if others and size > self.size and others + size > budget.limit:
            budget.refused += 1
            return False
        budget.used = others + size
        self.size = size
        return True


class _Seen:
    """The state of a connection at its last look."""

    __slots__ = ("address", "is_spare", "phase", "progress", "since_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_spare = False
        self.phase: Phase | None = None
        self.progress = 0
        self.since_s = 0.0


class _Address(Generic[G]):
    __slots__ = ("count", "unproved")

    def __init__(self) -> None:
        self.count = 0
        self.unproved: dict[G, None] = {}


class Admission(Generic[G]):
    """The connections of one listener and the bytes that they hold. Owned by one event loop."""

    def __init__(self, limits: Limits, other_bounds: Mapping[str, int] | None = None) -> None:
        """`other_bounds` has the bytes of the parts of the process that are not counted here."""
        self.limits = limits
        self._other_bounds = other_bounds or {}
        self.bodies = Budget(limits.bodies_bytes_max)
        """Bodies of which more than one packet is read."""
        self.answers = Budget(limits.answers_bytes_max)
        """Records that are read and encoded, until the socket has taken the answer."""
        self.ended: Counter[str] = Counter()
        """Connections that were closed, by reason."""
        self._seen: dict[G, _Seen] = {}
        self._addresses: dict[str, _Address[G]] = {}
        self._unproved: dict[G, None] = {}
        self._spare: dict[G, None] = {}
        self._round: Iterator[G] = iter(())
        self._lines: list[float] = []
        self._unlogged = 0
        self._clocks = {
            Phase.HANDSHAKE: (limits.first_byte_s, 1),
            Phase.HEAD: (limits.head_s, 1),
            Phase.IDLE: (limits.idle_s, 1),
            Phase.BODY: (limits.body_s, round(limits.body_s * BYTES_PER_S_MIN)),
            Phase.STREAM: (limits.stream_s, 1),
            Phase.ANSWER: (limits.answer_s, round(limits.answer_s * BYTES_PER_S_MIN)),
        }

    @property
    def connections(self) -> int:
        return len(self._seen)

    def bounds(self) -> dict[str, int]:
        """Return the most bytes of each part of the process's memory. Their sum, with what the
        process needs without a record, bounds its resident memory."""
        limits = self.limits
        most = limits.connections_max + limits.spare_max
        return {
            "bodies": self.bodies.limit,
            "answers": self.answers.limit,
            "connections": most * CONNECTION_BYTES,
            **self._other_bounds,
        }

    # -- connections

    def arrive(self, guest: G, address: str) -> G | None:
        """Count a connection. Return the one to close for it, which is no longer counted."""
        limits, seen = self.limits, _Seen(address)
        of_address = self._addresses.get(address)
        if of_address is None:
            of_address = self._addresses[address] = _Address()
        counted = len(self._seen) - len(self._spare)
        is_over, victims = False, self._unproved
        if of_address.count >= limits.address_max:
            is_over, victims = True, of_address.unproved
        elif counted >= limits.connections_max or len(victims) >= limits.unproved_max:
            is_over = True
        victim: G | None = None
        if is_over:
            victim = next(iter(victims), None)
            if victim is None:
                seen.is_spare = True
                if len(self._spare) >= limits.spare_max:
                    victim = next(iter(self._spare))
        if victim is not None:
            self.leave(victim)
            self.ended["displaced"] += 1
            of_address = self._addresses.setdefault(address, of_address)
        self._seen[guest] = seen
        if seen.is_spare:
            self._spare[guest] = None
            if not of_address.count:
                self._addresses.pop(address, None)
            return victim
        of_address.count += 1
        of_address.unproved[guest] = None
        self._unproved[guest] = None
        return victim

    def prove(self, guest: G) -> None:
        """The client has shown what this listener asks for (A3)."""
        if self._unproved.pop(guest, guest) is None:
            del self._addresses[self._seen[guest].address].unproved[guest]

    def is_spare(self, guest: G) -> bool:
        """Whether the connection is above the bound: it gets health, and no other route."""
        return guest in self._spare

    def leave(self, guest: G) -> None:
        """The connection is closed; a second call does nothing."""
        seen = self._seen.pop(guest, None)
        if seen is None:
            return
        if seen.is_spare:
            del self._spare[guest]
            return
        of_address = self._addresses[seen.address]
        of_address.count -= 1
        of_address.unproved.pop(guest, None)
        self._unproved.pop(guest, None)
        if not of_address.count:
            del self._addresses[seen.address]

    # -- clocks

    def overdue(self, now_s: float) -> tuple[list[tuple[G, Phase]], bool]:
        """Return connections whose time is over, of WATCHED_MAX, and whether that was the last of
        the round over all. Call it about once a second."""
        found: list[tuple[G, Phase]] = []
        looked = 0
        for guest in islice(self._round, WATCHED_MAX):
            looked += 1
            seen = self._seen.get(guest)
            if seen is None:
                continue
            phase, progress = guest.observed()
            if phase is Phase.SERVED:
                seen.phase = phase
                continue
            limit_s, least = self._clocks[phase]
            if phase is not seen.phase or not 0 <= progress - seen.progress < least:
                seen.phase, seen.progress, seen.since_s = phase, progress, now_s
                continue
            if phase is Phase.IDLE and (seen.is_spare or guest in self._unproved):
                limit_s = min(limit_s, self.limits.first_byte_s)
            if now_s - seen.since_s >= limit_s:
                self.ended[phase.value] += 1
                found.append((guest, phase))
        if looked == WATCHED_MAX:
            return found, False
        self._round = iter(list(self._seen))
        return found, True

    # -- log lines

    def line(self, now_s: float) -> int | None:
        """Return None if a bad request gets no line in the log (LOG_LINES in LOG_PERIOD_S do), else
        the number of those since the last line that got none."""
        self._lines = [at_s for at_s in self._lines if now_s - at_s < LOG_PERIOD_S]
        if len(self._lines) >= LOG_LINES:
            self._unlogged += 1
            return None
        self._lines.append(now_s)
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged
