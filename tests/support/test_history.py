"""The checker of histories sees what it is for: else the system tests would prove nothing."""

from collections.abc import Callable

import pytest

from tests.support.history import Log, Place, Read, Request, Written, cut, violations

A, B, C = b'"a"', b'"b"', b'"c"'


def reads(*values: bytes, base: int = 0) -> list[Read]:
    return [Read(base + index, value) for index, value in enumerate(values)]


def acked(*records: tuple[bytes, int, int], is_keyed: bool = True, producer: int = 0) -> Request:
    """A request whose records (value, partition, offset) were acked there, in turn."""
    return Request(
        [Written(value) for value, _, _ in records],
        is_keyed,
        producer,
        is_acked_in_turn=True,
        acks=[[Place(partition, offset) for _, partition, offset in records]],
    )


def not_acked(
    *values: bytes, unknown: int = 0, refusals: int = 0, local: int = 0, is_keyed: bool = True
) -> Request:
    return Request(
        [Written(value) for value in values],
        is_keyed,
        acks_without_offsets=local,
        unknown=unknown,
        refusals=refusals,
    )


def words(requests: list[Request], log: Log) -> set[str]:
    """The first word of each violation."""
    return {text.partition(":")[0] for text in violations(requests, log)}


GOOD = [acked((A, 0, 0), (B, 1, 0)), acked((C, 0, 1))]


def test_a_log_that_keeps_its_word_passes() -> None:
    assert violations(GOOD, {0: reads(A, C), 1: reads(B)}) == []
    assert violations([], {0: []}) == []


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param({0: reads(A), 1: reads(B)}, {"lost", "moved"}, id="the last is lost"),
        pytest.param({0: reads(C), 1: reads(B)}, {"half", "lost", "moved"}, id="a first is lost"),
        pytest.param({0: [], 1: []}, {"lost", "moved"}, id="all is lost"),
        pytest.param({0: reads(A, C, C), 1: reads(B)}, {"doubled"}, id="a record is there twice"),
        pytest.param({0: reads(C, A), 1: reads(B)}, {"moved", "overtaken"}, id="two are swapped"),
        pytest.param(
            {0: [Read(0, A), Read(2, C)], 1: reads(B)}, {"hole", "moved"}, id="an offset is missing"
        ),
        pytest.param(
            {0: [Read(0, A), Read(0, A), Read(1, C)], 1: reads(B)},
            {"hole", "half", "doubled", "torn"},
            id="an offset is there twice",
        ),
        pytest.param(
            {0: [Read(1, C), Read(0, A)], 1: reads(B)}, {"hole"}, id="a reader gets them unordered"
        ),
        pytest.param({0: reads(A, C), 1: reads(B, b"?")}, {"foreign"}, id="not sent"),
        pytest.param(
            {0: [Read(0, A), Read(1, None)], 1: reads(B)},
            {"foreign", "lost", "moved"},
            id="a value is gone",
        ),
        pytest.param(
            {0: [Read(0, A, b"k"), Read(1, C)], 1: reads(B)}, {"changed"}, id="a key came to it"
        ),
        pytest.param({0: reads(A), 1: reads(B, C)}, {"moved"}, id="in another partition"),
    ],
)
def test_what_was_acked_is_held_against_the_log(log: Log, expected: set[str]) -> None:
    assert words(GOOD, log) == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param({0: []}, set(), id="not there"),
        pytest.param({0: reads(A, B)}, set(), id="there, whole"),
        pytest.param({0: reads(A)}, {"half"}, id="half of it"),
        pytest.param({0: reads(A, B, A, B)}, {"doubled", "torn"}, id="there twice"),
        pytest.param({0: reads(B, A)}, {"torn"}, id="in another order"),
    ],
)
def test_an_unknown_outcome_is_either(log: Log, expected: set[str]) -> None:
    assert words([not_acked(A, B, unknown=3)], log) == expected


def test_without_a_key_each_unknown_attempt_may_have_written() -> None:
    request = not_acked(A, unknown=2, is_keyed=False)
    assert words([request], {0: reads(A, A)}) == set()
    assert words([request], {0: reads(A, A, A)}) == {"doubled"}
    request.acks.append([Place(0, 2)])
    assert words([request], {0: reads(A, A, A)}) == set()
    assert words([request], {0: reads(A, A)}) == {"moved"}


def test_what_was_refused_is_not_there() -> None:
    request = not_acked(A, refusals=1)
    assert words([request], {0: []}) == set()
    assert words([request], {0: reads(A)}) == {"refused, yet there"}
    request.unknown = 1  # a retry, whose answer was lost
    assert words([request], {0: reads(A)}) == set()


def test_an_ack_without_offsets_means_once() -> None:
    request = not_acked(A, B, local=1, is_keyed=False)
    assert words([request], {0: reads(A, B)}) == set()
    assert words([request], {0: []}) == {"lost"}
    assert words([request], {0: reads(A, B, A, B)}) == {"doubled", "torn"}


def test_retries_under_one_key_get_one_place() -> None:
    request = acked((A, 0, 0))
    request.acks.append([Place(0, 1)])
    assert words([request], {0: reads(A, A)}) == {"two answers", "doubled"}
    request.acks[1] = [Place(0, 0)]
    assert words([request], {0: reads(A)}) == set()


def test_an_answer_has_a_place_for_every_record() -> None:
    request = not_acked(A, B)
    request.acks.append([Place(0, 0)])
    assert words([request], {0: reads(A, B)}) == {"miscounted"}


def test_a_partition_that_was_asked_for_is_kept() -> None:
    request = Request([Written(A, partition=1)], acks=[[Place(0, 0)]])
    assert words([request], {0: reads(A)}) == {"astray"}


def test_only_what_was_acked_in_turn_comes_before_what_follows() -> None:
    first, second = not_acked(A, unknown=1), acked((B, 0, 0))
    assert words([first, second], {0: reads(B, A)}) == set()
    first.acks.append([Place(0, 1)])  # by a retry, after the second
    assert words([first, second], {0: reads(B, A)}) == set()
    first.is_acked_in_turn = True
    assert words([first, second], {0: reads(B, A)}) == {"overtaken"}
    second.producer = 1
    assert words([first, second], {0: reads(B, A)}) == set()


def spoilers(log: dict[int, list[Read]], index: int) -> list[Callable[[], None]]:
    records = log[0]

    def lose() -> None:
        del records[index]

    def lose_and_close_the_gap() -> None:
        values = [read.value for read in records[:index] + records[index + 1 :]]
        records[:] = [Read(offset, value) for offset, value in enumerate(values)]

    def double() -> None:
        values = [read.value for read in records[: index + 1] + records[index:]]
        records[:] = [Read(offset, value) for offset, value in enumerate(values)]

    def swap() -> None:
        first, second = records[index], records[index - 1]
        records[index] = Read(first.offset, second.value)
        records[index - 1] = Read(second.offset, first.value)

    def change() -> None:
        records[index] = Read(records[index].offset, b"!")

    return [lose, lose_and_close_the_gap, double, swap, change]


@pytest.mark.parametrize("spoiler", range(5))
@pytest.mark.parametrize("index", [0, 1, 20, 39])
def test_one_wrong_record_of_many_is_seen(spoiler: int, index: int) -> None:
    values = [b"%d" % number for number in range(40)]
    requests = [acked((value, 0, offset)) for offset, value in enumerate(values)]
    log = {0: reads(*values)}
    assert violations(requests, log) == []
    spoilers(log, index)[spoiler]()
    assert violations(requests, log) != []


# -- a log that continues from a copy of an earlier moment


def test_a_cut_forgets_acks_of_what_the_copy_does_not_have() -> None:
    copied_request, missing_request = (
        Request([Written(value)], acks=[[Place(0, offset)]])
        for offset, value in enumerate((b"a", b"b"))
    )
    assert cut([copied_request, missing_request], {0: [Read(0, b"a")]}, lambda _: False) == []
    log = {0: [Read(0, b"a"), Read(1, b"new")]}
    new = Request([Written(b"new")], acks=[[Place(0, 1)]])
    assert violations([copied_request, missing_request, new], log) == []
    assert (
        violations([copied_request, missing_request, new], {0: [*log[0], Read(2, b"b")]}) != []
    ), "it came back"
    assert violations([copied_request, missing_request, new], {0: []}) != [], "it is lost"


def test_a_cut_finds_a_record_that_the_copy_has_elsewhere() -> None:
    request = Request([Written(b"a")], acks=[[Place(0, 0)]])
    findings = cut([request], {0: [Read(0, b"b")]}, lambda _: False)
    assert any(finding.startswith("lost") for finding in findings)


def test_after_a_cut_only_what_is_sent_again_may_be_there() -> None:
    lost, again = (Request([Written(value)], unknown=1) for value in (b"a", b"b"))
    assert cut([lost, again], {0: []}, lambda request: request is again) == []
    assert violations([lost, again], {0: [Read(0, b"b")]}) == []
    assert violations([lost, again], {0: [Read(0, b"a")]}) != []
