"""All runs of a script within a bound, act by act.

A run with given choices takes the first option from there on; each other option that it passed is a
run of its own. So every sequence of choices is played once, from the beginning. Acts are searched
one after the other: a run ends at rest, and of those that end in one state with the same left of
the bound, or less, one goes on. From each new state, one more run recovers and is judged.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

from tests.explore.choices import Bound
from tests.explore.run import Run, play
from tests.explore.script import SCRIPTS, Script
from tests.sim import machine
from tests.sim.checker import Violation

BATCH = 24


class Task(NamedTuple):
    """A run to play: given choices, the hash before the last of them, acts."""

    given: tuple[int, ...]
    mark: bytes
    acts: int
    recovers: bool = False


class Failure(NamedTuple):
    """A violation, and how to play it again."""

    given: tuple[int, ...]
    acts: int
    violations: tuple[Violation, ...]

    @property
    def last(self) -> int:
        """The index of the last choice that is not the first option."""
        return max((index for index, number in enumerate(self.given) if number), default=0)


class Searched(NamedTuple):
    """The extent of a search.

    `choices` are those with more than one option, each counted once; `states` by act; `cut` are
    rests that were known.
    """

    schedules: int
    choices: int
    states: tuple[int, ...]
    cut: int
    recoveries: int
    seconds: float
    cpu_s: float
    failures: tuple[Failure, ...]


def search(
    script: Script,
    bound: Bound,
    *,
    jobs: int = 1,
    failures_max: int = 1,
    schedules_max: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Searched:
    """Search all, or until so many failures or schedules."""
    begun_s, cpu_s = perf_counter(), 0.0
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    states: list[int] = []
    recovered: set[bytes] = set()

    def is_enough() -> bool:
        has_all = schedules_max is not None and counts["schedules"] >= schedules_max
        return len(failures) >= failures_max or has_all

    with _players(script, bound, jobs) as player:
        starts: list[tuple[int, ...]] = [()]
        for acts in range(1, len(script.acts) + 1):
            choices_by_state: dict[bytes, dict[Bound, tuple[int, ...]]] = {}
            firsts = {choices: len(choices) for choices in starts}
            tasks = deque(Task(choices, b"", acts) for choices in starts)
            for task, run in player.played(tasks):
                cpu_s += run.cpu_s
                if run.violations:
                    failures.append(Failure(run.taken, acts, run.violations))
                if task.recovers:
                    counts["recoveries"] += 1
                elif not run.violations:
                    counts["schedules"] += 1
                    first = firsts.get(task.given, len(task.given))
                    counts["choices"] += len(run.taken) - first
                    tasks.extend(_others(run, first, acts))
                    _keep(choices_by_state.setdefault(run.rest, {}), run)
                    if run.rest not in recovered:
                        recovered.add(run.rest)
                        tasks.appendleft(Task(run.taken, b"", acts, recovers=True))
                if is_enough():
                    break
            next_starts = [
                choices for by_bound in choices_by_state.values() for choices in _maximal(by_bound)
            ]
            states.append(len(choices_by_state))
            say(
                f"{script.acts[acts - 1].name}: {len(starts)} starts, {counts['schedules']} "
                f"schedules so far, {len(choices_by_state)} states, {cpu_s:.0f} s of one core"
            )
            counts["kept"] += len(next_starts)
            if is_enough():
                break
            starts = sorted(next_starts)
    return Searched(
        counts["schedules"],
        counts["choices"],
        tuple(states),
        counts["schedules"] - counts["kept"],
        counts["recoveries"],
        perf_counter() - begun_s,
        cpu_s,
        tuple(failures),
    )


def _others(run: Run, first: int, acts: int) -> Iterator[Task]:
    """The runs that take another option than this one did, after its given choices."""
    for index in range(first, len(run.taken)):
        for option in range(1, run.counts[index]):
            yield Task((*run.taken[:index], option), run.marks[index], acts)


def _keep(by_bound: dict[Bound, tuple[int, ...]], run: Run) -> None:
    known_choices = by_bound.get(run.left)
    if known_choices is None or run.taken < known_choices:  # whichever process was faster
        by_bound[run.left] = run.taken


def _maximal(by_bound: dict[Bound, tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    for bound, choices in by_bound.items():
        if not any(other != bound and other.covers(bound) for other in by_bound):
            yield choices


class _players:  # noqa: N801 - a context manager
    """Plays tasks here, or in processes of its own."""

    def __init__(self, script: Script, bound: Bound, jobs: int) -> None:
        self._script = script
        self._bound = bound
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_players":
        if self._jobs > 1:
            self._pool = ProcessPoolExecutor(self._jobs, get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def played(self, tasks: deque[Task]) -> Iterator[tuple[Task, Run]]:
        """Each task and its run; the caller may add tasks meanwhile."""
        if self._pool is None:
            while tasks:
                batch = _batch(tasks)
                yield from zip(batch, _play_all(self._script, self._bound, batch), strict=True)
            return
        under_way: dict[Future[list[Run]], list[Task]] = {}
        while tasks or under_way:
            while tasks and len(under_way) < self._jobs + 1:
                batch = _batch(tasks, max(1, min(BATCH, len(tasks) // self._jobs)))
                future = self._pool.submit(_play_named, self._script.name, self._bound, batch)
                under_way[future] = batch
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield from zip(under_way.pop(future), future.result(), strict=True)


def _batch(tasks: deque[Task], size: int = BATCH) -> list[Task]:
    return [tasks.popleft() for _ in range(min(size, len(tasks)))]


def _play_named(script: str, bound: Bound, tasks: list[Task]) -> list[Run]:
    return _play_all(SCRIPTS[script], bound, tasks)


def _play_all(script: Script, bound: Bound, tasks: list[Task]) -> list[Run]:
    with machine.quietly():
        return [
            play(script, task.given, task.acts, bound, mark=task.mark, recovers=task.recovers)
            for task in tasks
        ]
