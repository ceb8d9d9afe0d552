"""One run of a script with given choices, and its judgement."""

import contextlib
from collections.abc import Iterator, Sequence
from time import process_time
from typing import NamedTuple

from tests.explore.choices import Bound, Choices, Diverged
from tests.explore.rest import digest
from tests.explore.script import GRACE, Cast, Script
from tests.explore.stage import Stage
from tests.explore.world import ExploredWorld
from tests.sim import machine
from tests.sim.checker import Violation
from tests.sim.groupcheck import check_all

END_S = 2000.0


class Run(NamedTuple):
    """One run up to the rest after an act, or recovered from there.

    `left` is what is left of the bound, `rest` the hash of the state, empty after a recovery.
    """

    taken: tuple[int, ...]
    counts: tuple[int, ...]
    marks: tuple[bytes, ...]
    names: tuple[str, ...]
    left: Bound
    rest: bytes
    violations: tuple[Violation, ...]
    trace: str
    cpu_s: float


def play(
    script: Script,
    given_choices: Sequence[int],
    acts: int,
    bound: Bound,
    *,
    mark: bytes = b"",
    recovers: bool = False,
    lines: list[str] | None = None,
) -> Run:
    """Play so many acts of the script. Use it `quietly`."""
    begun_s = process_time()
    choices = Choices(given_choices, bound, mark)
    world = ExploredWorld(Stage(choices))
    world.lines = lines
    cast = Cast(world, script.brokers, script.partitions)
    violations: list[Violation] = []
    rest_digests = [b""]

    async def main() -> None:
        await cast.found()
        await cast.rest()
        stage = world.stage
        for act in script.acts[:acts]:
            world.note(f"ACT {act.name}")
            await cast.replace()
            if act.grows_old:
                await cast.grow_old()
            stage.has_deletes, stage.may_suspend = act.has_deletes, act.may_suspend
            if act.wakes:
                stage.is_free = False
                stage.wake()
            act.begin(cast)
            await stage.play(cast.is_over)
            world.check_states()
            await cast.rest()
        rest_digests[0] = digest(cast)
        if recovers:
            await cast.recover()

    try:
        with _patched(world):
            machine.run(main, thread_s=lambda: 0.0, end_s=END_S)
    except Diverged:
        raise
    except Exception as error:  # noqa: BLE001 - of the machine, of a check, of what may not fail
        violations.append(Violation("stuck", repr(error)))
    violations += [Violation("bug", bug) for bug in world.bugs]
    if recovers:
        violations += check_all(world.recorder.events)
    return Run(
        tuple(choices.taken),
        tuple(choices.counts),
        tuple(choices.marks),
        tuple(choices.names),
        choices.left,
        b"" if recovers else rest_digests[0],
        tuple(violations),
        world.trace.hexdigest(),
        process_time() - begun_s,
    )


@contextlib.contextmanager
def _patched(world: ExploredWorld) -> Iterator[None]:
    with world.standing_in(GRACE), contextlib.ExitStack() as stack:
        for owner, name, value in world.patches():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
