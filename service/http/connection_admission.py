"""Admission: which connections a listener keeps, for how long, and how many bytes they hold.

Pure: no IO, no clock. The listener (service.http.uvicorn_protocol) passes the time, and closes the
connections that `Admission` returns. Invariants:
A1 A request takes bytes from a pool of memory, which principals share (memory_pool), and gives each
   of these bytes back exactly once.
A2 A pool is exceeded only while one share alone is larger than its limit.
A3 A connection is unproved until its client has proved its principal or, without security, has sent
   a whole head; at the port for peers, until it has sent the broker's token. If a bound of
   connections is reached, an unproved connection is closed for a new one. So unproved connections
   cannot keep out other clients.
A4 No clock runs while the client waits for the broker.
A5 A proved connection has an owner: its principal or, if the listener knows no principals, its
   address. If a bound is reached and no connection is unproved, an idle connection is closed for a
   new one, if its owner has more than an equal share of the bound. So the idle connections of one
   owner cannot keep out others. A connection with a request under way is not closed.

Connections hold at most the limits of the two pools, and CONNECTION_BYTES for each connection
(`Admission.bounds`). An uncompressed body that arrives in one packet is not charged. Before the
next packet is read, the body's bytes are in the write buffer of the log (`buffer_bytes_max`), or
they are freed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from ipaddress import IPv6Address
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidelog.service.memory_pool import MemoryPool

HEAD_BYTES_MAX = 64 * 1024
HEAD_FIELDS_MAX = 100
PIPELINED_MAX = 32
UNPROVED_PIPELINED_MAX = 4
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
ADDRESSES_MIN = 1000
"""If a listener may have fewer connections, one address may have three quarters of them."""
NETWORK_BITS = 64
"""An address of IPv6 stands for its network of this size, which one client may have alone."""
LOOKED_MAX, LOOKED_OWNERS_MAX = 16, 4
"""Maximum connections of one owner, and owners, that a new connection looks at to find one that is
idle. This takes less than 0.1 ms."""
LOG_LINES = 10
LOG_PERIOD_S = 10.0


class Phase(Enum):
    """The event that a connection waits for.

    If a phase takes too long, the listener closes the connection, and `Admission.ended` counts it
    by the phase's value.
    """

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

    @property
    def owner(self) -> str:
        """The principal that the client has proved; empty if the listener knows no principals."""
        ...

    def observed(self) -> tuple[Phase, int]:
        """Return the phase, and a number that grows with progress, or 0.

        It counts requests in IDLE and HEAD, bytes in BODY, STREAM and ANSWER.
        """
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
    unproved_idle_s: float = 10.0
    """Maximum time between the requests of an unproved connection."""


def address_max(connections_max: int) -> int:
    """Return how many connections of a listener for clients one address may have."""
    quarter = connections_max // 4
    return quarter if connections_max >= ADDRESSES_MIN else max(connections_max - quarter, 1)


def network_of(address: str) -> str:
    """Return what the connections of an address are counted by (NETWORK_BITS)."""
    if ":" not in address:
        return address
    whole = IPv6Address(address.partition("%")[0])
    if whole.ipv4_mapped is not None:
        return str(whole.ipv4_mapped)
    return str(IPv6Address(int(whole) >> NETWORK_BITS << NETWORK_BITS))


class _LastCheck:
    """The state of a connection when `overdue` last checked it."""

    __slots__ = ("address", "is_spare", "owner", "phase", "progress", "since_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.owner: str | None = None  # None: unproved
        self.is_spare = False
        self.phase: Phase | None = None
        self.progress = 0
        self.since_s = 0.0


class _Crowd(Generic[G]):
    """Connections that have a bound together: those of a listener, or of one of its addresses."""

    __slots__ = ("_by_size", "_owners", "count", "unproved")

    def __init__(self) -> None:
        self.count = 0
        self.unproved: dict[G, None] = {}
        """The oldest first."""
        self._owners: dict[str, OrderedDict[G, None]] = {}
        """The proved connections by owner, roughly in the order of their last use."""
        self._by_size: dict[int, dict[str, None]] = {}
        """The owners by the number of their connections."""

    def add(self, guest: G) -> None:
        self.count += 1
        self.unproved[guest] = None

    def prove(self, guest: G, owner: str) -> None:
        del self.unproved[guest]
        guests = self._owners.setdefault(owner, OrderedDict())
        guests[guest] = None
        self._resize(owner, len(guests) - 1, len(guests))

    def use(self, guest: G, owner: str) -> None:
        self._owners[owner].move_to_end(guest)

    def remove(self, guest: G, owner: str | None) -> None:
        self.count -= 1
        if owner is None:
            del self.unproved[guest]
            return
        guests = self._owners[owner]
        del guests[guest]
        if not guests:
            del self._owners[owner]
        self._resize(owner, len(guests) + 1, len(guests))

    def _resize(self, owner: str, old_size: int, size: int) -> None:
        if old_size:
            owners = self._by_size[old_size]
            del owners[owner]
            if not owners:
                del self._by_size[old_size]
        if size:
            self._by_size.setdefault(size, {})[owner] = None

    def displaceable(
        self, bound: int, newcomer: str, idle_of: Callable[[G], bool | None]
    ) -> G | None:
        """Return the connection to close for a new one of the owner `newcomer` (A3, A5), or None.

        `idle_of` returns whether a connection has been idle since the last check, or None if it has
        a request under way.
        """
        if self.unproved:
            return next(iter(self.unproved))
        owners = len(self._owners) + (newcomer not in self._owners)
        share = max(bound // owners, 1)
        by_size = (self._by_size[size] for size in sorted(self._by_size, reverse=True))
        largest = (owner for same in by_size for owner in same)
        for owner in islice(largest, LOOKED_OWNERS_MAX):
            guests = self._owners[owner]
            if len(guests) <= share:
                return None
            used: G | None = None
            for _ in range(min(LOOKED_MAX, len(guests))):
                guest = next(iter(guests))
                is_idle = idle_of(guest)
                if is_idle:
                    return guest
                if is_idle is not None and used is None:
                    used = guest
                guests.move_to_end(guest)
            if used is not None:
                return used
        return None


class Admission(Generic[G]):
    """The connections of one listener and the bytes that they hold. Owned by one event loop."""

    def __init__(self, limits: Limits, other_bounds: Mapping[str, int] | None = None) -> None:
        """`other_bounds` has the maximum bytes of those parts of the process not counted here."""
        self.limits = limits
        self._other_bounds = other_bounds or {}
        self.bodies = MemoryPool(limits.bodies_bytes_max)
        """Bodies that arrive in more than one packet, or compressed."""
        self.answers = MemoryPool(limits.answers_bytes_max)
        """Records that are read and encoded, until the socket has taken the answer."""
        self.ended: Counter[str] = Counter()
        """Connections that were closed, by reason."""
        self._seen: dict[G, _LastCheck] = {}
        self._everyone: _Crowd[G] = _Crowd()
        self._addresses: dict[str, _Crowd[G]] = {}
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
        """Return the maximum bytes of each part of the process's memory.

        Their sum, plus the memory that a process without records needs, bounds the resident memory
        of this process.
        """
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
        """Count a new connection; return one to close for it, or None.

        The returned connection counts no more.
        """
        limits, last_check = self.limits, _LastCheck(network_of(address))
        of_address = self._addresses.get(last_check.address) or _Crowd()
        full, bound = None, limits.connections_max
        if of_address.count >= limits.address_max:
            full, bound = of_address, limits.address_max
        elif (
            self._everyone.count >= limits.connections_max
            or len(self._everyone.unproved) >= limits.unproved_max
        ):
            full = self._everyone
        victim: G | None = None
        if full is not None:
            victim = full.displaceable(bound, last_check.address, self._idle_of)
            if victim is None:
                last_check.is_spare = True
                if len(self._spare) >= limits.spare_max:
                    victim = next(iter(self._spare))
        if victim is not None:
            self.leave(victim)
            self.ended["displaced"] += 1
        self._seen[guest] = last_check
        if last_check.is_spare:
            self._spare[guest] = None
            return victim
        self._everyone.add(guest)
        self._addresses.setdefault(last_check.address, of_address).add(guest)
        return victim

    def _idle_of(self, guest: G) -> bool | None:
        last_check, (phase, progress) = self._seen[guest], guest.observed()
        if phase not in (Phase.IDLE, Phase.HEAD):
            return None
        return phase is last_check.phase and progress == last_check.progress

    def prove(self, guest: G) -> None:
        """Note that the client has sent what proves its connection (A3).

        `guest.owner` is its owner from now on.
        """
        last_check = self._seen.get(guest)
        if last_check is None or last_check.is_spare or last_check.owner is not None:
            return
        last_check.owner = guest.owner or last_check.address
        self._everyone.prove(guest, last_check.owner)
        self._addresses[last_check.address].prove(guest, last_check.owner)

    def is_spare(self, guest: G) -> bool:
        """Whether the connection is above a bound, so that only the routes of health are served."""
        return guest in self._spare

    def leave(self, guest: G) -> None:
        """Stop counting a connection that is closed. A second call does nothing."""
        last_check = self._seen.pop(guest, None)
        if last_check is None:
            return
        if last_check.is_spare:
            del self._spare[guest]
            return
        self._everyone.remove(guest, last_check.owner)
        of_address = self._addresses[last_check.address]
        of_address.remove(guest, last_check.owner)
        if not of_address.count:
            del self._addresses[last_check.address]

    # -- clocks

    def overdue(self, now_s: float) -> tuple[list[tuple[G, Phase]], bool]:
        """Check the next WATCHED_MAX connections.

        Return the connections whose time is over, and whether this call ends the round over all
        connections. The caller begins a round about once a second.
        """
        overdue_guests: list[tuple[G, Phase]] = []
        looked = 0
        for guest in islice(self._round, WATCHED_MAX):
            looked += 1
            last_check = self._seen.get(guest)
            if last_check is None:
                continue
            phase, progress = guest.observed()
            if phase is Phase.SERVED:
                last_check.phase = phase
                continue
            limit_s, least = self._clocks[phase]
            if phase is not last_check.phase or not 0 <= progress - last_check.progress < least:
                last_check.phase, last_check.progress, last_check.since_s = phase, progress, now_s
                if last_check.owner is not None:
                    self._everyone.use(guest, last_check.owner)
                    self._addresses[last_check.address].use(guest, last_check.owner)
                continue
            if phase is Phase.IDLE and last_check.owner is None:
                limits = self.limits
                is_first = last_check.is_spare or not progress
                limit_s = min(limit_s, limits.first_byte_s if is_first else limits.unproved_idle_s)
            if now_s - last_check.since_s >= limit_s:
                self.ended[phase.value] += 1
                overdue_guests.append((guest, phase))
        if looked == WATCHED_MAX:
            return overdue_guests, False
        self._round = iter(list(self._seen))
        return overdue_guests, True

    # -- log lines

    def line(self, now_s: float) -> int | None:
        """Decide whether to log a bad request.

        At most LOG_LINES are logged in LOG_PERIOD_S. Return None if it must not be logged. Else
        return the number of bad requests that were not logged since the last line.
        """
        self._lines = [at_s for at_s in self._lines if now_s - at_s < LOG_PERIOD_S]
        if len(self._lines) >= LOG_LINES:
            self._unlogged += 1
            return None
        self._lines.append(now_s)
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged
