"""Broken promises to members are found in histories made by hand; honest ones pass.

The promises are to members that seek, to workers whose results and offsets are one request, and
about topics that go.
"""

from collections.abc import Callable

import pytest

from tests.sim.history import (
    Acked,
    Append,
    Deletion,
    Final,
    Offsets,
    Place,
    Read,
    Refused,
    Seek,
    Sought,
    Unknown,
    Written,
)
from tests.sim.test_checker import Tale, honest


def seek(tale: Tale, member: str, offset: int, *, is_done: bool = True) -> None:
    op = tale.begin(Seek, "g", member, [Place("t", 0, offset)])
    if is_done:
        tale.end(Sought, op)


def work(
    tale: Tale, key: str, generation: int, first: int, end: int, *, offset: int | None = None
) -> int:
    """Append a worker's results from `first` on, with its commit; acked from `offset` on."""
    records = [
        Written("results", f"{key}.{n}", 0, source=Place("t", 0, n)) for n in range(first, end)
    ]
    offsets = Offsets("g", "n", generation, [Place("t", 0, end)])
    op = tale.begin(Append, "n", records, key, commit=offsets)
    if offset is not None:
        tale.end(Acked, op, [Place("results", 0, offset + i) for i in range(end - first)])
    return op


def results(tale: Tale, *values: str) -> None:
    tale.fact(Final, "results", 0, 0, [Read(offset, value) for offset, value in enumerate(values)])


def told(tale: Tale, op: int, *offsets: int) -> None:
    tale.end(Acked, op, [Place("results", 0, offset) for offset in offsets])


def test_who_seeks_back_is_given_it_again_and_commits_less() -> None:
    tale = honest()
    seek(tale, "n", 1)
    tale.poll("n", 2, 1, "b", "c")
    tale.commit("n", 2, 2)
    tale.ask(2)
    seek(tale, "n", 0, is_done=False)
    tale.poll("n", 2, 0, "a")
    seek(tale, "n", 1)
    tale.poll("n", 3, 2, "c")  # another had it in between
    assert tale.kinds() == set()


def test_one_result_of_each_record_with_an_unanswered_attempt() -> None:
    tale = honest()
    tale.end(Unknown, work(tale, "w1", 2, 2, 3))
    tale.poll("m", 3, 2, "c")  # the generation continues before the answer
    told(tale, work(tale, "w1", 2, 2, 3), 0)
    tale.ask(3)
    first = work(tale, "w0", 1, 0, 2)
    tale.end(Refused, first)
    results(tale, "w1.2")
    assert tale.kinds() == {"once"}, "nothing was made of a and b"
    tale = Tale()
    tale.append("a", "b", offset=0)
    tale.end(Unknown, work(tale, "w0", 1, 0, 2))
    told(tale, work(tale, "w0", 1, 0, 2), 0, 1)
    tale.ask(2)
    results(tale, "w0.0", "w0.1")
    assert tale.kinds() == set()


def test_offsets_of_a_topic_that_goes_may_go_with_it() -> None:
    tale = honest()
    tale.fact(Deletion, "t")
    tale.ask(2)
    tale.ask(None)
    assert tale.kinds() == set()


def elsewhere(tale: Tale) -> None:
    tale.poll("n", 2, 2, "c")
    seek(tale, "n", 0)
    tale.poll("n", 2, 1, "b", "c")


def back_after_the_commit(tale: Tale) -> None:
    seek(tale, "n", 0)
    tale.poll("n", 2, 0, "a", "b")
    tale.commit("n", 2, 2)
    tale.poll("n", 2, 1, "b")


def back_as_another_said(tale: Tale) -> None:
    seek(tale, "m", 0)
    tale.poll("n", 2, 0, "a")


def twice(tale: Tale) -> None:
    work(tale, "w0", 2, 0, 3, offset=0)
    work(tale, "w1", 2, 2, 3, offset=3)
    tale.ask(3)
    results(tale, "w0.0", "w0.1", "w0.2", "w1.2")


def none(tale: Tale) -> None:
    work(tale, "w0", 2, 0, 2, offset=0)
    tale.commit("n", 2, 3)
    tale.ask(3)
    results(tale, "w0.0", "w0.1")


def beyond(tale: Tale) -> None:
    work(tale, "w0", 2, 0, 2, offset=0)
    tale.end(Unknown, work(tale, "w1", 2, 2, 3))
    tale.ask(2)
    results(tale, "w0.0", "w0.1", "w1.2")


def of_an_old_generation(tale: Tale) -> None:
    work(tale, "w0", 1, 0, 2, offset=0)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (elsewhere, "sought"),
        (back_after_the_commit, "went back"),
        (back_as_another_said, "went back"),
        (twice, "once"),
        (none, "once"),
        (beyond, "once"),
        (of_an_old_generation, "old generation"),
    ],
)
def test_a_broken_promise_is_seen(spoil: Callable[[Tale], None], kind: str) -> None:
    tale = honest()
    spoil(tale)
    assert tale.kinds() == {kind}
