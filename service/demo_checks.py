"""What the demo promises, each promise a pure function of the source and of what was read back.

A check compares what the source file says with what was seen and shows both; it never raises, so
that one broken promise does not hide the next.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from service.demo_flights import MISSING, Event

MEAN_TOLERANCE = 1e-9
"""Relative: two sums of the same whole numbers differ by rounding of the last digit at most."""


class Check(NamedTuple):
    """One row of the table."""

    name: str
    expected: str
    seen: str
    is_ok: bool


class Seen(NamedTuple):
    """A record as it was read over REST; `seq` is what its value says."""

    seq: int
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    value: bytes


class Place(NamedTuple):
    """Where an acknowledgement said that a record lies."""

    partition: int
    offset: int


class Carrier(NamedTuple):
    """Departures of one carrier, and their mean delay in minutes; None without any."""

    departures: int
    mean_delay: float | None


def carriers(rows: Iterable[Mapping[str, str]]) -> dict[str, Carrier]:
    """Carriers of the source file itself."""
    counts: Counter[str] = Counter()
    delays: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        counts[row["carrier"]] += 1
        if row["dep_delay"] != MISSING:
            delays[row["carrier"]].append(int(row["dep_delay"]))
    return {
        name: Carrier(count, sum(delays[name]) / len(delays[name]) if delays[name] else None)
        for name, count in counts.items()
    }


def check_count(name: str, expected: int, seen: int) -> Check:
    """As many as there must be."""
    return Check(name, f"{expected:,}", f"{seen:,}", expected == seen)


def check_dense(seen: Sequence[Seen], high_watermarks: Mapping[int, int]) -> Check:
    """Every offset from 0 to each partition's end is there, once, in order."""
    offsets: dict[int, list[int]] = {number: [] for number in high_watermarks}
    for record in seen:
        offsets.setdefault(record.partition, []).append(record.offset)
    wrong = [
        number
        for number, held in sorted(offsets.items())
        if held != list(range(high_watermarks.get(number, 0)))
    ]
    return Check(
        "offsets dense from 0 to the end",
        f"{len(high_watermarks)} partitions",
        f"not in {_some(wrong)}" if wrong else f"{len(offsets)} partitions",
        not wrong,
    )


def check_once(events: Sequence[Event], seen: Sequence[Seen]) -> Check:
    """No event is there twice."""
    times = Counter(record.seq for record in seen)
    twice = sorted(seq for seq, count in times.items() if count > 1)
    return Check(
        "no duplicate",
        f"{len(events):,} distinct",
        f"{len(times):,} distinct" + (f", repeated: {_some(twice)}" if twice else ""),
        not twice and len(times) == len(events),
    )


def check_acked(acked: Mapping[int, Place], seen: Sequence[Seen]) -> Check:
    """Every acknowledged event lies where its acknowledgement said."""
    places = {Place(record.partition, record.offset): record.seq for record in seen}
    lost = sorted(seq for seq, place in acked.items() if places.get(place) != seq)
    return Check(
        "acked records at their offsets",
        f"{len(acked):,}",
        f"{len(acked) - len(lost):,}" + (f", not: {_some(lost)}" if lost else ""),
        not lost,
    )


def check_values(events: Sequence[Event], seen: Sequence[Seen]) -> Check:
    """Key, value and timestamp are what was sent, byte for byte."""
    sent = {event.seq: event for event in events}
    changed = sorted(
        record.seq
        for record in seen
        if record.seq not in sent
        or sent[record.seq] != Event(record.seq, record.key, record.timestamp_ms, record.value)
    )
    return Check(
        "keys, values, timestamps unchanged",
        f"{len(events):,}",
        f"{len(seen) - len(changed):,}" + (f", not: {_some(changed)}" if changed else ""),
        not changed and len(seen) >= len(events),
    )


def check_key_order(events: Sequence[Event], seen: Sequence[Seen]) -> Check:
    """Events of one key lie in one partition, in the file's order."""
    expected: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.key is not None:
            expected[event.key].append(event.seq)
    orders: defaultdict[str, list[int]] = defaultdict(list)
    homes: defaultdict[str, set[int]] = defaultdict(set)
    for record in sorted(seen, key=lambda record: (record.partition, record.offset)):
        if record.key is not None:
            orders[record.key].append(record.seq)
            homes[record.key].add(record.partition)
    right = [key for key in expected if orders[key] == expected[key] and len(homes[key]) == 1]
    wrong = sorted(orders.keys() - set(right))
    return Check(
        "per-key order, one partition a key",
        f"{len(expected):,} keys",
        f"{len(right):,} keys" + (f", not: {_some(wrong)}" if wrong else ""),
        len(right) == len(expected) and not wrong,
    )


def check_tiers(sealed_ends: Mapping[int, int], high_watermarks: Mapping[int, int]) -> Check:
    """Of every partition some records are in the table and some still in the hot tail."""
    both = [n for n, end in high_watermarks.items() if 0 < sealed_ends.get(n, 0) < end]
    sealed = sum(sealed_ends.values())
    hot = sum(high_watermarks.values()) - sealed
    return Check(
        "partitions read across both tiers",
        f"{len(high_watermarks)}",
        f"{len(both)} ({sealed:,} records sealed, {hot:,} hot)",
        len(both) == len(high_watermarks),
    )


def check_carrier_counts(expected: Mapping[str, Carrier], seen: Mapping[str, Carrier]) -> Check:
    """As many departures of each carrier."""
    return _compared(
        "Spark: count per carrier",
        {name: carrier.departures for name, carrier in expected.items()},
        {name: carrier.departures for name, carrier in seen.items()},
    )


def check_carrier_means(expected: Mapping[str, Carrier], seen: Mapping[str, Carrier]) -> Check:
    """The same mean delay of each carrier, but for the rounding of the last digit."""
    return _compared(
        "Spark: mean delay per carrier",
        {name: carrier.mean_delay for name, carrier in expected.items()},
        {name: carrier.mean_delay for name, carrier in seen.items()},
    )


def _compared(
    name: str, expected: Mapping[str, float | None], seen: Mapping[str, float | None]
) -> Check:
    wrong = sorted(
        carrier
        for carrier in expected.keys() | seen.keys()
        if carrier not in expected
        or carrier not in seen
        or not _is_same(expected[carrier], seen[carrier])
    )
    shown = wrong[:3] or sorted(expected, key=lambda carrier: expected[carrier] or 0.0)[-1:]
    return Check(name, _listed(expected, shown), _listed(seen, shown), not wrong)


def _is_same(expected: float | None, seen: float | None) -> bool:
    if expected is None or seen is None:
        return expected is seen
    return math.isclose(expected, seen, rel_tol=MEAN_TOLERANCE)


def _listed(values: Mapping[str, float | None], shown: Iterable[str]) -> str:
    told = ", ".join(f"{name} {_number(values.get(name))}" for name in shown)
    return f"{len(values)} carriers, e.g. {told}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6f}"


def _some(found: Sequence[object]) -> str:
    """The first few of them."""
    more = ", ..." if len(found) > 3 else ""
    return ", ".join(map(str, found[:3])) + more
