"""Each kind of broken promise is seen in a history made by hand; and honest ones pass."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim import history
from tests.sim.groupcheck import check_all
from tests.sim.history import (
    Acked,
    Append,
    Ask,
    Commit,
    Committed,
    Drained,
    Event,
    Fetch,
    Fetched,
    Final,
    Given,
    Look,
    Looked,
    OutOfRange,
    Owns,
    Place,
    Poll,
    Polled,
    Portion,
    Read,
    Refused,
    Scan,
    Scanned,
    Told,
    Topic,
    Unknown,
    Written,
)


class Tale:
    """A history, written line by line: each line is a moment after the one before it."""

    def __init__(self, *, is_compacted: bool = False) -> None:
        self.events: list[Event] = [Topic(0.0, "t", 1, is_compacted)]
        self.ops = 0

    @property
    def now(self) -> float:
        return float(len(self.events))

    def begin(self, kind: Callable[..., Event], *fields: object, **named: object) -> int:
        self.ops += 1
        self.events.append(kind(self.now, self.ops, *fields, **named))
        return self.ops

    def end(self, kind: Callable[..., Event], op: int, *fields: object, **named: object) -> None:
        self.events.append(kind(self.now, op, *fields, **named))

    def append(self, *values: str, offset: int | None = None, key: str | None = None, **of) -> int:
        """Acked from `offset` on, or without an answer."""
        records = [Written("t", value, 0, **of) for value in values]
        op = self.begin(Append, "p", records, key)
        if offset is not None:
            self.end(Acked, op, [Place("t", 0, offset + i) for i in range(len(values))])
        return op

    def fetch(self, offset: int, *values: str, first: int | None = None, **named: object) -> None:
        op = self.begin(Fetch, "c", "t", 0, offset, stream=str(named.pop("stream", "")))
        reads = self.reads(*values, first=offset if first is None else first)
        next_offset = reads[-1].offset + 1 if reads else offset
        life = "b1" if {"start", "end"} & named.keys() else ""
        start, end = int(str(named.pop("start", 0))), int(str(named.pop("end", next_offset)))
        self.end(Fetched, op, reads, int(str(named.pop("after", next_offset))), start, end, life)

    def look(self, start: int, end: int) -> None:
        self.end(Looked, self.begin(Look, "c", "t", 0), start, end)

    def scan(self, end: int, *values: str, start: int = 0, first: int = 0) -> None:
        self.end(
            Scanned, self.begin(Scan, "c", "t", 0), self.reads(*values, first=first), start, end
        )

    def poll(self, member: str, generation: int, first: int, *values: str) -> None:
        reads = self.reads(*values, first=first)
        portion = Portion("t", 0, reads, first + len(values))
        self.end(Polled, self.begin(Poll, "g", member), generation, [portion])

    def commit(self, member: str, generation: int, offset: int, *, is_done: bool = True) -> None:
        op = self.begin(Commit, "g", member, generation, [Place("t", 0, offset)])
        if is_done:
            self.end(Committed, op)

    def ask(self, offset: int | None) -> None:
        told = [] if offset is None else [Place("t", 0, offset)]
        self.end(Told, self.begin(Ask, "g"), told)

    def fact(self, kind: Callable[..., Event], *fields: object) -> None:
        self.events.append(kind(self.now, *fields))

    def final(self, *values: str, start: int = 0) -> None:
        self.fact(Final, "t", 0, start, self.reads(*values, first=start))

    def reads(self, *values: str, first: int) -> list[Read]:
        """`-` is an offset of which nothing is there."""
        return [Read(first + i, value) for i, value in enumerate(values) if value != "-"]

    def kinds(self) -> set[str]:
        return {violation.kind for violation in check_all(self.events)}


def honest() -> Tale:
    tale = Tale()
    tale.append("a", offset=0)
    tale.append("b", "c", offset=1, key="k")
    tale.fetch(0, "a", stream="s")
    tale.fetch(1, "b", "c", stream="s")
    tale.look(0, 3)
    tale.scan(2, "a", "b")
    tale.poll("m", 1, 0, "a", "b")
    tale.commit("m", 1, 2)
    tale.ask(2)
    tale.poll("n", 2, 2, "c")
    refused = tale.append("d")
    tale.end(Refused, refused)
    return tale


def test_an_honest_history_passes() -> None:
    tale = honest()
    assert tale.kinds() == set()
    tale.final("a", "b", "c")
    tale.fact(Drained, "g")
    assert tale.kinds() == set()


def test_an_unknown_outcome_may_be_either_and_whole() -> None:
    for there, expected in [((), set()), (("x", "y"), set()), (("x",), {"half"})]:
        tale = Tale()
        tale.end(Unknown, tale.append("x", "y"))
        tale.append("z")  # its client crashed
        tale.final(*there)
        assert tale.kinds() == expected


def test_a_retry_without_a_key_may_be_there_twice() -> None:
    tale = Tale()
    tale.end(Unknown, tale.append("x"))
    tale.append("x", offset=1)
    tale.final("x", "x")
    assert tale.kinds() == set()
    tale.events.pop()
    tale.final("x", "x", "x")
    assert tale.kinds() == {"doubled"}


def lost(tale: Tale) -> None:
    tale.final("a", "b")


def moved(tale: Tale) -> None:
    tale.append("f")
    tale.append("e", offset=3)
    tale.final("a", "b", "c", "f")


def two_values(tale: Tale) -> None:
    tale.append("e")
    tale.fetch(2, "e")


def doubled_under_a_key(tale: Tale) -> None:
    tale.append("b", "c", offset=3, key="k")


def doubled_without_a_retry(tale: Tale) -> None:
    tale.append("e", offset=3)
    tale.final("a", "b", "c", "e", "e")


def refused(tale: Tale) -> None:
    tale.fetch(3, "d")


def half(tale: Tale) -> None:
    tale.end(Unknown, tale.append("e", "f"))
    tale.final("a", "b", "c", "f")


def promised_and_lost(tale: Tale) -> None:
    tale.end(Acked, tale.append("e"), None)
    tale.final("a", "b", "c")


def foreign(tale: Tale) -> None:
    tale.fetch(3, "?")


def early(tale: Tale) -> None:
    tale.fetch(3, "e")
    tale.append("e", offset=3)


def uncommitted(tale: Tale) -> None:
    tale.append("e")
    tale.fetch(3, "e")
    tale.final("a", "b", "c")


def stale_read(tale: Tale) -> None:
    tale.fetch(2)


def stale_after_a_read(tale: Tale) -> None:
    tale.append("e")
    tale.fetch(3, "e")
    tale.fetch(3)


def stale_range(tale: Tale) -> None:
    tale.end(OutOfRange, tale.begin(Fetch, "c", "t", 0, 2), 0, 1)


def stale_look(tale: Tale) -> None:
    tale.look(0, 2)


def overtaken(tale: Tale) -> None:
    tale.append("e")  # its place was never seen
    tale.append("f", offset=4)
    tale.append("g", offset=3)


def skipped(tale: Tale) -> None:
    tale.fetch(1, "c", first=2)


def skipped_inside(tale: Tale) -> None:
    tale.fetch(0, "a", "-", "c")


def skipped_at_the_end(tale: Tale) -> None:
    tale.fetch(0, "a", after=2)


def backwards(tale: Tale) -> None:
    tale.fetch(1, "a", "b", first=0)


def a_stream_that_skips(tale: Tale) -> None:
    tale.fetch(4, stream="s")


def a_stream_that_goes_back(tale: Tale) -> None:
    tale.fetch(2, "c", stream="s")


def hole(tale: Tale) -> None:
    tale.append("e")
    tale.final("a", "b", "c", "-", "e")


def log_start(tale: Tale) -> None:
    tale.look(2, 3)
    tale.look(1, 3)


def log_start_of_a_broker(tale: Tale) -> None:
    tale.fetch(2, "c", start=1)
    tale.fetch(2, "c", start=0)


def end_of_a_broker(tale: Tale) -> None:
    tale.fetch(0, "a", end=3)
    tale.fetch(0, "a", end=2)


def a_row_too_few(tale: Tale) -> None:
    tale.scan(3, "a", "-", "c")


def a_row_twice(tale: Tale) -> None:
    op = tale.begin(Scan, "c", "t", 0)
    tale.end(Scanned, op, [*tale.reads("a", "b", first=0), Read(1, "b")], 0, 2)


def another_row(tale: Tale) -> None:
    tale.scan(2, "a", "c")


def owners(tale: Tale) -> None:
    tale.fact(Owns, "g", 2, "m", [("t", 0)])


def owners_by_polls(tale: Tale) -> None:
    tale.poll("m", 2, 2, "c")


def old_generation(tale: Tale) -> None:
    tale.commit("m", 1, 2)


def committed_offset(tale: Tale) -> None:
    tale.ask(1)


def committed_offset_forgotten(tale: Tale) -> None:
    tale.ask(None)


def went_back(tale: Tale) -> None:
    tale.poll("n", 2, 1, "b", "c")


def passed_over(tale: Tale) -> None:
    tale.append("e", offset=3)
    tale.append("f", offset=4)
    tale.poll("n", 2, 4, "f")
    tale.final("a", "b", "c", "e", "f")


def unread(tale: Tale) -> None:
    tale.append("e", offset=3)
    tale.final("a", "b", "c", "e")
    tale.fact(Drained, "g")


@pytest.mark.parametrize(
    ("spoil", "kinds"),
    [
        (lost, {"lost", "uncommitted"}),
        (moved, {"moved", "two values"}),
        (two_values, {"two values", "overtaken", "uncommitted"}),
        (doubled_under_a_key, {"doubled"}),
        (doubled_without_a_retry, {"doubled"}),
        (refused, {"refused"}),
        (half, {"half"}),
        (promised_and_lost, {"lost"}),
        (foreign, {"foreign"}),
        (early, {"early"}),
        (uncommitted, {"uncommitted"}),
        (stale_read, {"stale"}),
        (stale_after_a_read, {"stale"}),
        (stale_range, {"stale"}),
        (stale_look, {"stale"}),
        (overtaken, {"overtaken"}),
        (skipped, {"skipped"}),
        (skipped_inside, {"skipped"}),
        (skipped_at_the_end, {"skipped"}),
        (backwards, {"backwards"}),
        (a_stream_that_skips, {"skipped"}),
        (a_stream_that_goes_back, {"backwards"}),
        (hole, {"hole"}),
        (log_start, {"log start"}),
        (log_start_of_a_broker, {"log start"}),
        (end_of_a_broker, {"end"}),
        (a_row_too_few, {"table"}),
        (a_row_twice, {"table"}),
        (another_row, {"two values", "doubled"}),
        (owners, {"owners"}),
        (owners_by_polls, {"owners"}),
        (old_generation, {"old generation"}),
        (committed_offset, {"committed offset"}),
        (committed_offset_forgotten, {"committed offset"}),
        (went_back, {"went back"}),
        (passed_over, {"passed over"}),
        (unread, {"unread"}),
    ],
)
def test_a_broken_promise_is_seen(spoil: Callable[[Tale], None], kinds: set[str]) -> None:
    tale = honest()
    spoil(tale)
    found_kinds = tale.kinds()
    assert found_kinds, "it is missed"
    assert found_kinds & kinds
    assert found_kinds <= kinds


def test_key_compaction_may_take_what_is_superseded_and_nothing_else() -> None:
    tale = Tale(is_compacted=True)
    tale.append("a", offset=0, record_key="k")
    tale.append("b", offset=1, record_key="l")
    tale.append("c", offset=2, record_key="k")
    tale.append("d", offset=3, record_key="m", is_tombstone=True)
    tale.fetch(0, "a", "b", "c", "d")
    tale.fetch(0, "-", "b", "c")
    tale.scan(3, "-", "b", "c")
    final = len(tale.events)
    tale.final("-", "b", "c")
    assert tale.kinds() == set()
    tale.fetch(0, "-", "-", "c")
    tale.scan(3, "-", "-", "c")
    assert tale.kinds() == {"skipped", "table"}
    del tale.events[final:]
    tale.final("-", "-", "c")
    assert tale.kinds() == {"lost", "uncommitted"}


def test_what_retention_took_is_not_missed() -> None:
    tale = honest()
    tale.final("c", start=2)
    assert tale.kinds() == set()


def test_concurrent_answers_may_come_in_any_order() -> None:
    tale = Tale()
    first = tale.append("a")
    look = tale.begin(Look, "c", "t", 0)
    tale.end(Acked, first, [Place("t", 0, 0)])
    tale.end(Looked, look, 0, 0)
    tale.commit("m", 1, 1, is_done=False)
    tale.ask(None)
    tale.ask(1)
    assert tale.kinds() == set()


def test_two_producers_with_one_id() -> None:
    tale = honest()
    tale.events += [Given(tale.now, "p1", 7), Given(tale.now, "p2", 8)]
    assert tale.kinds() == set()
    tale.events.append(Given(tale.now, "p3", 7))
    assert tale.kinds() == {"producer id"}


def test_a_history_survives_its_lines(tmp_path: Path) -> None:
    tale = honest()
    tale.final("a", "b", "c")
    path = tmp_path / "history.jsonl"
    history.write(path, tale.events)
    assert history.read(path) == tale.events
    with path.open("ab") as file:
        file.write(b'{"event":"append","op":9')  # its writer was killed
    assert history.read(path) == tale.events


def test_events_of_several_writers_are_put_in_order() -> None:
    tale = honest()
    assert {violation.kind for violation in check_all(reversed(tale.events))} == set()
