"""Drafts of many in one entry, and what brokers say to each other (I2, I4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    decode_announcements,
    decode_forwarded,
    encode_announcements,
    encode_forwarded,
)
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import Commit, DecodedEntry, Draft, DraftId, Entry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import Append, Chunk, CreateTopic, ProducerAppend
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.state.applied_drafts import ORIGIN_WINDOW_MS, ORIGINS_MAX, AppliedDrafts
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.wal.merged_drafts import merge, not_after_ms, refer

TOPIC = "a" * 32


def draft_of(bodies: list[bytes], origin_id: str = "", number: int = 0, data: str = "") -> Draft:
    """One chunk and one commit for each body; a chunk in `data` where that is given."""
    chunks, next_position = [], 0
    for body in bodies:
        position = 7 if data else next_position
        chunks.append(
            Chunk(TOPIC, 0, position, len(body), crc32c(body), 1, 0, 0, False, "", len(body), data)
        )
        next_position += 0 if data else len(body)
    commits = [Commit(body, [Append(index, 0, 1)]) for index, body in enumerate(bodies)]
    origins = [DraftId(origin_id, number, len(commits))] if origin_id else []
    return Draft(commits, chunks, [] if data else list(bodies), origins)


def entry_of(
    draft: Draft,
    seq: int = 2,
    *,
    previous: bytes = b"",
    at_ms: int = 0,
    level: int = format_levels.NEWEST,
) -> DecodedEntry:
    head = (level, seq, previous, b"", "w", at_ms)
    entry = Entry(*head, draft.chunks, draft.commits, list(draft.origins))
    header, digest = entries.encode_header(entry)
    return entries.decode(header, "it", seq=seq, previous=None)._replace(hash=digest)


@examples(100)
@given(st.lists(st.tuples(st.lists(st.binary(min_size=1, max_size=9), min_size=1), st.booleans())))
def test_a_merged_draft_says_what_its_drafts_said(parts: list[tuple[list[bytes], bool]]) -> None:
    drafts = [
        draft_of(bodies, f"o{index}", 1, object_keys.data("aa", 7) if is_referred else "")
        for index, (bodies, is_referred) in enumerate(parts)
    ]
    drafts.append(draft_of([b"own"]))
    merged = merge(drafts)
    body = b"".join(merged.bodies)
    commit_ids = []
    for commit in merged.commits:
        (action,) = commit.actions
        assert isinstance(action, Append)
        chunk = merged.chunks[action.chunk]
        if chunk.data:
            assert (chunk.position, crc32c(commit.commit_id)) == (7, chunk.crc32c)
        else:
            assert body[chunk.position : chunk.position + chunk.size] == commit.commit_id
        commit_ids.append(commit.commit_id)
    assert commit_ids == [body for bodies, _ in parts for body in bodies] + [b"own"]
    shares = list(entries.shares(entry_of(merged).entry))
    assert [origin.origin_id for origin, _ in shares] == [f"o{i}" for i in range(len(parts))]
    assert sum(len(commits) for _, commits in shares) == len(commit_ids) - 1


def test_a_producers_batch_keeps_its_sequence() -> None:
    batch = ProducerAppend(0, 0, 1, 7, 2, 40)
    theirs = draft_of([b"x"], "p", 1)._replace(commits=[Commit(b"x", [batch])])
    merged = merge([draft_of([b"first"], "o", 1), theirs])
    assert merged.commits[1].actions == [ProducerAppend(1, 0, 1, 7, 2, 40)]


def test_own_commits_never_pass_for_another_brokers() -> None:
    with pytest.raises(AssertionError):
        merge([draft_of([b"own"]), draft_of([b"theirs"], "o", 1)])


def test_a_draft_goes_over_as_it_is() -> None:
    draft = draft_of([b"one", b"two"], "o", 3)
    named = msgspec.structs.replace(draft.commits[1], principal="User:alice")
    draft = draft._replace(commits=[draft.commits[0], named])
    decoded_draft = decode_forwarded(encode_forwarded(draft)).draft
    assert merge([draft_of([b"x"], "p", 1), decoded_draft]).commits[2].principal == "User:alice"
    assert decoded_draft._replace(bodies=[]) == draft._replace(bodies=[])
    assert b"".join(decoded_draft.bodies) == b"onetwo"
    keys = [object_keys.data("aa01", 7), object_keys.data("bb02", 9)]
    referred = refer(draft, [(keys[0], draft.bodies)])
    assert decode_forwarded(encode_forwarded(referred)).draft == referred
    assert [(chunk.data, chunk.position) for chunk in referred.chunks] == [
        (keys[0], 0),
        (keys[0], 3),
    ]
    referred = refer(draft, [(keys[0], draft.bodies[:1]), (keys[1], draft.bodies[1:])])
    assert decode_forwarded(encode_forwarded(referred)).draft == referred
    assert [(chunk.data, chunk.position) for chunk in referred.chunks] == [
        (keys[0], 0),
        (keys[1], 0),
    ]
    assert not_after_ms(referred) == 7
    mixed = merge([referred._replace(origins=()), draft._replace(origins=())])
    assert [(chunk.data, chunk.position) for chunk in mixed.chunks] == [
        (keys[0], 0),
        (keys[1], 0),
        ("", 0),
        ("", 3),
    ]
    assert mixed.bodies == draft.bodies


def test_a_damaged_draft_is_not_taken() -> None:
    whole = encode_forwarded(draft_of([b"one" * 50, b"two"], "o", 3))
    for index in range(len(whole)):
        flipped = whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :]
        try:
            decoded_draft = decode_forwarded(flipped).draft
        except Corrupt:
            continue
        # Whatever is taken is consistent in itself: its chunks are those of their checksums.
        body = b"".join(decoded_draft.bodies)
        for chunk in decoded_draft.chunks:
            if not chunk.data:
                assert crc32c(body[chunk.position : chunk.position + chunk.size]) == chunk.crc32c
    for end in range(len(whole)):
        with pytest.raises(Corrupt):
            decode_forwarded(whole[:end])
    short = draft_of([b"one"], "o", 1)
    with pytest.raises(Corrupt):
        decode_forwarded(encode_forwarded(short._replace(origins=[DraftId("o", 1, 2)])))


def test_announcements_survive_encoding() -> None:
    told = [EntryAnnouncement(7, b"header", b"body"), EntryAnnouncement(8)]
    assert decode_announcements(encode_announcements(told)) == told
    with pytest.raises(Corrupt):
        decode_announcements(b"\xc1")


# -- origins


def outcomes_of(state: ClusterState, draft: Draft, at_ms: int = 0) -> list[Outcome]:
    seq = state.seq + 1
    decoded = entry_of(draft, seq, previous=state.hash, at_ms=at_ms, level=state.level)
    return state.apply(decoded, object_keys.wal(seq)).outcomes


def state_with_topic(level: int = format_levels.NEWEST) -> ClusterState:
    state = ClusterState("c", level)
    outcomes_of(state, Draft([Commit(b"", [CreateTopic("t", TOPIC, 1, {})])], [], []))
    return state


def test_a_draft_in_two_entries_counts_once_and_whole() -> None:
    state = state_with_topic()
    draft = draft_of([b"a", b"b"], "o", 1)
    assert [outcome.placements[0].base_offset for outcome in outcomes_of(state, draft)] == [0, 1]
    again = outcomes_of(state, merge([draft, draft_of([b"c"], "p", 1), draft_of([b"own"])]))
    assert [(outcome.is_duplicate, len(outcome.placements)) for outcome in again] == [
        (True, 0),
        (True, 0),
        (False, 1),
        (False, 1),
    ]
    assert state.partition("t", 0).high_watermark == 4
    # Twice in one entry, and a number that comes late.
    late = outcomes_of(state, merge([draft_of([b"d"], "o", 3), draft_of([b"d"], "o", 3)]))
    assert [outcome.is_duplicate for outcome in late] == [False, True]
    assert outcomes_of(state, draft_of([b"e"], "o", 2))[0].is_duplicate
    again = ClusterState.decode(state.encode(), "it")  # type: ignore[assignment]
    assert again.encode() == state.encode()  # type: ignore[attr-defined]
    assert outcomes_of(again, draft_of([b"d"], "o", 3))[0].is_duplicate  # type: ignore[arg-type]


def test_level_1_is_encoded_without_origins_where_there_are_none() -> None:
    for level, of_state, of_entry in [(format_levels.FIRST, 9, 8), (format_levels.NEWEST, 20, 10)]:
        assert len(msgspec.msgpack.decode(state_with_topic(level).encode())) == of_state
        header, _ = entries.encode_header(entry_of(draft_of([b"x"]), level=level).entry)
        assert len(msgspec.msgpack.decode(header[16:])) == of_entry
    header, _ = entries.encode_header(
        entry_of(draft_of([b"x"], "o", 1), level=format_levels.FIRST).entry
    )
    assert msgspec.msgpack.decode(header[16:])[8:] == [[["o", 1, 1]]]


def test_origins_are_forgotten_in_the_order_of_their_last_use() -> None:
    origins = AppliedDrafts()

    def see(origin_id: str, number: int, at_ms: int) -> bool:
        return bool(origins.see(entry_of(draft_of([b"x"], origin_id, number)).entry, at_ms))

    assert not see("a", 1, 0)
    assert not see("b", 1, 1)
    assert see("a", 1, 2)
    assert not see("c", 1, 2 + ORIGIN_WINDOW_MS)
    assert [mark.origin_id for mark in origins] == ["a", "c"]
    assert [mark.number for mark in origins] == [1, 1]
    for number in range(ORIGINS_MAX):
        see(f"o{number}", 1, 3 + ORIGIN_WINDOW_MS)
    assert len(list(origins)) == ORIGINS_MAX
    assert not see("a", 1, 3 + ORIGIN_WINDOW_MS)


@pytest.mark.parametrize("counts", [[-1, 1], [5], [10**15, 1], []])
def test_any_entry_that_decodes_can_be_applied(counts: list[int]) -> None:
    state = state_with_topic()
    draft = draft_of([b"x", b"y"])
    draft = draft._replace(origins=[DraftId(f"o{i}", 1, n) for i, n in enumerate(counts)])
    assert [len(outcome.placements) for outcome in outcomes_of(state, draft)] == [1, 1]
    repeated = outcomes_of(state, draft)
    assert [outcome.is_duplicate for outcome in repeated][: sum(max(n, 0) for n in counts)] == [
        True
    ] * min(sum(max(n, 0) for n in counts), 2)
