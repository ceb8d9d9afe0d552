"""Find violations in a history, consumer groups included: `check_all` checks all rules.

owners            two members have one partition in one generation (I8)
old generation    a commit was taken though a later generation had been seen before it (I8)
committed offset  a group's offset is none that it can have (I1, I3)
went back         a member was given records below what its group had committed
sought            a member goes on elsewhere than where it said that it would
once              of a record that was consumed there is no result, or more than one: they were
                  committed together
passed over       the group was given later records of a partition, and never these
unread            the group was read to the end, and never got these
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.sim.checker import Call, Known, Story, Violation, Where, check
from tests.sim.history import (
    Acked,
    Append,
    Ask,
    Commit,
    Committed,
    Event,
    Offsets,
    Place,
    Poll,
    Polled,
    Seek,
    Sought,
    Told,
)

NO_GENERATION = -1


def check_all(events: Iterable[Event]) -> list[Violation]:
    """Everything that is wrong with the history."""
    events = list(events)
    story = Story.of(events)
    rules = (_owners, _generations, _offsets, _reads, _seeks, _once)
    return [*check(events), *(Violation(*fields) for rule in rules for fields in rule(story))]


def _polls(story: Story) -> list[tuple[Call, Poll, Polled]]:
    """In the order in which they were answered."""
    polls = [
        (call, call.asked, call.answer)
        for call in story.calls.values()
        if isinstance(call.asked, Poll) and isinstance(call.answer, Polled)
    ]
    return sorted(polls, key=lambda poll: poll[0].answered_at)


def _commits(story: Story) -> list[tuple[Call, int, Offsets]]:
    """With the number of the request: of its own, or one that had records, too."""
    commits = []
    tried: dict[str, list[Call]] = defaultdict(list)
    for call in story.calls.values():
        request = call.asked
        if isinstance(request, Commit):
            offsets = Offsets(request.group, request.member, request.generation, request.offsets)
            commits.append((call, request.op, offsets))
        elif isinstance(request, Append) and request.commit is not None:
            tried[request.key or f"op {request.op}"].append(call)
    for calls in tried.values():
        request = calls[0].asked
        assert isinstance(request, Append), "as was asked above"
        assert request.commit is not None, "as was asked above"
        commits.append((_as_one(calls), request.op, request.commit))
    return commits


def _as_one(calls: list[Call]) -> Call:
    """Attempts with one key: done as soon as one of them is said to be, refused if all are."""
    first = min(calls, key=lambda call: call.asked_at)
    done_calls = [call for call in calls if _is_done(call)]
    if done_calls:
        told = min(done_calls, key=lambda call: call.answered_at)
    else:
        told = next((call for call in calls if not call.is_refused), first)
    return Call(first.asked, first.asked_at, told.answer, told.answered_at)


def _is_done(call: Call) -> bool:
    return isinstance(call.answer, Committed | Acked)


def _owners(story: Story) -> Iterator[tuple[str, str]]:
    owners: dict[tuple[str, int, Where], set[str]] = defaultdict(set)
    for _, owns in story.owned:
        for partition in owns.partitions:
            owners[owns.group, owns.generation, partition].add(owns.member)
    for _, request, polled in _polls(story):
        for portion in polled.portions:
            partition = (portion.topic, portion.partition)
            owners[request.group, polled.generation, partition].add(request.member)
    for (group, generation, partition), members in owners.items():
        if generation != NO_GENERATION and len(members) > 1:
            text = (
                f"{partition} of group {group} is of {sorted(members)} in generation {generation}"
            )
            yield "owners", text


def _generations(story: Story) -> Iterator[tuple[str, str]]:
    generations = [
        (position, (owns.group, 0), owns.generation + 1) for position, owns in story.owned
    ]
    generations += [
        (c.answered_at, (request.group, 0), p.generation + 1) for c, request, p in _polls(story)
    ]
    generations += [
        (call.answered_at, (commit.group, 0), commit.generation + 1)
        for call, _, commit in _commits(story)
        if _is_done(call)
    ]
    newest = Known(generations)
    for call, op, commit in _commits(story):
        if not _is_done(call) or commit.generation == NO_GENERATION:
            continue
        begun_generation = newest.before(call.asked_at, (commit.group, 0)) - 1
        if commit.generation < begun_generation:
            text = f"commit {op} of generation {commit.generation}, {begun_generation} had begun"
            yield "old generation", text


def _writes(story: Story) -> dict[tuple[str, Where], list[tuple[Call, int]]]:
    """Return possible commits by group and partition."""
    writes: dict[tuple[str, Where], list[tuple[Call, int]]] = defaultdict(list)
    for call, _, commit in _commits(story):
        if not call.is_refused:
            for place in commit.places:
                writes[commit.group, place[:2]].append((call, place.offset))
    return writes


def _offsets(story: Story) -> Iterator[tuple[str, str]]:
    """Each group's offset of a partition is a register.

    A read finds the newest commit, or one that was under way, or may have been.
    """
    writes = _writes(story)
    for call in story.calls.values():
        if not (isinstance(call.asked, Ask) and isinstance(call.answer, Told)):
            continue
        told = {place[:2]: place.offset for place in call.answer.offsets}
        for (group, partition), written in writes.items():
            if group == call.asked.group:
                possible = _possible(written, call)
                if story.deletions.get(partition[0], call.answered_at) < call.answered_at:
                    possible.append(None)
                if told.get(partition) not in possible:
                    text = (
                        f"ask {call.asked.op}: {group} is at {told.get(partition)} of {partition}"
                    )
                    yield "committed offset", f"{text}, not at one of {possible}"


def _possible(written: list[tuple[Call, int]], ask: Call) -> list[int | None]:
    done_commits = [
        (call, offset)
        for call, offset in written
        if _is_done(call) and call.answered_at < ask.asked_at
    ]
    begun = max((call.asked_at for call, _ in done_commits), default=-1)
    offsets: list[int | None] = [] if done_commits else [None]
    for call, offset in written:
        is_over = _is_done(call) and call.answered_at < begun
        if call.asked_at < ask.answered_at and not is_over:
            offsets.append(offset)
    return offsets


def _reads(story: Story) -> Iterator[tuple[str, str]]:
    got: dict[tuple[str, Where], set[int]] = defaultdict(set)
    writes = _writes(story)
    for call, request, polled in _polls(story):
        for topic, partition, records, _ in polled.portions:
            got[request.group, (topic, partition)].update(read.offset for read in records)
            written = writes[request.group, (topic, partition)]
            possible = _possible(written, call)
            least = min(0 if offset is None else offset for offset in possible)
            least = min([least, *_sought(story, request, (topic, partition), written, call)])
            if records and records[0].offset < least:
                text = f"poll {request.op} gives {records[0].offset} of {topic}-{partition}"
                yield "went back", f"{text}, {request.group} had committed {least}"
    drained = {event.group: event.topics for event in story.drained}
    for group, topic_partition in sorted(
        {(group, topic_partition) for group, topic_partition in got}
    ):
        yield from _covered(
            story, group, topic_partition, got[group, topic_partition], is_drained=group in drained
        )
    polled_groups = {group for group, _ in got}
    for group in sorted(drained.keys() & polled_groups):
        topics = drained[group] or {
            topic_partition[0] for of, topic_partition in got if of == group
        }
        for topic_partition, final in story.finals.items():
            if (
                topic_partition[0] in topics
                and (group, topic_partition) not in got
                and final.records
            ):
                yield (
                    "unread",
                    f"{group} got nothing of {topic_partition}, which has {len(final.records)}",
                )


def _covered(
    story: Story, group: str, partition: Where, got: set[int], *, is_drained: bool
) -> Iterator[tuple[str, str]]:
    final = story.finals.get(partition)
    if final is None or story.is_compacted(partition[0]):
        return
    missed = [read.offset for read in final.records if read.offset not in got]
    passed = [offset for offset in missed if offset < max(got, default=0)]
    if passed:
        yield "passed over", f"{group} never got {passed[:20]} of {partition}"
    elif missed and is_drained:
        yield "unread", f"{group} never got {missed[:20]} of {partition}"


def _sought(
    story: Story, poll: Poll, partition: Where, written: list[tuple[Call, int]], call: Call
) -> list[int]:
    """Where the member may have said to go on: until it has committed something else."""
    offsets = []
    for seek, place in _seeks_of(story, poll, partition):
        is_over = isinstance(seek.answer, Sought) and any(
            _is_done(commit)
            and seek.answered_at < commit.asked_at
            and commit.answered_at < call.asked_at
            for commit, _ in written
        )
        if seek.asked_at < call.answered_at and not is_over:
            offsets.append(place.offset)
    return offsets


def _seeks_of(story: Story, poll: Poll, partition: Where) -> list[tuple[Call, Place]]:
    """Of the member that polls, in that partition."""
    return [
        (call, place)
        for call in story.calls.values()
        if isinstance(call.asked, Seek) and not call.is_refused
        if (call.asked.group, call.asked.member) == (poll.group, poll.member)
        for place in call.asked.positions
        if place[:2] == partition
    ]


def _seeks(story: Story) -> Iterator[tuple[str, str]]:
    """A member that seeks gets the records from there next.

    This holds as long as its group stays in the generation in which the member had read before.
    """
    calls = sorted(story.calls.values(), key=lambda call: call.asked_at)
    generation: dict[tuple[str, str], int] = {}
    expected: dict[tuple[str, str], dict[Where, tuple[int, int]]] = defaultdict(dict)
    for call in calls:
        request, answer = call.asked, call.answer
        if not isinstance(request, Seek | Poll):
            continue
        member = (request.group, request.member)
        positions = expected[member]
        if isinstance(request, Seek):
            for place in request.positions:
                positions.pop(place[:2], None)
                if isinstance(answer, Sought) and member in generation:
                    positions[place[:2]] = (place.offset, generation[member])
        elif not isinstance(answer, Polled):
            positions.clear()  # its next offset is unknown
        else:
            for portion in answer.portions:
                to, since = positions.pop((portion.topic, portion.partition), (None, 0))
                first = portion.records[0].offset if portion.records else to
                if to is not None and since == answer.generation and first != to:
                    text = f"poll {request.op} gives {first} of {portion.topic}-{portion.partition}"
                    yield "sought", f"{text}, {request.member} had gone to {to}"
            generation[member] = answer.generation


def _once(story: Story) -> Iterator[tuple[str, str]]:
    """The results of groups whose commits carry them are there once.

    In the end they are those of the records up to the committed offset.
    """
    read = {topic for topic, _ in story.finals}
    sources = {
        record.value: (append.commit.group, record.source)
        for _, append in story.appends()
        if append.commit is not None
        for record in append.records
        if record.source is not None and record.topic in read
    }
    result_offsets: dict[tuple[str, Where], list[int]] = defaultdict(list)
    for final in story.finals.values():
        for record in final.records:
            if record.value in sources:
                group, source = sources[record.value]
                result_offsets[group, source[:2]].append(source.offset)
    committed: dict[str, dict[Where, int]] = {}
    for call in sorted(story.calls.values(), key=lambda call: call.answered_at):
        if isinstance(call.asked, Ask) and isinstance(call.answer, Told):
            committed[call.asked.group] = {place[:2]: place.offset for place in call.answer.offsets}
    for group in sorted({group for group, _ in sources.values()} & committed.keys()):
        for partition in sorted(
            {
                *committed[group],
                *(source_partition for of, source_partition in result_offsets if of == group),
            }
        ):
            offsets = sorted(result_offsets[group, partition])
            end = committed[group].get(partition, 0)
            if offsets != list(range(end)):
                repeats = sorted({offset for offset in offsets if offsets.count(offset) > 1})
                missing = sorted(set(range(end)) - set(offsets))
                text = f"{group} has committed {end} of {partition}: twice there are {repeats[:20]}"
                yield "once", f"{text}, not there {missing[:20]}, beyond {offsets[end:][:5]}"
