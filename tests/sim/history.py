"""Requests of clients and their answers: the events of a history, as values and as JSON lines.

The harness of a cluster, simulated or real, records an invocation before each request (`op` is a
number of its own) and one outcome when the answer comes. An invocation without an outcome means
that its client crashed: the outcome is unknown. `at` are seconds of one clock, the harness's: that
an answer came before another question is all that the checker takes from it, so the clock must not
be a broker's.

A record is known by its `value`, a text that no other request of the history has; a retry of a
request has the same values and the same idempotency key, and is an invocation of its own.

    {"event":"append","op":7,"at":1.5,"client":"p1","broker":"b2","key":"k7",
     "records":[{"topic":"t","value":"p1/7","partition":0}]}
    {"event":"acked","op":7,"at":1.6,"places":[["t",0,41]]}
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec


class Place(NamedTuple):
    """Where a record lies, or is said to lie."""

    topic: str
    partition: int
    offset: int


class Read(NamedTuple):
    """A record as a reader got it."""

    offset: int
    value: str


class Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record of a request.

    Without a partition the broker chooses one. `record_key` matters where the topic is compacted;
    `source` is the record that it was made from.
    """

    topic: str
    value: str
    partition: int | None = None
    record_key: str | None = None
    is_tombstone: bool = False
    source: Place | None = None


class Portion(NamedTuple):
    """Records of one partition that a group member read; it continues at `next_offset`."""

    topic: str
    partition: int
    records: list[Read]
    next_offset: int


class Offsets(NamedTuple):
    """Offsets that a group member commits in a generation."""

    group: str
    member: str
    generation: int
    places: list[Place]


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, omit_defaults=True):
    at: float


class _Invocation(_Event, frozen=True):
    op: int


class _Outcome(_Event, frozen=True):
    op: int


# -- invocations, and the outcome that says yes


class Append(_Invocation, frozen=True):
    """A produce request: `acked`.

    `key` is its idempotency key; `producer` says that it is once in the log however often it is
    sent, by ids and sequences of a Kafka producer. `commit`, if any, is what the same request
    commits of a group.
    """

    client: str
    records: list[Written]
    key: str | None = None
    broker: str = ""
    is_producer: bool = False
    commit: Offsets | None = None


class Acked(_Outcome, frozen=True):
    """In the log, in order of the records; None: promised, where is not known yet (acks=1)."""

    places: list[Place] | None = None


class Fetch(_Invocation, frozen=True):
    """Records from an offset on: `fetched`, or `outofrange`.

    `stream`, if any, names a reader whose next fetch continues at `next_offset` of the last.
    `may_lag`: an empty answer may lack what a process acknowledged that no broker knows.
    `lag_s`: it may lack what was acknowledged within this time before it. A read that waits may;
    its wait is longer, unless its broker ends.
    """

    client: str
    topic: str
    partition: int
    offset: int
    broker: str = ""
    stream: str = ""
    may_lag: bool = False
    lag_s: float = 0.0


class Fetched(_Outcome, frozen=True):
    """`broker_life` of the answering process, if known: what it says of ends never goes back."""

    records: list[Read]
    next_offset: int
    log_start_offset: int
    high_watermark: int
    broker_life: str = ""


class OutOfRange(_Outcome, frozen=True):
    """The offset is not in the log; where that begins and ends."""

    log_start_offset: int
    high_watermark: int


class Look(_Invocation, frozen=True):
    """Where the partition begins and ends, as of now on every broker: `looked`."""

    client: str
    topic: str
    partition: int
    broker: str = ""


class Looked(_Outcome, frozen=True):
    log_start_offset: int
    high_watermark: int


class Scan(_Invocation, frozen=True):
    """The partition's rows in its table, read past the brokers: `scanned`."""

    client: str
    topic: str
    partition: int


class Scanned(_Outcome, frozen=True):
    """All rows of the table; those of [log_start_offset, sealed_end) are the log's."""

    rows: list[Read]
    log_start_offset: int
    sealed_end: int


class Poll(_Invocation, frozen=True):
    """The next records for a member of a group: `polled`."""

    group: str
    member: str
    broker: str = ""


class Polled(_Outcome, frozen=True):
    """In this generation of the group; -1 when the member's partitions were assigned by hand."""

    generation: int
    portions: list[Portion]


class Commit(_Invocation, frozen=True):
    """Offsets of a group, as places: `committed`. -1 is no generation."""

    group: str
    member: str
    generation: int
    offsets: list[Place]
    broker: str = ""


class Committed(_Outcome, frozen=True):
    """They are the group's."""


class Seek(_Invocation, frozen=True):
    """A member of a group wants to go on there: `sought`."""

    group: str
    member: str
    positions: list[Place]


class Sought(_Outcome, frozen=True):
    """Its next records are those, wherever it asks for them."""


class Ask(_Invocation, frozen=True):
    """The place where a group continues to read, as of now on every broker."""

    group: str
    broker: str = ""


class Told(_Outcome, frozen=True):
    offsets: list[Place]


# -- the other outcomes


class Refused(_Outcome, frozen=True):
    """A definite no: it did not happen and never will."""

    why: str = ""


class Unknown(_Outcome, frozen=True):
    """It may have happened, or may still."""

    why: str = ""


# -- facts


class Topic(_Event, frozen=True):
    """A topic of the history; its partitions start empty."""

    name: str
    partitions: int
    is_compacted: bool = False


class Owns(_Event, frozen=True):
    """A client saw that the member has these partitions in this generation."""

    group: str
    generation: int
    member: str
    partitions: list[tuple[str, int]]


class Given(_Event, frozen=True):
    """A client got a new producer id, which no other producer has."""

    client: str
    producer_id: int


class Final(_Event, frozen=True):
    """The partition in the end, when nothing fails any more: all records from the log start on."""

    topic: str
    partition: int
    log_start_offset: int
    records: list[Read]


class Drained(_Event, frozen=True):
    """The group, which began where the log does, has been read to the end.

    The topics are these, or all those of which it got records.
    """

    group: str
    topics: list[str] = []


class Deletion(_Event, frozen=True):
    """A client asks for the topic's deletion: from now on it may be gone."""

    topic: str


class GivenUp(_Event, frozen=True):
    """A repair gave up records [offset, end_offset): a reader may pass over them."""

    topic: str
    partition: int
    offset: int
    end_offset: int


Yes: TypeAlias = (
    Acked | Fetched | OutOfRange | Looked | Scanned | Polled | Committed | Sought | Told
)
Invocation: TypeAlias = Append | Fetch | Look | Scan | Poll | Commit | Seek | Ask
Outcome: TypeAlias = Yes | Refused | Unknown
Event: TypeAlias = (
    Invocation | Outcome | Topic | Owns | Given | Final | Drained | Deletion | GivenUp
)

INVOCATIONS = (Append, Fetch, Look, Scan, Poll, Commit, Seek, Ask)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def to_line(event: Event) -> bytes:
    """Without the newline."""
    return _encode(event)


def write(path: Path, events: Iterable[Event]) -> None:
    path.write_bytes(b"".join(to_line(event) + b"\n" for event in events))


def read(path: Path) -> list[Event]:
    return list(parse(path.read_bytes().splitlines()))


def parse(lines: Sequence[bytes]) -> Iterator[Event]:
    """A torn last line is passed over: its writer was killed."""
    for number, line in enumerate(lines):
        try:
            yield _decode(line)
        except msgspec.DecodeError:
            if number + 1 < len(lines):
                raise


class Recorder:
    """Events in the order in which they happened.

    For one thread; several write one each, and number their `op`s apart: the checker sorts by `at`.
    """

    def __init__(self, first_op: int = 1) -> None:
        self.events: list[Event] = []
        self._next = first_op

    def next_op(self) -> int:
        self._next += 1
        return self._next - 1

    def add(self, event: Event) -> None:
        self.events.append(event)
