"""Answers to producers, and whether the log agrees with them: the checker of I1, I2, I4 and I6.

A produce request has attempts: each was acked (with offsets, or with acks=1 without), refused (a
definite no), or its outcome is unknown, because the answer was lost or said so. Whatever the
log does with an unknown one is right, as long as it is whole, or whole and once under an
idempotency key. Values are unique over a history, so that each record is recognised. Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a record lies, or is said to lie."""

    partition: int
    offset: int


class Written(NamedTuple):
    """A record of a request. Without a partition the broker chooses one."""

    value: bytes
    key: bytes | None = None
    partition: int | None = None


class Read(NamedTuple):
    """A record of the log."""

    offset: int
    value: bytes | None
    key: bytes | None = None


@dataclass(eq=False)
class Request:
    """One produce request and what came of its attempts. Written by one thread at a time.

    `producer` names who sends one request after the other, in the order of the history.
    `is_acked_in_turn`: the answer was there before that producer's next request began.
    """

    records: Sequence[Written]
    is_keyed: bool = True
    producer: int = 0
    is_acked_in_turn: bool = False
    acks: list[list[Place]] = field(default_factory=list)
    acks_without_offsets: int = 0
    refusals: int = 0
    unknown: int = 0

    @property
    def is_acked(self) -> bool:
        return bool(self.acks or self.acks_without_offsets)

    @property
    def copies(self) -> tuple[int, int]:
        """How often its records may be in the log, least and most."""
        acked = len(self.acks) + self.acks_without_offsets
        if self.is_keyed:
            return min(acked, 1), min(acked + self.unknown, 1)
        return acked, acked + self.unknown


Log = Mapping[int, Sequence[Read]]
"""By partition, in the order in which a reader got them."""


def violations(requests: Sequence[Request], log: Log) -> list[str]:
    """Find what is wrong with this log, given the answers to the producers of all its records."""
    sent: dict[bytes, Request] = {}
    for request in requests:
        for record in request.records:
            assert record.value not in sent, f"{record.value!r} was sent twice by the test itself"
            sent[record.value] = request
    places: dict[bytes, list[Place]] = defaultdict(list)
    for partition, records in log.items():
        for read in records:
            places[read.value or b""].append(Place(partition, read.offset))
    read_by_place = {
        Place(number, read.offset): read for number, records in log.items() for read in records
    }
    findings = [*_holes(log), *_foreign(places, sent)]
    for request in requests:
        findings += _counted(request, places)
        findings += _placed(request, places, read_by_place)
    return [*findings, *_overtaken(requests, places)]


def cut(
    requests: Sequence[Request], log: Log, is_sent_again: Callable[[Request], bool]
) -> list[str]:
    """Write down in the requests that the log continues from this copy of an earlier moment.

    Forget the answers about what it does not have. Call it while no request can be answered.

    `is_sent_again` are requests whose producer still waits for an answer. The others may be in the
    log later only if they are in this copy. Return what is wrong with the copy.
    """
    values = {read.value for records in log.values() for read in records}
    for request in requests:
        request.acks = [
            places
            for places in request.acks
            if any(place.offset < len(log[place.partition]) for place in places)
        ]
        if not any(record.value in values for record in request.records):
            request.acks_without_offsets = 0
            if not is_sent_again(request):
                request.unknown = 0
                request.is_acked_in_turn = False
    return violations(requests, log)


def _holes(log: Log) -> Iterator[str]:
    """I2: offsets are dense from 0, each is there once, and readers get them in order."""
    for partition, records in log.items():
        for expected, read in enumerate(records):
            if read.offset != expected:
                yield f"hole: partition {partition} has offset {read.offset} after {expected - 1}"
                break


def _foreign(places: Mapping[bytes, list[Place]], sent: Mapping[bytes, Request]) -> Iterator[str]:
    for value in places.keys() - sent.keys():
        yield f"foreign: no producer sent {value[:80]!r} at {places[value][0]}"


def _counted(request: Request, places: Mapping[bytes, list[Place]]) -> Iterator[str]:
    """I1: acked is there; I6: refused is not; I4: all of a request or nothing."""
    counts = Counter(len(places.get(record.value, ())) for record in request.records)
    low, high = request.copies
    name = request.records[0].value[:80]
    if len(counts) > 1:
        yield f"half: records of {name!r} are there {sorted(counts)} times"
    if min(counts) < low:
        yield f"lost: {name!r} was acked {low} times and is there {min(counts)} times"
    if max(counts) > high:
        fault = "doubled" if high else "refused, yet there"
        yield f"{fault}: {name!r} may be there {high} times and is there {max(counts)} times"


def _placed(
    request: Request, places: Mapping[bytes, list[Place]], read_by_place: Mapping[Place, Read]
) -> Iterator[str]:
    """I1: what was acked lies at exactly its offset, as it was sent."""
    name = request.records[0].value[:80]
    for acked in request.acks:
        if acked != request.acks[0] and request.is_keyed:
            yield f"two answers: {name!r} was acked at {request.acks[0]} and at {acked}"
        if len(acked) != len(request.records):
            yield f"miscounted: {len(acked)} places for {len(request.records)} records of {name!r}"
            continue
        for record, place in zip(request.records, acked, strict=True):
            read = read_by_place.get(place)
            if read is None or read.value != record.value:
                yield f"moved: {record.value[:80]!r} was acked at {place}, there is {read}"
    for record in request.records:
        for place in places.get(record.value, ()):
            if read_by_place[place].key != record.key:
                yield f"changed: key of {record.value[:80]!r} is {read_by_place[place].key!r}"
            if record.partition not in {None, place.partition}:
                yield f"astray: {record.value[:80]!r} is in partition {place.partition}"
    if not request.is_keyed and len(request.acks) + request.unknown > 1:
        return  # several copies, each in order; a record's copy is unknown
    by_partition: dict[int, list[int]] = defaultdict(list)
    for record in request.records:
        for place in places.get(record.value, ()):
            by_partition[place.partition].append(place.offset)
    for partition, offsets in by_partition.items():
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            yield f"torn: {name!r} lies at {offsets} of partition {partition}"


def _overtaken(requests: Sequence[Request], places: Mapping[bytes, list[Place]]) -> Iterator[str]:
    """A record that a producer knew to be acked lies before all that it sent afterwards."""
    newest: dict[tuple[int, int], Place] = {}
    for request in requests:
        mine = [place for record in request.records for place in places.get(record.value, ())]
        for partition in {place.partition for place in mine}:
            there = [place for place in mine if place.partition == partition]
            last_place = newest.get((request.producer, partition))
            if last_place is not None and min(there) < last_place:
                name = request.records[0].value[:80]
                yield f"overtaken: {name!r} lies at {min(there)}, before {last_place}, sent earlier"
            if request.is_acked_in_turn:
                newest[request.producer, partition] = max(there)
