"""Find violations in a history: compare records with the answers to producers and readers.

Pure: events in (tests.sim.history), violations out; none means that the run kept every guarantee.
An unknown outcome is right whatever became of it, as long as it is whole, and once where a key or a
producer says so. Rules and the invariants that they stand for:

    lost, moved          an acked record is not where it was acked, or nowhere (I1)
    two values           one offset was seen with two values (I1, I2)
    doubled              one value lies at two offsets, of requests that may be there once (I4)
    half                 of a request some records are there and some are not (I4)
    refused              a record is there whose every request was refused (I6)
    foreign, early       a record that no client sent, or not yet
    uncommitted          a reader saw a record that is not in the log (I3)
    stale                what was acked or seen before is not there for a later question (I3)
    overtaken            a request that began after another's answer lies before it (I3)
    skipped, backwards   an answer passes over records, or a reader goes back
    hole                 the log has a gap (I2)
    log start, end       what a broker says of them goes back
    producer id          two producers got one id (I11)
    table                the table's rows and the log differ (I7)

and of groups those of tests.sim.groupcheck (I8).
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tests.sim.history import (
    INVOCATIONS,
    Acked,
    Append,
    Deletion,
    Drained,
    Event,
    Fetch,
    Fetched,
    Final,
    Given,
    GivenUp,
    Invocation,
    Look,
    Looked,
    Outcome,
    OutOfRange,
    Owns,
    Place,
    Polled,
    Read,
    Refused,
    Scan,
    Scanned,
    Topic,
)

Where: TypeAlias = tuple[str, int]
"""A topic's partition."""


class Violation(NamedTuple):
    kind: str
    text: str


@dataclass
class Call:
    """An invocation, its outcome if there is one, and when both were: positions in the history."""

    asked: Invocation
    asked_at: int
    answer: Outcome | None = None
    answered_at: int = -1

    @property
    def is_refused(self) -> bool:
        return isinstance(self.answer, Refused)


class Known:
    """How far each partition was known to reach, and since when."""

    def __init__(self, facts: Iterable[tuple[int, Where, int]]) -> None:
        self._times: dict[Where, list[int]] = defaultdict(list)
        self._ends: dict[Where, list[int]] = defaultdict(list)
        for position, partition, end in sorted(facts):
            ends = self._ends[partition]
            self._times[partition].append(position)
            ends.append(max(end, ends[-1] if ends else 0))

    def before(self, position: int, partition: Where) -> int:
        """The least end that the partition had then."""
        index = bisect.bisect_left(self._times[partition], position)
        return self._ends[partition][index - 1] if index else 0


@dataclass
class Story:
    """A history, sorted and indexed."""

    times: list[float] = field(default_factory=list)
    """When each event was."""
    calls: dict[int, Call] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    finals: dict[Where, Final] = field(default_factory=dict)
    finals_at: dict[Where, int] = field(default_factory=dict)
    """When each was: positions in the history."""
    given: list[Given] = field(default_factory=list)
    owned: list[tuple[int, Owns]] = field(default_factory=list)
    drained: list[Drained] = field(default_factory=list)
    deletions: dict[str, int] = field(default_factory=dict)
    """Topics that a client asked to delete, and since when."""
    given_up: dict[Where, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Offsets that a repair gave up."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Story":
        story = cls()
        for position, event in enumerate(sorted(events, key=lambda event: event.at)):
            story.times.append(event.at)
            match event:
                case Topic():
                    story.topics[event.name] = event
                case Final():
                    story.finals[event.topic, event.partition] = event
                    story.finals_at[event.topic, event.partition] = position
                case Given():
                    story.given.append(event)
                case Owns():
                    story.owned.append((position, event))
                case Drained():
                    story.drained.append(event)
                case GivenUp():
                    lost = range(event.offset, event.end_offset)
                    story.given_up[event.topic, event.partition].update(lost)
                case Deletion():
                    story.deletions[event.topic] = position
                case _ if isinstance(event, INVOCATIONS):
                    assert event.op not in story.calls, f"op {event.op} was begun twice"
                    story.calls[event.op] = Call(event, position)
                case _:
                    call = story.calls[event.op]
                    assert call.answer is None, f"op {event.op} was answered twice"
                    call.answer, call.answered_at = event, position
        return story

    def seen_from(self, call: Call) -> int:
        """Return the position before which a fetch must see all records (I3)."""
        assert isinstance(call.asked, Fetch)
        if not call.asked.lag_s or call.answer is None:
            return call.asked_at
        position = bisect.bisect_left(self.times, call.answer.at - call.asked.lag_s)
        return min(call.asked_at, position)

    def is_compacted(self, topic: str) -> bool:
        return topic in self.topics and self.topics[topic].is_compacted

    def appends(self) -> Iterator[tuple[Call, Append]]:
        for call in self.calls.values():
            if isinstance(call.asked, Append):
                yield call, call.asked

    def seen(self) -> Iterator[tuple[Where, Read, int, str]]:
        """Every record that any reader saw: where, what, when, and how to name the sight."""
        for op, call in self.calls.items():
            request, answer, position = call.asked, call.answer, call.answered_at
            if isinstance(request, Fetch) and isinstance(answer, Fetched):
                for read in answer.records:
                    yield (request.topic, request.partition), read, position, f"fetch {op}"
            elif isinstance(answer, Polled):
                for portion in answer.portions:
                    for read in portion.records:
                        yield (portion.topic, portion.partition), read, position, f"poll {op}"
            elif isinstance(request, Scan) and isinstance(answer, Scanned):
                for read in answer.rows:
                    yield (request.topic, request.partition), read, position, f"scan {op}"
        for partition, final in self.finals.items():
            for read in final.records:
                yield partition, read, self.finals_at[partition], "the log in the end"


@dataclass
class _Sent:
    """All requests that carried one value."""

    calls: list[Call] = field(default_factory=list)
    is_once: bool = False
    record_key: str | None = None
    is_tombstone: bool = False

    @property
    def first_asked(self) -> int:
        return min(call.asked_at for call in self.calls)

    @property
    def copies_max(self) -> int:
        possible = sum(not call.is_refused for call in self.calls)
        return min(possible, 1) if self.is_once else possible


def check(events: Iterable[Event]) -> list[Violation]:
    """Check the rules of records alone; groupcheck.check_all has all of them."""
    return _Records(Story.of(events)).violations()


class _Records:
    def __init__(self, story: Story) -> None:
        self.story = story
        self.sent: dict[str, _Sent] = defaultdict(_Sent)
        for call, append in story.appends():
            for record in append.records:
                sent = self.sent[record.value]
                sent.calls.append(call)
                sent.is_once |= append.key is not None or append.is_producer
                sent.record_key, sent.is_tombstone = record.record_key, record.is_tombstone
        self.seen = list(story.seen())
        self.final = {
            partition: {read.offset: read.value for read in final.records}
            for partition, final in story.finals.items()
        }
        self.acked: list[tuple[Call, Append, list[Place]]] = [
            (call, append, call.answer.places)
            for call, append in story.appends()
            if isinstance(call.answer, Acked) and call.answer.places is not None
        ]
        self.at: dict[Where, dict[int, str]] = defaultdict(dict)
        self.places: dict[str, set[Place]] = defaultdict(set)
        facts = [
            (call.answered_at, place[:2], place.offset + 1)
            for call, _, places in self.acked
            for place in places
        ]
        self.acks = Known(facts)
        self.known = Known(
            facts
            + [(position, partition, read.offset + 1) for partition, read, position, _ in self.seen]
        )

    def violations(self) -> list[Violation]:
        return [
            Violation(kind, text)
            for rule in (
                self._values,
                self._sights,
                self._acks,
                self._requests,
                self._holes,
                self._fetches,
                self._lives,
                self._looks,
                self._streams,
                self._producer_ids,
                self._tables,
            )
            for kind, text in rule()
        ]

    # -- what lies where

    def _values(self) -> Iterator[tuple[str, str]]:
        """One value an offset, one offset a value; each value has a sender, none was refused."""
        told = [
            (place[:2], Read(place.offset, record.value), f"the ack of {call.asked.op}")
            for call, append, places in self.acked
            for record, place in zip(append.records, places, strict=False)
        ]
        for partition, read, how in [*told, *((w, r, how) for w, r, _, how in self.seen)]:
            other_value = self.at[partition].setdefault(read.offset, read.value)
            if other_value != read.value:
                yield (
                    "two values",
                    f"{partition} {read.offset}: {other_value!r}, and {read.value!r} ({how})",
                )
            self.places[read.value].add(Place(*partition, read.offset))
        for value, places in self.places.items():
            sent = self.sent.get(value)
            if sent is None:
                yield "foreign", f"no client sent {value!r}, at {sorted(places)}"
            elif sent.copies_max == 0:
                yield "refused", f"{value!r} was refused, and is at {sorted(places)}"
            elif len(places) > sent.copies_max:
                yield "doubled", f"{value!r} is at {sorted(places)}"
            else:
                for place in places:
                    end = self.acks.before(sent.first_asked, place[:2])
                    if place.offset < end:
                        yield "overtaken", f"{value!r}, {place}, began after {end - 1} was acked"

    def _sights(self) -> Iterator[tuple[str, str]]:
        for partition, read, position, how in self.seen:
            sent = self.sent.get(read.value)
            if sent is not None and position < sent.first_asked:
                yield "early", f"{how} saw {read.value!r} before it was sent"
            final = self.story.finals.get(partition)
            if final is None or read.offset < final.log_start_offset:
                continue
            is_there = read.offset in self.final[partition]
            is_gone = read.offset in self.story.given_up[partition]
            if not (is_there or is_gone or self._is_superseded(partition, read)):
                yield "uncommitted", f"{how} saw {partition} {read}, which is not in the log"

    def _is_superseded(self, partition: Where, read: Read) -> bool:
        """Whether key compaction may have taken the record."""
        sent = self.sent.get(read.value)
        if not self.story.is_compacted(partition[0]) or sent is None or sent.record_key is None:
            return False
        if sent.is_tombstone or any(
            offset > read.offset and self.sent[value].record_key == sent.record_key
            for offset, value in self.at[partition].items()
        ):
            return True
        # A tombstone without an answer, which compaction has taken after it.
        return any(
            other.is_tombstone
            and other.record_key == sent.record_key
            and other.copies_max > 0
            and not self.places[value]
            for value, other in self.sent.items()
        )

    def _acks(self) -> Iterator[tuple[str, str]]:
        for _, append, places in self.acked:
            name = f"append {append.op}"
            if len(places) != len(append.records):
                yield "moved", f"{name} has {len(append.records)} records, {len(places)} places"
            for record, place in zip(append.records, places, strict=False):
                partition = place[:2]
                if (record.topic, record.partition) not in {partition, (place.topic, None)}:
                    yield "moved", f"{record.value!r} was sent to {record}, acked at {place}"
                final = self.story.finals.get(partition)
                if final is None or place.offset < final.log_start_offset:
                    continue
                there = self.final[partition].get(place.offset)
                read = Read(place.offset, record.value)
                if there is None and not (
                    place.offset in self.story.given_up[partition]
                    or self._is_superseded(partition, read)
                ):
                    yield "lost", f"{record.value!r} was acked at {place}, nothing is there"
                elif there is not None and there != record.value:
                    yield "moved", f"{record.value!r} was acked at {place}, there is {there!r}"

    def _requests(self) -> Iterator[tuple[str, str]]:
        """All of a request, or nothing; and what was promised without a place is there."""
        starts = {
            partition: final.log_start_offset for partition, final in self.story.finals.items()
        }
        for call, append in self.story.appends():
            topics = {record.topic for record in append.records}
            partitions = [partition for partition in starts if partition[0] in topics]
            is_whole = partitions and not any(
                starts[partition] or self.story.given_up[partition] for partition in partitions
            )
            if not is_whole or any(self.story.is_compacted(topic) for topic in topics):
                continue  # what is gone may have been there
            missing = [record.value for record in append.records if not self.places[record.value]]
            is_promised = isinstance(call.answer, Acked) and call.answer.places is None
            if missing and is_promised:
                yield "lost", f"append {append.op} was promised, {missing} are not there"
            elif missing and len(missing) < len(append.records):
                yield "half", f"of append {append.op}, {missing} are not there, others are"

    def _holes(self) -> Iterator[tuple[str, str]]:
        for partition, final in self.story.finals.items():
            offsets = [read.offset for read in final.records]
            given_up = self.story.given_up[partition]
            is_compacted = self.story.is_compacted(partition[0])
            gap = _gap(offsets, final.log_start_offset, given_up, is_compacted=is_compacted)
            if gap:
                yield "hole", f"{partition} in the end: {gap}"

    # -- what readers were answered

    def _fetches(self) -> Iterator[tuple[str, str]]:
        for call in self.story.calls.values():
            if not isinstance(call.asked, Fetch):
                continue
            request, answer = call.asked, call.answer
            partition = (request.topic, request.partition)
            known_end = self.known.before(self.story.seen_from(call), partition)
            if isinstance(answer, OutOfRange):
                if request.offset >= answer.log_start_offset and request.offset < known_end:
                    yield "stale", f"fetch {request.op} of {request.offset} says {answer}"
                continue
            if not isinstance(answer, Fetched):
                continue
            if (
                not answer.records
                and not request.may_lag
                and request.offset < known_end
                and answer.next_offset <= request.offset
            ):
                yield (
                    "stale",
                    f"fetch {request.op} at {request.offset} of {partition} is empty: {known_end}",
                )
            offsets = [read.offset for read in answer.records]
            is_compacted = self.story.is_compacted(request.topic)
            given_up = self.story.given_up[partition]
            gap = _gap(offsets, request.offset, given_up, is_compacted=is_compacted)
            if gap:
                kind = "backwards" if offsets and offsets[0] < request.offset else "skipped"
                yield kind, f"fetch {request.op} of {partition} from {request.offset}: {gap}"
            last = offsets[-1] + 1 if offsets else request.offset
            is_passed = given_up.issuperset(range(last, answer.next_offset))
            if answer.next_offset < last or not (is_passed or is_compacted):
                yield "skipped", f"fetch {request.op}: after {last - 1} comes {answer.next_offset}"
            if is_compacted and (
                missed := self._missed(partition, request.offset, answer.next_offset, set(offsets))
            ):
                yield "skipped", f"fetch {request.op} of {partition} passes over {missed}"

    def _lives(self) -> Iterator[tuple[str, str]]:
        """The ends of a partition that one process of a broker reports never go back."""
        fetches = [
            (
                call,
                call.answer,
                (f"{call.answer.broker_life} {call.asked.topic}", call.asked.partition),
            )
            for call in self.story.calls.values()
            if isinstance(call.asked, Fetch)
            and isinstance(call.answer, Fetched)
            and call.answer.broker_life
        ]
        starts = Known(
            (c.answered_at, partition, fetched.log_start_offset)
            for c, fetched, partition in fetches
        )
        ends = Known(
            (c.answered_at, partition, fetched.high_watermark) for c, fetched, partition in fetches
        )
        for call, fetched, partition in fetches:
            start, end = (
                starts.before(call.asked_at, partition),
                ends.before(call.asked_at, partition),
            )
            if fetched.log_start_offset < start:
                yield "log start", f"fetch {call.asked.op}: {fetched.log_start_offset}, was {start}"
            if fetched.high_watermark < end:
                yield "end", f"fetch {call.asked.op}: {fetched.high_watermark}, was {end}"

    def _missed(self, partition: Where, first: int, end: int, got: set[int]) -> list[int]:
        """Offsets that are in the log to this day, and so were when they were passed over."""
        there = self.final.get(partition, {})
        return [offset for offset in there if first <= offset < end and offset not in got]

    def _looks(self) -> Iterator[tuple[str, str]]:
        starts: list[tuple[int, Where, int]] = []
        looks = [
            (call.asked_at, call.answered_at, call.asked, call.answer)
            for call in self.story.calls.values()
            if isinstance(call.asked, Look) and isinstance(call.answer, Looked)
        ]
        for _, position, request, answer in looks:
            starts.append((position, (request.topic, request.partition), answer.log_start_offset))
        for call in self.story.calls.values():
            if isinstance(call.asked, Fetch) and isinstance(call.answer, OutOfRange):
                partition = (call.asked.topic, call.asked.partition)
                starts.append((call.answered_at, partition, call.answer.log_start_offset))
        known_starts = Known(starts)
        for asked_at, _, request, answer in looks:
            partition = (request.topic, request.partition)
            end, start = (
                self.known.before(asked_at, partition),
                known_starts.before(asked_at, partition),
            )
            if answer.high_watermark < end:
                yield (
                    "stale",
                    f"look {request.op}: {partition} ends at {answer.high_watermark}, not {end}",
                )
            if answer.log_start_offset < start:
                yield "log start", f"look {request.op}: {answer.log_start_offset}, was {start}"

    def _streams(self) -> Iterator[tuple[str, str]]:
        """Readers continue at the offset of the last answer."""
        next_offsets: dict[tuple[str, Where], int] = {}
        for call in sorted(self.story.calls.values(), key=lambda call: call.asked_at):
            request = call.asked
            if not (
                isinstance(request, Fetch) and request.stream and isinstance(call.answer, Fetched)
            ):
                continue
            stream = (request.stream, (request.topic, request.partition))
            expected = next_offsets.get(stream, request.offset)
            if request.offset != expected:
                kind = "skipped" if request.offset > expected else "backwards"
                yield (
                    kind,
                    f"{request.stream} was sent to {expected}, continues at {request.offset}",
                )
            next_offsets[stream] = call.answer.next_offset

    def _producer_ids(self) -> Iterator[tuple[str, str]]:
        owners: dict[int, str] = {}
        for event in self.story.given:
            if event.producer_id in owners:
                both = f"{owners[event.producer_id]} and {event.client}"
                yield "producer id", f"{both} got id {event.producer_id}"
            owners[event.producer_id] = event.client

    def _tables(self) -> Iterator[tuple[str, str]]:
        for call in self.story.calls.values():
            request, answer = call.asked, call.answer
            if not (isinstance(request, Scan) and isinstance(answer, Scanned)):
                continue
            partition, name = (request.topic, request.partition), f"scan {request.op}"
            start, end = answer.log_start_offset, answer.sealed_end
            offsets = sorted(read.offset for read in answer.rows if start <= read.offset < end)
            repeated_offsets = [
                offset
                for offset, next_offset in itertools.pairwise(offsets)
                if offset == next_offset
            ]
            if repeated_offsets:
                yield "table", f"{name}: rows {repeated_offsets} of {partition} are there twice"
            elif self.story.is_compacted(request.topic):
                if missed := self._missed(partition, start, end, set(offsets)):
                    yield "table", f"{name} of {partition}: {missed} are in the log alone"
            elif _gap(
                [*offsets, max(start, end)],
                start,
                self.story.given_up[partition],
                is_compacted=False,
            ):
                yield "table", f"{name} of {partition}: {offsets[:20]} are not [{start}, {end})"


def _gap(offsets: Sequence[int], first: int, given_up: set[int], *, is_compacted: bool) -> str:
    """Say how offsets do not continue at `first`, without those given up; empty if they do."""
    if is_compacted:
        ascends = all(a < b for a, b in itertools.pairwise(offsets))
        return "" if ascends and (not offsets or offsets[0] >= first) else f"not in order {offsets}"
    expected = first
    for offset in offsets:
        while expected < offset and expected in given_up:
            expected += 1
        if offset != expected:
            return f"{offset} where {expected} should be"
        expected += 1
    return ""
