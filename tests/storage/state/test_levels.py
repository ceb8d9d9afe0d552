"""The level of the format in the cluster state: one entry raises it; newer ones stop a version."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import (
    FIRST,
    IDS,
    Spec,
    appending,
    applied,
    chunk,
    encoded,
    histories,
    random_histories,
)
from tests.support.logs import append, closing, kill, made, opened
from tests.support.records import creating
from tests.support.views import with_topic
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import Commit, DecodedEntry, Entry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import Chunk, DeleteTopic, SetTopicDefaults
from tidelog.storage.core.errors import Corrupt, NewerLevel, StoreUnfit
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.wal_objects import CHECKPOINT_MAGIC

DEFAULT_MS = [600_000, 3_600_000, 86_400_000]
NO_OWNERS = [{}, {}, {}, [{}, {}]]
NO_KAFKA = [[], []]
BOUNDS = [False, DEFAULT_MS, DEFAULT_MS, [0, 0]]
"""Of a checkpoint of level 2, as long as no action has changed them."""


@pytest.mark.parametrize("level", [format_levels.FIRST, format_levels.NEWEST])
def test_a_checkpoint_of_another_level_is_refused(level: int) -> None:
    raw = msgspec.msgpack.decode(ClusterState("c", level).encode())
    assert raw[0] == level
    with pytest.raises(Corrupt, match="it has level 0 of the format"):
        ClusterState.decode(msgspec.msgpack.encode([0, *raw[1:]]), "checkpoints/7")
    # Whatever else it has: a newer version may have changed all of it.
    for newer in (
        [format_levels.NEWEST + 1, *raw[1:]],
        [format_levels.NEWEST + 1],
        [2**40, {"x": [None]}],
    ):
        with pytest.raises(NewerLevel, match="it needs a newer tidelog"):
            ClusterState.decode(msgspec.msgpack.encode(newer), "checkpoints/7")


@pytest.mark.parametrize("level", [format_levels.FIRST, format_levels.NEWEST])
def test_an_element_that_a_checkpoints_level_does_not_have_is_corrupt(level: int) -> None:
    state = ClusterState("c", level)
    applied(state, FIRST, appending((0, 0, 1), chunks=[chunk(1)]))
    for path in ((), (5, 0), (5, 0, 4, 0), (5, 0, 4, 0, 4, 0)):
        raw = msgspec.msgpack.decode(state.encode())
        if not path:
            raw += [None, None, None, [], None, [0, []], BOUNDS][len(raw) - 9 :]
        part = raw
        for index in path:
            part = part[index]
        part.append("new")
        with pytest.raises(Corrupt, match="does not decode"):
            ClusterState.decode(msgspec.msgpack.encode(raw), "checkpoints/7")


def raising(state: ClusterState, level: int, **changed: object) -> DecodedEntry:
    """The next entry, which has nothing but another level."""
    seq = state.seq + 1
    entry = Entry(level, seq, state.hash, b"id", "b", 5, [], [])
    header, _ = entries.encode_header(msgspec.structs.replace(entry, **changed))
    return entries.decode(header, object_keys.wal(seq), seq=seq, previous=state.hash)


def test_an_entry_without_commits_raises_the_level_by_one() -> None:
    state = ClusterState("c", format_levels.FIRST)
    applied(state, FIRST)
    old_state = msgspec.msgpack.decode(state.encode())
    assert state.apply(raising(state, 2), object_keys.wal(2)) == ([], [], set())
    assert (state.level, state.seq, state.time_ms) == (2, 2, 5)
    new_state = msgspec.msgpack.decode(state.encode())
    assert new_state == [
        2,
        "c",
        2,
        state.hash,
        5,
        *old_state[5:],
        None,
        None,
        None,
        [],
        None,
        [0, [["b", 5, 0]]],
        BOUNDS,
        [],
    ]
    again = ClusterState.decode(state.encode(), "checkpoints/2")
    assert (again.level, again.encode()) == (2, state.encode())
    applied(again, appending((0, 0, 1), chunks=[chunk(1)]))
    assert again.partition("alpha", 0).high_watermark == 1


@pytest.mark.parametrize(
    ("old_level", "level", "changed"),
    [
        (1, 2, {"commits": [Commit(b"", [])]}),
        (1, 2, {"commits": [Commit(b"", [DeleteTopic(IDS[0])])]}),
        (1, 2, {"chunks": [Chunk(IDS[0], 0, 0, 90, 1, 1, 0, 5, True, "", 90)]}),
        (2, 1, {}),
        (2, 1, {"commits": [Commit(b"", [])]}),
    ],
    ids=["a commit", "an action", "a chunk", "lower", "lower, a commit"],
)
def test_no_other_entry_changes_the_level(old_level: int, level: int, changed: dict) -> None:
    state = ClusterState("c", old_level)
    applied(state, FIRST)
    body = state.encode()
    with pytest.raises(Corrupt, match=f"it has level {level} in a cluster of {old_level}"):
        state.apply(raising(state, level, **changed), object_keys.wal(2))
    assert state.encode() == body


def test_a_jump_of_two_levels_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_levels, "NEWEST", 3)
    state = ClusterState("c", format_levels.FIRST)
    applied(state, FIRST)
    body = state.encode()
    with pytest.raises(Corrupt, match="it has level 3 in a cluster of 1"):
        state.apply(raising(state, 3), object_keys.wal(2))
    assert state.encode() == body
    state.apply(raising(state, 2), object_keys.wal(2))
    state.apply(raising(state, 3), object_keys.wal(3))
    assert state.level == 3


@given(histories, st.integers(0, 30))
@random_histories
def test_the_level_changes_nothing_else(history: list[Spec], raise_number: int) -> None:
    """A cluster raised to level 3 has the content of one that began at it, without principals."""
    raised, newest = ClusterState("c", format_levels.FIRST), ClusterState("c")
    for number, spec in enumerate(history):
        spec = spec._replace(at_ms=number)
        if number == min(raise_number, len(history) - 1):
            for level in range(2, format_levels.NEWEST + 1):
                for state, new_level in ((raised, level), (newest, format_levels.NEWEST)):
                    entry = raising(state, new_level, at_ms=state.time_ms)
                    state.apply(entry, object_keys.wal(state.seq + 1))
        if raised.level < format_levels.TOPIC_DEFAULTS:
            spec = spec._replace(commits=[_without_defaults(commit) for commit in spec.commits])
        outcomes = [  # without the lengths of headers, which are in the positions of chunks
            state.apply(encoded(state, spec)._replace(body_start=0), "wal/x").outcomes
            for state in (raised, newest)
        ]
        assert str(outcomes[0]) == str(outcomes[1])
    raised.level, raised.hash = newest.level, newest.hash
    assert raised.encode() == newest.encode()


def _without_defaults(commit: Commit) -> Commit:
    """Return what a lower level than that of the defaults can have of a commit."""
    actions = [action for action in commit.actions if not isinstance(action, SetTopicDefaults)]
    return msgspec.structs.replace(commit, actions=actions)


# -- what a newer version has written


NEW = {"x": 1}
NEWER = format_levels.NEWEST + 1


def checkpoint_of(state: list[Any]) -> bytes:
    payload = msgspec.msgpack.encode(state)
    return CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little") + payload


async def upgraded(inner: MemoryStore, level: int, *, is_collected: bool) -> str:
    """Write the newest checkpoint as the next version does: its state has one element more.

    Return its key.
    """
    async with closing(await opened(inner)) as log:
        await log.topics.create("t", 1, {})
        await append(log, "a")
        seq = log.state.seq
        state = msgspec.msgpack.decode(log.state.encode())
    state = [level, *state[1:], NEW]
    await inner.put(
        object_keys.checkpoint(seq), [checkpoint_of(state)]
    )  # the broker wrote one at its end
    if is_collected:
        await inner.delete([object_keys.wal(number) for number in range(1, seq)])
        older = [info.key async for info in inner.list(object_keys.CHECKPOINTS)]
        await inner.delete([key for key in older if key != object_keys.checkpoint(seq)])
    return object_keys.checkpoint(seq)


@pytest.mark.parametrize("is_collected", [False, True])
async def test_older_version_drops_nothing_new(inner: MemoryStore, is_collected: bool) -> None:
    key = await upgraded(inner, NEWER, is_collected=is_collected)
    old_infos = [info async for info in inner.list("")]
    with pytest.raises(NewerLevel, match=f"{key} has level {NEWER}"):
        await made(inner).open("c0ffee")
    assert [info async for info in inner.list("")] == old_infos


@pytest.mark.parametrize("is_collected", [False, True])
async def test_state_above_its_level_is_corrupt(inner: MemoryStore, is_collected: bool) -> None:
    """No version writes it: it is passed over, as any damaged checkpoint, if all entries exist."""
    key = await upgraded(inner, format_levels.NEWEST, is_collected=is_collected)
    if is_collected:
        with pytest.raises(StoreUnfit, match="no checkpoint that can be read"):
            await made(inner).open("c0ffee")
        return
    log = await made(inner).open("c0ffee")
    try:
        assert log.state.partition("t", 0).high_watermark == 1
        with pytest.raises(Corrupt, match=key):
            ClusterState.decode((await inner.get(key))[12:], key)
    finally:
        await kill(log)


def of_entry(values: list[Any]) -> list[Any]:
    return values


def of_commit(values: list[Any]) -> list[Any]:
    return values[7][0]


def of_action(values: list[Any]) -> list[Any]:
    return values[7][0][1][0]


@pytest.mark.parametrize("level", [format_levels.FIRST, format_levels.NEWEST, NEWER])
@pytest.mark.parametrize("part", [of_entry, of_commit, of_action])
async def test_an_older_version_stops_at_an_entry_that_it_does_not_know(
    inner: MemoryStore, part: Callable[[list[Any]], list[Any]], level: int
) -> None:
    wal = await with_topic(inner)
    draft = creating(wal.clock, "u", topic_id="b2" * 16)
    newer = Entry(
        level=format_levels.NEWEST,
        seq=wal.state.seq + 1,
        previous=wal.state.hash,
        entry_id=wal.clock.new_id(),
        writer="newer",
        at_ms=wal.state.time_ms,
        chunks=draft.chunks,
        commits=draft.commits,
    )
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(newer))
    values[0] = level
    part(values).append(NEW)
    header = msgspec.msgpack.encode(values)
    prefix = entries._PREFIX.pack(entries.MAGIC, len(header), crc32c(header))
    await inner.create(object_keys.wal(newer.seq), [prefix + header])
    corruption = pytest.raises(Corrupt, match="does not decode")
    newer_level = pytest.raises(NewerLevel, match="it needs a newer tidelog")
    old_state = wal.state.encode()
    with newer_level if level == NEWER else corruption:
        await wal.refresh()
    assert wal.state.encode() == old_state, "the entry is applied in part"
    with newer_level if level == NEWER else corruption:
        await wal.commit(draft)
    assert wal.state.encode() == old_state
    await wal.close()
