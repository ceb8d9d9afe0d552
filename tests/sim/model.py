"""The rules of DESIGN 4 and 5 as a small machine, searched to the last state: each rule is needed.

One writer that may sleep at any moment, with one record to commit (`Z`); the rest of the cluster,
which is awake, and commits records and seals, writes checkpoints and collects. Time goes in ticks:
a view is void when it is older than `VIEW`, an object may be collected when it is as old as
`RETENTION`. A PUT takes as long as it likes, may be lost, and may be done though the answer is.
The true chain is the sequence of entries, each created as the next number.

In every reachable state these must hold:
    - what was acked is in the chain, what was refused is not (I1, I6);
    - a starting broker finds all of the chain after the newest checkpoint (I2);
    - a view that is not void is a beginning of the chain (I5), and finds each entry that it names:
      one with a record that, as far as the view goes, no seal covers (I9).
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

NUMBERS = 4
VIEW = 0
RETENTION = 1
Z = 9
"""The entry of the suspended broker; other entries are their numbers, negative for seals."""


class Rules(NamedTuple):
    """Each may be taken out."""

    immutable: bool = True
    """Objects are created, never overwritten."""
    read_back: bool = True
    """After an unknown outcome the number is read back."""
    read_back_exists: bool = True
    """After 412, too: it may be one's own success."""
    same_number: bool = True
    """An entry that is absent after an unknown outcome is put again at the same number."""
    void: bool = True
    """A view that is too old is loaded again."""
    look_after: bool = True
    """A broker whose view expired before its PUT was answered reads the next number."""
    covered: bool = True
    """Entries are collected only when a checkpoint covers them ..."""
    sealed: bool = True
    """... and as of that checkpoint their records are sealed ..."""
    old: bool = True
    """... and that checkpoint, which is younger than they are, is older than the retention ..."""
    newest: bool = True
    """... and they are not the newest."""


class Entry(NamedTuple):
    id: int
    previous: int


class Checkpoint(NamedTuple):
    seq: int
    age: int


class State(NamedTuple):
    """`store` by number from 1 on; `chain` is the truth.

    The suspended broker has a view up to `seen`, of which the last is `last`; `way` is where its
    PUT is; `late` one that was given up and may arrive; `answer` the one to the client: none, yes,
    no, or unknown.
    """

    store: tuple[Entry | None, ...] = (None,) * NUMBERS
    chain: tuple[int, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = (Checkpoint(0, RETENTION),)
    seen: int = 0
    last: int = 0
    age: int = 0
    way: str = "idle"
    number: int = 0
    late: bool = False
    answer: str = ""


class Explored(NamedTuple):
    """How many states there are; and the shortest way to a violation, if there is one."""

    states: int
    violation: str
    steps: tuple[str, ...]


def explore(rules: Rules) -> Explored:
    """Breadth first, until a violation or to the end."""
    first = State()
    steps: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        if violation := _violation(state, rules):
            return Explored(len(steps), violation, _steps(steps, state))
        for step, next_state in _after(state, rules):
            if next_state not in steps:
                steps[next_state] = (state, step)
                queue.append(next_state)
    return Explored(len(steps), "", ())


def _steps(previous_steps: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while (came := previous_steps[state]) is not None:
        state, step = came
        steps.append(step)
    return tuple(reversed(steps))


def _is_void(state: State, rules: Rules) -> bool:
    return rules.void and state.age > VIEW


# -- what must hold


def _violation(state: State, rules: Rules) -> str:
    if state.answer == "yes" and Z not in state.chain:
        return "an acked record is not in the chain"
    if state.answer == "no" and Z in state.chain:
        return "a refused record is in the chain"
    newest = state.checkpoints[-1].seq
    for number in range(newest + 1, len(state.chain) + 1):
        if _id_at(state, number) != state.chain[number - 1]:
            return f"who starts does not find entry {number}"
    if not _names(state, len(state.chain)):
        return "the record of an entry is gone, and no seal covers it"
    if state.age <= VIEW or not rules.void:
        if state.last != (state.chain[state.seen - 1] if state.seen else 0):
            return "a view is not the chain"
        if not _names(state, state.seen):
            return "a view that is not void names an entry that is gone"
    return ""


def _id_at(state: State, number: int) -> int | None:
    entry = state.store[number - 1] if number <= NUMBERS else None
    return None if entry is None else entry.id


def _sealed(chain: tuple[int, ...], seq: int) -> int:
    """Up to where records are sealed, as of entry `seq`."""
    return max((number for number in range(1, seq + 1) if chain[number - 1] < 0), default=0)


def _names(state: State, seq: int) -> bool:
    """Whether all that is named as of entry `seq` is there."""
    return all(
        state.chain[number - 1] < 0 or _id_at(state, number) == state.chain[number - 1]
        for number in range(_sealed(state.chain, seq) + 1, seq + 1)
    )


# -- what may happen


def _after(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    yield "time passes", _tick(state)
    yield from _others(state, rules)
    yield from _collections(state, rules)
    yield from _sleeper(state, rules)
    if state.late:
        yield "a PUT arrives late", _put(state, state.number, rules)._replace(late=False)


def _tick(state: State) -> State:
    return state._replace(
        checkpoints=tuple(
            checkpoint._replace(age=min(checkpoint.age + 1, RETENTION))
            for checkpoint in state.checkpoints
        ),
        age=min(state.age + 1, VIEW + 1),
    )


def _others(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    number = len(state.chain) + 1
    if number <= NUMBERS - 1:  # the last is for the suspended broker
        last = state.chain[-1] if state.chain else 0
        for name, entry_id in (("a record", number), ("a seal", -number)):
            if state.store[number - 1] is None:
                yield f"others commit {name}, {number}", _create(state, number, entry_id, last)
    if len(state.chain) > state.checkpoints[-1].seq:
        checkpoints = (*state.checkpoints, Checkpoint(len(state.chain), 0))[-2:]
        yield f"a checkpoint of {len(state.chain)}", state._replace(checkpoints=checkpoints)


def _create(state: State, number: int, entry_id: int, previous: int) -> State:
    store = list(state.store)
    store[number - 1] = Entry(entry_id, previous)
    chain = state.chain
    if number == len(chain) + 1:
        chain = (*chain, entry_id)
    return state._replace(store=tuple(store), chain=chain)


def _collections(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    there = [number for number in range(1, NUMBERS + 1) if state.store[number - 1] is not None]
    bases = [c.seq for c in state.checkpoints if c.age >= RETENTION or not rules.old]
    base = max(bases, default=0)
    for number in there:
        has_record = (_id_at(state, number) or 0) > 0
        is_kept = (
            (rules.covered and number > base)
            or (rules.sealed and has_record and number > _sealed(state.chain, base))
            or (rules.newest and number == there[-1])
        )
        if not is_kept:
            store = (*state.store[: number - 1], None, *state.store[number:])
            yield f"{number} is collected", state._replace(store=store)


def _sleeper(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    match state.way:
        case "idle":
            yield "the suspended broker refreshes", _looked(state, rules)
            if not state.answer and not _is_void(state, rules):
                number = state.seen + 1
                if number <= NUMBERS:
                    yield f"it puts {number}", state._replace(way="sent", number=number)
        case "sent":
            exists = state.store[state.number - 1] is not None and rules.immutable
            arrived = _put(state, state.number, rules)
            yield "the PUT arrives", arrived._replace(way="exists" if exists else "done")
            yield "the PUT arrives, its answer is lost", arrived._replace(way="unknown")
            if not exists:
                yield "the PUT is done, and called 412", arrived._replace(way="exists")
            if not state.late:
                yield "the PUT is on its way still", state._replace(way="unknown", late=True)
            yield "the PUT is lost", state._replace(way="unknown")
        case "done":
            yield "it takes the yes", _done(state, rules)
        case "unknown" | "exists":
            yield f"it gets the answer: {state.way}", _heard(state, rules)


def _put(state: State, number: int, rules: Rules) -> State:
    if state.store[number - 1] is not None and rules.immutable:
        return state
    return _create(state, number, Z, state.last)


def _heard(state: State, rules: Rules) -> State:
    if state.way == "unknown" and not rules.read_back:
        return _done(state, rules)
    if state.way == "exists" and not rules.read_back_exists:
        return state._replace(way="idle", answer="no")
    entry_id = _id_at(state, state.number)
    if entry_id == Z:
        return _done(state, rules)
    if entry_id is not None:
        return state._replace(way="idle", answer="no" if not state.late else "unknown")
    if state.way == "exists":
        return state._replace(way="idle", answer="unknown")
    if not rules.same_number:
        return state._replace(way="idle", answer="no")
    return state._replace(way="sent")


def _done(state: State, rules: Rules) -> State:
    if state.age > VIEW and rules.look_after:
        later_numbers = [
            n for n in range(state.number + 1, NUMBERS + 1) if state.store[n - 1] is not None
        ]
        following = state.store[state.number] if state.number < NUMBERS else None
        if later_numbers and following is None:
            return state._replace(way="idle", answer="unknown")
        if following is not None and following.previous != Z:
            return state._replace(way="idle", answer="no")
    return state._replace(way="idle", answer="yes", seen=state.number, last=Z)


def _looked(state: State, rules: Rules) -> State:
    """Follow the chain from the view, or where it is void from the newest checkpoint."""
    number, last = state.seen, state.last
    if _is_void(state, rules):
        number = state.checkpoints[-1].seq
        last = state.chain[number - 1] if number else 0
    while number < NUMBERS:
        entry = state.store[number]
        if entry is None or entry.previous != last:
            break
        number, last = number + 1, entry.id
    return state._replace(seen=number, last=last, age=0)
