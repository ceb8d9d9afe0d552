"""What is wrong with a history, consumer groups included: `check_all` is the whole judgement.

owners            two members have one partition in one generation (I8)
old generation    a commit was taken though a later generation had been seen before it (I8)
committed offset  a group's offset is none that it can have (I1, I3)
went back         a member was given records below what its group had committed
passed over       the group was given later records of a partition, and never these
unread            the group was read to the end, and never got these
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.sim.checker import Call, Known, Story, Violation, Where, check
from tests.sim.history import (
    Ask,
    Commit,
    Committed,
    Event,
    Poll,
    Polled,
    Told,
)

NO_GENERATION = -1


def check_all(events: Iterable[Event]) -> list[Violation]:
    """Everything that is wrong with the history."""
    events = list(events)
    story = Story.of(events)
    rules = (_owners, _generations, _offsets, _reads)
    return [*check(events), *(Violation(*each) for rule in rules for each in rule(story))]


def _polls(story: Story) -> list[tuple[Call, Poll, Polled]]:
    """In the order in which they were answered."""
    found = [
        (call, call.asked, call.answer)
        for call in story.calls.values()
        if isinstance(call.asked, Poll) and isinstance(call.answer, Polled)
    ]
    return sorted(found, key=lambda each: each[0].answered_at)


def _commits(story: Story) -> list[tuple[Call, Commit]]:
    return [(call, call.asked) for call in story.calls.values() if isinstance(call.asked, Commit)]


def _owners(story: Story) -> Iterator[tuple[str, str]]:
    owners: dict[tuple[str, int, Where], set[str]] = defaultdict(set)
    for _, owns in story.owned:
        for where in owns.partitions:
            owners[owns.group, owns.generation, where].add(owns.member)
    for _, asked, polled in _polls(story):
        for portion in polled.portions:
            where = (portion.topic, portion.partition)
            owners[asked.group, polled.generation, where].add(asked.member)
    for (group, generation, where), members in owners.items():
        if generation != NO_GENERATION and len(members) > 1:
            text = f"{where} of group {group} is of {sorted(members)} in generation {generation}"
            yield "owners", text


def _generations(story: Story) -> Iterator[tuple[str, str]]:
    seen = [(at, (owns.group, 0), owns.generation + 1) for at, owns in story.owned]
    seen += [(c.answered_at, (asked.group, 0), p.generation + 1) for c, asked, p in _polls(story)]
    seen += [
        (call.answered_at, (commit.group, 0), commit.generation + 1)
        for call, commit in _commits(story)
        if isinstance(call.answer, Committed)
    ]
    newest = Known(seen)
    for call, commit in _commits(story):
        if not isinstance(call.answer, Committed) or commit.generation == NO_GENERATION:
            continue
        before = newest.before(call.asked_at, (commit.group, 0)) - 1
        if commit.generation < before:
            text = f"commit {commit.op} of generation {commit.generation}, {before} had begun"
            yield "old generation", text


def _writes(story: Story) -> dict[tuple[str, Where], list[tuple[Call, int]]]:
    """What may have been committed, by group and partition."""
    writes: dict[tuple[str, Where], list[tuple[Call, int]]] = defaultdict(list)
    for call, commit in _commits(story):
        if not call.is_refused:
            for place in commit.offsets:
                writes[commit.group, place[:2]].append((call, place.offset))
    return writes


def _offsets(story: Story) -> Iterator[tuple[str, str]]:
    """Each group's offset of a partition is a register: a read finds the newest commit, or one that
    was under way, or may have been."""
    writes = _writes(story)
    for call in story.calls.values():
        if not (isinstance(call.asked, Ask) and isinstance(call.answer, Told)):
            continue
        told = {place[:2]: place.offset for place in call.answer.offsets}
        for (group, where), written in writes.items():
            if group == call.asked.group:
                possible = _possible(written, call)
                if told.get(where) not in possible:
                    text = f"ask {call.asked.op}: {group} is at {told.get(where)} of {where}"
                    yield "committed offset", f"{text}, not at one of {possible}"


def _possible(written: list[tuple[Call, int]], ask: Call) -> list[int | None]:
    done = [
        (call, offset)
        for call, offset in written
        if isinstance(call.answer, Committed) and call.answered_at < ask.asked_at
    ]
    begun = max((call.asked_at for call, _ in done), default=-1)
    found: list[int | None] = [] if done else [None]
    for call, offset in written:
        is_over = isinstance(call.answer, Committed) and call.answered_at < begun
        if call.asked_at < ask.answered_at and not is_over:
            found.append(offset)
    return found


def _reads(story: Story) -> Iterator[tuple[str, str]]:
    got: dict[tuple[str, Where], set[int]] = defaultdict(set)
    writes = _writes(story)
    for call, asked, polled in _polls(story):
        for topic, partition, records, _ in polled.portions:
            got[asked.group, (topic, partition)].update(read.offset for read in records)
            possible = _possible(writes[asked.group, (topic, partition)], call)
            least = min(0 if each is None else each for each in possible)
            if records and records[0].offset < least:
                text = f"poll {asked.op} gives {records[0].offset} of {topic}-{partition}"
                yield "went back", f"{text}, {asked.group} had committed {least}"
    drained = {each.group for each in story.drained}
    for group, where in sorted({(group, where) for group, where in got}):
        yield from _covered(story, group, where, got[group, where], is_drained=group in drained)
    polled_groups = {group for group, _ in got}
    for group in drained & polled_groups:
        topics = {where[0] for of, where in got if of == group}
        for where, final in story.finals.items():
            if where[0] in topics and (group, where) not in got and final.records:
                yield "unread", f"{group} got nothing of {where}, which has {len(final.records)}"


def _covered(
    story: Story, group: str, where: Where, got: set[int], *, is_drained: bool
) -> Iterator[tuple[str, str]]:
    final = story.finals.get(where)
    if final is None or story.is_compacted(where[0]):
        return
    missed = [read.offset for read in final.records if read.offset not in got]
    passed = [offset for offset in missed if offset < max(got, default=0)]
    if passed:
        yield "passed over", f"{group} never got {passed[:20]} of {where}"
    elif missed and is_drained:
        yield "unread", f"{group} never got {missed[:20]} of {where}"
