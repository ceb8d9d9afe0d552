"""The checks of the demo: pure functions of the source file and of the records that were read.

A check compares the expected value with the value that was read, and shows both. It never raises:
the other checks run after a failed one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deploy.demo.flights import MISSING, Event

MEAN_TOLERANCE = 1e-9
"""Relative. Two means of the same integers differ only by rounding."""


class CheckResult(NamedTuple):
    """Result of one check: a row of the demo's table."""

    name: str
    expected: str
    seen: str
    is_ok: bool


class ReadRecord(NamedTuple):
    """A record as read over REST; `seq` is a field of its value."""

    seq: int
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    value: bytes


class Place(NamedTuple):
    """Partition and offset of a record, from its acknowledgement."""

    partition: int
    offset: int


class Carrier(NamedTuple):
    """Number of departures of a carrier, and their mean delay in minutes, None without delays."""

    departures: int
    mean_delay: float | None


def carriers(rows: Iterable[Mapping[str, str]]) -> dict[str, Carrier]:
    """Return the carriers of the source file by name."""
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


def check_count(name: str, expected: int, seen: int) -> CheckResult:
    """Check that a count has the expected value."""
    return CheckResult(name, f"{expected:,}", f"{seen:,}", expected == seen)


def check_dense(seen: Sequence[ReadRecord], high_watermarks: Mapping[int, int]) -> CheckResult:
    """Check that each partition has all offsets from 0 to its end, once and in order."""
    offsets: dict[int, list[int]] = {number: [] for number in high_watermarks}
    for record in seen:
        offsets.setdefault(record.partition, []).append(record.offset)
    wrong = [
        number
        for number, partition_offsets in sorted(offsets.items())
        if partition_offsets != list(range(high_watermarks.get(number, 0)))
    ]
    return CheckResult(
        "offsets dense from 0 to the end",
        f"{len(high_watermarks)} partitions",
        f"not in {_some(wrong)}" if wrong else f"{len(offsets)} partitions",
        not wrong,
    )


def check_once(events: Sequence[Event], seen: Sequence[ReadRecord]) -> CheckResult:
    """Check that no event was read twice."""
    times = Counter(record.seq for record in seen)
    twice = sorted(seq for seq, count in times.items() if count > 1)
    return CheckResult(
        "no duplicate",
        f"{len(events):,} distinct",
        f"{len(times):,} distinct" + (f", repeated: {_some(twice)}" if twice else ""),
        not twice and len(times) == len(events),
    )


def check_acked(acked: Mapping[int, Place], seen: Sequence[ReadRecord]) -> CheckResult:
    """Check that each acknowledged event is at its acknowledged partition and offset."""
    places = {Place(record.partition, record.offset): record.seq for record in seen}
    lost = sorted(seq for seq, place in acked.items() if places.get(place) != seq)
    return CheckResult(
        "acked records at their offsets",
        f"{len(acked):,}",
        f"{len(acked) - len(lost):,}" + (f", not: {_some(lost)}" if lost else ""),
        not lost,
    )


def check_values(events: Sequence[Event], seen: Sequence[ReadRecord]) -> CheckResult:
    """Check that keys, values and timestamps equal those sent, byte for byte."""
    sent = {event.seq: event for event in events}
    changed = sorted(
        record.seq
        for record in seen
        if record.seq not in sent
        or sent[record.seq] != Event(record.seq, record.key, record.timestamp_ms, record.value)
    )
    return CheckResult(
        "keys, values, timestamps unchanged",
        f"{len(events):,}",
        f"{len(seen) - len(changed):,}" + (f", not: {_some(changed)}" if changed else ""),
        not changed and len(seen) >= len(events),
    )


def check_key_order(events: Sequence[Event], seen: Sequence[ReadRecord]) -> CheckResult:
    """Check that the events of a key are in one partition, in the order of the file."""
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
    return CheckResult(
        "per-key order, one partition a key",
        f"{len(expected):,} keys",
        f"{len(right):,} keys" + (f", not: {_some(wrong)}" if wrong else ""),
        len(right) == len(expected) and not wrong,
    )


def check_tiers(sealed_ends: Mapping[int, int], high_watermarks: Mapping[int, int]) -> CheckResult:
    """Check that each partition has records in the table and records in the tail."""
    both = [n for n, end in high_watermarks.items() if 0 < sealed_ends.get(n, 0) < end]
    sealed = sum(sealed_ends.values())
    hot = sum(high_watermarks.values()) - sealed
    return CheckResult(
        "partitions in table and tail",
        f"{len(high_watermarks)}",
        f"{len(both)} ({sealed:,} records sealed, {hot:,} in tails)",
        len(both) == len(high_watermarks),
    )


def check_carrier_counts(
    expected: Mapping[str, Carrier], seen: Mapping[str, Carrier]
) -> CheckResult:
    """Check the number of departures of each carrier."""
    return _compared(
        "Spark: count per carrier",
        {name: carrier.departures for name, carrier in expected.items()},
        {name: carrier.departures for name, carrier in seen.items()},
    )


def check_carrier_means(
    expected: Mapping[str, Carrier], seen: Mapping[str, Carrier]
) -> CheckResult:
    """Check the mean delay of each carrier, within MEAN_TOLERANCE."""
    return _compared(
        "Spark: mean delay per carrier",
        {name: carrier.mean_delay for name, carrier in expected.items()},
        {name: carrier.mean_delay for name, carrier in seen.items()},
    )


def _compared(
    name: str, expected: Mapping[str, float | None], seen: Mapping[str, float | None]
) -> CheckResult:
    wrong = sorted(
        carrier
        for carrier in expected.keys() | seen.keys()
        if carrier not in expected
        or carrier not in seen
        or not _is_same(expected[carrier], seen[carrier])
    )
    shown = wrong[:3] or sorted(expected, key=lambda carrier: expected[carrier] or 0.0)[-1:]
    return CheckResult(name, _listed(expected, shown), _listed(seen, shown), not wrong)


def _is_same(expected: float | None, seen: float | None) -> bool:
    if expected is None or seen is None:
        return expected is seen
    return math.isclose(expected, seen, rel_tol=MEAN_TOLERANCE)


def _listed(values: Mapping[str, float | None], shown: Iterable[str]) -> str:
    examples = ", ".join(f"{name} {_number(values.get(name))}" for name in shown)
    return f"{len(values)} carriers, e.g. {examples}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6f}"


def _some(items: Sequence[object]) -> str:
    """Return the first three as text."""
    more = ", ..." if len(items) > 3 else ""
    return ", ".join(map(str, items[:3])) + more
