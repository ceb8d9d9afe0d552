"""Admission: which connections a listener keeps, for how long, and how many bytes they hold.

Pure: no IO, no clock. The listener (service.http.protocol) passes the time, and closes the
connections that `Admission` returns. Invariants:
A1 A request takes bytes from a pool of memory, which principals share (memory_pool), and gives each
   of these bytes back exactly once.
A2 A pool is exceeded only while one share alone is larger than its limit.
A3 A connection is unproved until its client has sent a whole head or, at the port for peers, the
   broker's token. If a bound of connections is reached, an unproved connection is closed for a
   new one. So unproved connections cannot keep out other clients.
A4 No clock runs while the client waits for the broker.

Connections hold at most the limits of the two pools, and CONNECTION_BYTES for each connection
(`Admission.bounds`). An uncompressed body that arrives in one packet is not charged. Before the
next packet is read, the body's bytes are in the write buffer of the log (`buffer_bytes_max`), or
they are freed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidelog.service.memory_pool import MemoryPool

HEAD_BYTES_MAX = 64 * 1024
HEAD_FIELDS_MAX = 100
PIPELINED_MAX = 32
PIPELINED_FIELDS_MAX = 600
"""Maximum requests of one connection that wait for answers to earlier requests, and fields in their
heads, each of which takes ~130 bytes of memory. Requests above these numbers are not served."""
STREAM_BYTES = 64 * 1024
"""Records and objects of an open stream that no pool counts. More of them are charged as a body."""
CONNECTION_BYTES = 2 * 64 * 1024 + STREAM_BYTES
"""Maximum bytes of one connection that no pool counts: the head of a request, a stream's records,
and the part of answers that the socket has not taken."""
BODY_STEP_BYTES = 64 * 1024
"""A body is charged in multiples of this size."""
BYTES_PER_S_MIN = 512
"""Minimum mean rate of a body in `Limits.body_s`, and of an answer in `Limits.answer_s`."""
WATCHED_MAX = 1000
"""Maximum connections that one call of `overdue` checks. Such a call takes about 1 ms."""
LOG_LINES = 10
LOG_PERIOD_S = 10.0


class Phase(Enum):
    """The event that a connection waits for. If a phase takes too long, the listener closes the
    connection, and `Admission.ended` counts it by the phase's value."""

    HANDSHAKE = "handshake"
    """The end of the TLS handshake."""
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    STREAM = "stream"
    """The rest of a body whose answer has begun: the client streams records."""
    ANSWER = "answer"
    SERVED = "served"
    """The broker's work: no clock runs (A4)."""


class Guest(Protocol):
    """A connection, as Admission sees it."""

    def observed(self) -> tuple[Phase, int]:
        """Return the phase, and a number that grows with progress: requests in IDLE and HEAD, bytes
        in BODY, STREAM and ANSWER. In the other phases, the number is 0."""
        ...


G = TypeVar("G", bound=Guest)


class Limits(NamedTuple):
    """Bounds of one listener. Times are in seconds."""

    connections_max: int = 10_000
    unproved_max: int = 10_000
    address_max: int = 2_500
    """Maximum connections of one address."""
    spare_max: int = 64
    """Maximum connections above `connections_max` or `address_max`. The broker serves them only the
    routes of health."""
    bodies_bytes_max: int = 256 * 1024 * 1024
    answers_bytes_max: int = 256 * 1024 * 1024
    first_byte_s: float = 10.0
    head_s: float = 10.0
    body_s: float = 30.0
    stream_s: float = 600.0
    answer_s: float = 60.0
    idle_s: float = 75.0


class _LastCheck:
    """The state of a connection when `overdue` last checked it."""

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
        """`other_bounds` has the maximum bytes of the parts of the process that this object does
        not count."""
        self.limits = limits
        self._other_bounds = other_bounds or {}
        self.bodies = MemoryPool(limits.bodies_bytes_max)
        """Bodies that arrive in more than one packet, or compressed."""
        self.answers = MemoryPool(limits.answers_bytes_max)
        """Records that are read and encoded, until the socket has taken the answer."""
        self.ended: Counter[str] = Counter()
        """Connections that were closed, by reason."""
        self._seen: dict[G, _LastCheck] = {}
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
        """Return the maximum bytes of each part of the process's memory. Their sum, plus the memory
        that a process without records needs, bounds the resident memory of this process."""
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
        """Count a new connection. If the caller must close another connection for it, stop counting
        that connection and return it. Else return None."""
        limits, seen = self.limits, _LastCheck(address)
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
        """Note that the client has sent what proves its connection (A3)."""
        if self._unproved.pop(guest, guest) is None:
            del self._addresses[self._seen[guest].address].unproved[guest]

    def is_spare(self, guest: G) -> bool:
        """Whether the connection is above a bound, so that only the routes of health are served."""
        return guest in self._spare

    def leave(self, guest: G) -> None:
        """Stop counting a connection that is closed. A second call does nothing."""
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
        """Check the next WATCHED_MAX connections. Return the connections whose time is over, and
        whether this call ends the round over all connections. The caller begins a round about once
        a second."""
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
        """Decide whether to log a bad request. At most LOG_LINES are logged in LOG_PERIOD_S. Return
        None if it must not be logged. Else return the number of bad requests that were not logged
        since the last line."""
        self._lines = [at_s for at_s in self._lines if now_s - at_s < LOG_PERIOD_S]
        if len(self._lines) >= LOG_LINES:
            self._unlogged += 1
            return None
        self._lines.append(now_s)
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged
