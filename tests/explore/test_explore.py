"""The smallest world is explored to its end, and guards that are taken out are missed there."""

import pytest

from tests.explore.choices import Bound, Choices, Diverged, Option
from tests.explore.command import report
from tests.explore.run import play
from tests.explore.script import SCRIPTS
from tests.explore.search import search
from tests.sim import machine
from tests.sim.mutations import MUTATIONS
from tests.sim.test_sim import ended, started

OPTIONS = (Option("go on"), Option("another", preemptions=1), Option("a fault", faults=1))
WHOLE = Bound(2, 2, 4)


def test_a_choice_is_given_or_the_first_and_keeps_to_the_bound() -> None:
    choices = Choices([0, 2, 1], Bound(1, 1, 2))
    assert [choices.choose("next", OPTIONS) for _ in range(5)] == [0, 2, 1, 0, 0]
    assert choices.taken == [0, 2, 1], "what has one option is no choice"
    assert choices.counts == [3, 3, 2]
    assert choices.left == Bound(0, 0, 0)
    assert Choices([], Bound(2, 2, 0)).choose("next", OPTIONS) == 0


def test_the_same_choices_must_lead_to_the_same_choice() -> None:
    choices = Choices([0], WHOLE)
    choices.choose("next", OPTIONS)
    Choices([1], WHOLE, choices.marks[0]).choose("next", OPTIONS)
    with pytest.raises(Diverged, match="choice 0, other"):
        Choices([1], WHOLE, choices.marks[0]).choose("other", OPTIONS)
    with pytest.raises(Diverged, match="no option 3"):
        Choices([3], WHOLE).choose("next", OPTIONS)


def test_the_same_choices_are_the_same_run() -> None:
    """Whatever was played before: the trace has each request, message and answer, with its time."""
    script = SCRIPTS["small"]
    choice_lists = [(), (1,), (0, 2), (0, 0, 0, 7), (0, 1, 0, 0, 1)]
    with machine.quietly():
        first = [play(script, choices, 4, WHOLE, recovers=True) for choices in choice_lists]
        second = [
            play(script, choices, 4, WHOLE, recovers=True) for choices in reversed(choice_lists)
        ]
    assert first == [
        again._replace(cpu_s=run.cpu_s) for run, again in zip(first, reversed(second), strict=True)
    ]
    assert len({run.trace for run in first}) == len(choice_lists)
    assert not any(run.violations for run in first)


def test_every_sequence_of_choices_is_played_once() -> None:
    """A search of one act has as many schedules as a walk through its choices."""
    script, bound = SCRIPTS["commit"], Bound(1, 1, 1)
    result = search(script._replace(acts=script.acts[:1]), bound)
    assert not result.failures
    walked = set[tuple[int, ...]]()
    waiting: list[tuple[int, ...]] = [()]
    with machine.quietly():
        while waiting:
            run = play(script, waiting.pop(), 1, bound)
            assert run.taken not in walked
            walked.add(run.taken)
            for index, count in enumerate(run.counts):
                ahead = ((*run.taken[:index], option) for option in range(count))
                if not any(run.taken[index:]):  # the first run that takes none of these options
                    waiting += [choices for choices in ahead if choices[-1]]
    assert result.schedules == len(walked)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of a busy machine: half a minute on an idle one
def test_i1_to_i7_hold_in_every_run_of_a_small_world() -> None:
    """Also I9. To the end: a bound of counts, none of time."""
    output = ended(
        started("-m", "tests.explore", "--world", "small", "--both", "1", "--jobs", "1"), 1700
    )
    assert " 0 violations" in output
    assert "after: " in output, "the last act was searched"


@pytest.mark.timeout(1800)
def test_guards_that_are_taken_out_are_missed_soon() -> None:
    """Those that some schedules tell; `make explore ARGS=--mutations` has all of them."""
    output = ended(
        started("-m", "tests.explore", "--mutations", "--at-most", "60", "--jobs", "1"), 1700
    )
    assert " 0 missed" in output
    assert int(output.splitlines()[-1].split()[0]) > 6


def test_a_violation_is_printed_with_choices_that_lead_to_it() -> None:
    """Those after the last one that is not the first option are left out."""
    (mutation,) = (
        candidate for candidate in MUTATIONS if candidate.name == "412 is always another's"
    )
    script, bound = SCRIPTS["commit"], Bound(1, 1, 1)
    with mutation.applied():
        (failure,) = search(script, bound, schedules_max=200).failures
        output = report(script, bound, failure)
        choices = [int(number) for number in output.split("--replay ")[1].split('"')[0].split(",")]
        assert choices[-1]
        with machine.quietly():
            run = play(script, choices, failure.acts, bound, recovers=True)
        assert run.violations == failure.violations
    with machine.quietly():
        assert not play(script, choices, failure.acts, bound, recovers=True).violations
