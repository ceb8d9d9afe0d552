"""The bytes of a WAL entry: what goes in comes out, and nothing else ever does (I2, I4)."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import (
    GENESIS,
    HEADER_BYTES_MAX,
    Commit,
    DraftId,
    Entry,
    HotMark,
    IdempotencyKey,
    decode,
    encode_header,
)
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    Append,
    Chunk,
    CreateTopic,
    DeleteTopic,
    RetireHotLog,
    Sealed,
    SetBounds,
)
from tidelog.storage.core.errors import Corrupt, NewerLevel

KEY = object_keys.wal(7)
PREVIOUS = bytes(range(32))

ids = st.text("0123456789abcdef", min_size=32, max_size=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**63 - 1)
stamps = st.integers(-(2**63), 2**63 - 1)
configs = st.dictionaries(texts, texts, max_size=3)

chunks = st.builds(
    Chunk,
    ids,
    counts,
    counts,
    counts,
    st.integers(0, 2**32 - 1),
    counts,
    stamps,
    stamps,
    st.booleans(),
    st.sampled_from(["", "lz4", "zstd"]),
    counts,
    st.one_of(st.just(""), texts),
)
actions = st.one_of(
    st.builds(Append, counts, counts, counts),
    st.builds(CreateTopic, texts, ids, counts, configs),
    st.builds(DeleteTopic, ids),
    st.builds(AlterTopic, ids, st.dictionaries(texts, st.none() | texts, max_size=3)),
    st.builds(AddPartitions, ids, counts),
    st.builds(Sealed, ids, counts, counts),
    st.builds(RetireHotLog, ids),
)
commits = st.builds(
    Commit,
    st.binary(max_size=16),
    st.lists(actions, max_size=4),
    st.none() | st.builds(IdempotencyKey, texts, st.binary(max_size=32), counts),
    st.none() | st.builds(HotMark, ids, counts),
)
entries_of_level_1 = st.builds(
    Entry,
    st.just(format_levels.FIRST),
    st.just(7),
    st.just(PREVIOUS),
    st.binary(max_size=16),
    texts,
    stamps,
    st.lists(chunks, max_size=3),
    st.lists(commits, max_size=4),
    st.lists(st.builds(DraftId, texts, counts, counts), max_size=2),
)
entry_values = entries_of_level_1 | st.builds(
    lambda entry, principals, store_ms: msgspec.structs.replace(
        entry,
        level=format_levels.NEWEST,
        commits=[
            msgspec.structs.replace(commit, principal=principal)
            for commit, principal in zip(entry.commits, principals, strict=False)
        ],
        store_ms=store_ms,
    ),
    entries_of_level_1,
    st.lists(texts, min_size=4, max_size=4),
    counts,
)


def sample() -> Entry:
    chunk = Chunk("ab" * 16, 3, 0, 4, 5, 6, 7, 8, True, "lz4", 9)
    commit = Commit(b"c" * 16, [Append(0, 0, 6)], IdempotencyKey("k", b"f", 2), HotMark("h", 1))
    return Entry(format_levels.NEWEST, 7, PREVIOUS, b"e" * 16, "broker-1", 1234, [chunk], [commit])


def framed(header: bytes) -> bytes:
    return struct.pack("<8sII", entries.MAGIC, len(header), crc32c(header)) + header


def refused(body: bytes, *, seq: int = 7, previous: bytes | None = PREVIOUS) -> str:
    """Why these bytes are Corrupt; the error names the object."""
    with pytest.raises(Corrupt) as caught:
        decode(body, KEY, seq=seq, previous=previous)
    assert caught.value.key == KEY
    assert KEY in str(caught.value)
    return str(caught.value)


def unreadable(body: bytes) -> None:
    """These bytes are Corrupt, or of a level that begins with a higher number."""
    with pytest.raises((Corrupt, NewerLevel)) as caught:
        decode(body, KEY, seq=7, previous=PREVIOUS)
    error = caught.value
    assert isinstance(error, Corrupt | NewerLevel)
    assert error.key == KEY
    if isinstance(error, NewerLevel):
        assert error.level > format_levels.NEWEST


@given(entry_values, st.binary(max_size=50))
@examples(150)
def test_what_goes_in_comes_out(entry: Entry, body: bytes) -> None:
    header, entry_hash = encode_header(entry)
    assert entries.header_length(header[:16], KEY) == len(header)
    decoded = decode(header + body, KEY, seq=7, previous=PREVIOUS)
    assert decoded == (entry, entry_hash, len(header))
    assert len(entry_hash) == len(GENESIS)
    # Equal entries give equal bytes, so a PUT can be repeated.
    assert encode_header(decoded.entry) == (header, entry_hash)


def test_any_kind_of_bytes_may_be_decoded() -> None:
    header, _ = encode_header(sample())
    for kind in (bytes, bytearray, memoryview):
        assert decode(kind(header), KEY, seq=7, previous=None).entry == sample()


def test_every_truncation_is_corrupt() -> None:
    header, _ = encode_header(sample())
    for length in range(len(header)):
        refused(header[:length])


def test_every_flipped_bit_is_corrupt() -> None:
    header, _ = encode_header(sample())
    for position in range(len(header)):
        for bit in range(8):
            damaged = bytearray(header)
            damaged[position] ^= 1 << bit
            refused(bytes(damaged))
            refused(bytes(damaged) + bytes(300))  # a longer header than there was may now fit


@given(st.binary(max_size=200))
@examples(300)
def test_noise_is_corrupt(noise: bytes) -> None:
    refused(noise)
    refused(entries.MAGIC + noise)
    unreadable(framed(noise))  # even when the checksum holds


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | texts,
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=12,
    )
)
@examples(300)
def test_other_messages_are_corrupt(value: object) -> None:
    unreadable(framed(msgspec.msgpack.encode(value)))


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_a_deep_message_is_corrupt(depth: int) -> None:
    refused(framed(b"\x91" * depth))
    # Where any value is taken, as the configs of a topic are not.
    refused(framed(b"\x98" + b"\x91" * depth))


@pytest.mark.parametrize("length", [HEADER_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_i10_a_huge_length_is_refused_before_anything_is_read(length: int) -> None:
    start = struct.pack("<8sII", entries.MAGIC, length, 0)
    with pytest.raises(Corrupt, match="over the limit"):
        entries.header_length(start, KEY)
    assert "over the limit" in refused(start)


def test_the_longest_header_is_no_error_yet() -> None:
    start = struct.pack("<8sII", entries.MAGIC, HEADER_BYTES_MAX, 0)
    assert entries.header_length(start, KEY) == 16 + HEADER_BYTES_MAX
    assert "inside its header" in refused(start)


def test_i10_unreadable_entry_is_never_written() -> None:
    commit = Commit(bytes(HEADER_BYTES_MAX), [])
    entry = Entry(format_levels.NEWEST, 7, PREVIOUS, b"", "b", 0, [], [commit])
    with pytest.raises(AssertionError):
        encode_header(entry)


@pytest.mark.parametrize("seq", [0, 6, 8, 2**40])
def test_i2_an_entry_under_another_number_is_corrupt(seq: int) -> None:
    header, _ = encode_header(sample())
    assert f"expected {seq}" in refused(header, seq=seq)


def test_i2_an_entry_that_does_not_name_the_one_before_it_is_corrupt() -> None:
    header, _ = encode_header(sample())
    assert "chain is broken" in refused(header, previous=GENESIS)
    assert decode(header, KEY, seq=7, previous=None).entry.previous == PREVIOUS


@pytest.mark.parametrize("level", [0, -1])
def test_a_level_before_the_first_is_corrupt(level: int) -> None:
    header, _ = encode_header(msgspec.structs.replace(sample(), level=level))
    assert f"it has level {level} of the format; the first is 1" in refused(header)


@pytest.mark.parametrize("level", [format_levels.NEWEST + 1, 127, 128, 255, 2**40])
@pytest.mark.parametrize("later_elements", [None, [], [{"all": "new"}, [[[]]], 1.5], [None] * 99])
def test_a_newer_level_is_not_damage(level: int, later_elements: list[object] | None) -> None:
    """Whatever follows the first element."""
    raw = msgspec.to_builtins(sample(), builtin_types=[bytes])
    header = msgspec.msgpack.encode(
        [level, *(raw[1:] if later_elements is None else later_elements)]
    )
    with pytest.raises(NewerLevel) as caught:
        decode(framed(header), KEY, seq=7, previous=PREVIOUS)
    assert str(caught.value) == (
        f"object {KEY} has level {level} of the format, "
        f"this version reads up to {format_levels.NEWEST}: it needs a newer tidelog"
    )


def test_level_1_has_the_elements_of_version_0_1() -> None:
    principal = msgspec.structs.replace(sample().commits[0], principal="User:alice")
    newest = msgspec.structs.replace(sample(), commits=[principal], store_ms=77)
    first = msgspec.structs.replace(newest, level=format_levels.FIRST)
    raw = msgspec.msgpack.decode(encode_header(first)[0][16:])
    assert (raw[0], len(raw), len(raw[7][0])) == (1, 8, 4)
    with_origins = msgspec.structs.replace(first, origins=[DraftId("o", 1, 1)])
    assert msgspec.msgpack.decode(encode_header(with_origins)[0][16:])[8:] == [[["o", 1, 1]]]
    raw = msgspec.msgpack.decode(encode_header(newest)[0][16:])
    assert (raw[0], raw[7][0][4], raw[8:]) == (format_levels.NEWEST, "User:alice", [[], 77])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_level_2_added_is_corrupt_at_level_1(number: int) -> None:
    principal = msgspec.structs.replace(sample().commits[0], principal="User:alice")
    newest = [
        msgspec.structs.replace(sample(), commits=[principal]),
        msgspec.structs.replace(sample(), store_ms=77),
        msgspec.structs.replace(sample(), commits=[Commit(b"", [SetBounds(1)])]),
    ]
    raw = msgspec.msgpack.decode(encode_header(newest[number])[0][16:])
    raw[0] = format_levels.FIRST
    why = refused(framed(msgspec.msgpack.encode(raw)))
    assert "what level 1 of the format does not have" in why


@pytest.mark.parametrize("level", [format_levels.FIRST, format_levels.NEWEST])
@pytest.mark.parametrize(
    "path", [(), (6, 0), (7, 0), (7, 0, 1, 0), (7, 0, 2), (7, 0, 3), (8, 0)], ids=str
)
def test_unknown_element_is_corrupt(level: int, path: tuple[int, ...]) -> None:
    entry = msgspec.structs.replace(
        sample(), level=format_levels.NEWEST, origins=[DraftId("o", 1, 1)]
    )
    raw = msgspec.msgpack.decode(encode_header(entry)[0][16:])
    raw[0] = level
    part = raw
    for index in path:
        part = part[index]
    part.append("from the future")
    assert "does not decode" in refused(framed(msgspec.msgpack.encode(raw)))


def test_the_hash_covers_every_field_and_chunks_by_their_checksums() -> None:
    hashes = {encode_header(sample())[1]}
    chunk = sample().chunks[0]
    changed_entries = [
        msgspec.structs.replace(sample(), seq=8),
        msgspec.structs.replace(sample(), previous=GENESIS),
        msgspec.structs.replace(sample(), entry_id=b"other"),
        msgspec.structs.replace(sample(), writer="other"),
        msgspec.structs.replace(sample(), at_ms=1235),
        msgspec.structs.replace(sample(), chunks=[msgspec.structs.replace(chunk, crc32c=6)]),
        msgspec.structs.replace(sample(), commits=[]),
        msgspec.structs.replace(sample(), level=format_levels.FIRST),
        msgspec.structs.replace(sample(), origins=[DraftId("o", 1, 1)]),
        msgspec.structs.replace(sample(), store_ms=1),
        msgspec.structs.replace(
            sample(), commits=[msgspec.structs.replace(sample().commits[0], principal="User:a")]
        ),
    ]
    hashes |= {encode_header(entry)[1] for entry in changed_entries}
    assert len(hashes) == 1 + len(changed_entries)


def test_an_unknown_action_is_corrupt_and_not_passed_over() -> None:
    header, _ = encode_header(sample())
    raw = msgspec.msgpack.decode(header[16:])
    raw[7][0][1][0][0] = "from the future"
    assert "does not decode" in refused(framed(msgspec.msgpack.encode(raw)))
