"""WAL entries: the types of commits and drafts, and the bytes of an entry (FORMAT.md section 3).

    magic "TIDEWAL1" | u32 header length | u32 CRC-32C of the header | header | chunks ...
    from level 2 on: the bytes before the chunks again | u32 their length | magic "TIDEWAL2"

The header (MessagePack) contains the hash of the previous entry, the position and checksum of
every chunk, and every commit. The hash of an entry is the hash of its header, which contains the
chunks' checksums. So a broker verifies the chain without reading records. Pure: bytes in, values
out.
From untrusted bytes, the decoders return a value, or raise Corrupt or NewerLevel.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import (
    KAFKA_CODEC,
    AnyAction,
    Chunk,
    FourthLevelAction,
    SecondLevelAction,
)
from tidelog.storage.core.errors import Corrupt, InvalidRequest
from tidelog.storage.core.model import SKEW_MS_MAX, Part

MAGIC = b"TIDEWAL1"
COPY_MAGIC = b"TIDEWAL2"
"""At the end of an entry that has a copy of its header behind the chunks."""
GENESIS = bytes(32)
"""The previous hash in the first entry."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
"""Readers refuse a larger header (I10). A header of this size has ~500,000 commits."""


def draft_header_bytes_max() -> int:
    """Return the bound of `Draft.header_bytes`.

    It is half of the header's bound, because the numbers and positions of chunks take more bytes in
    an entry of several drafts than in each draft.
    """
    return HEADER_BYTES_MAX // 2


_PREFIX = struct.Struct("<8sII")
_END = struct.Struct("<I8s")


class IdempotencyKey(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """The Idempotency-Key of a request, the hash of its content, and the topic's `partitions`.

    `partitions` is their number at the first attempt. A broker partitions a retry with that number,
    because the offsets of the first attempt are in partitions chosen by that number. For several
    topics, it is a list, in the request's order.
    """

    key: str
    fingerprint: bytes
    partitions: int | list[int] = 0


class HotMark(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The number of a commit in a broker's hot log (acks=1). `apply` accepts each number once."""

    log_id: str
    seq: int


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The unit of atomicity (I4): `apply` applies all actions, or records a refusal.

    `principal` is the client that requested the commit, if authentication is on. Level 1 does not
    store it.
    """

    commit_id: bytes
    actions: list[AnyAction]
    key: IdempotencyKey | None = None
    hot: HotMark | None = None
    principal: str = ""


class DraftId(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The id of a forwarded draft: broker `origin_id` gave it the number `number`.

    `commits` is the number of its commits in the entry. `apply` applies a draft at most once, even
    if two brokers put it into entries.
    """

    origin_id: str
    number: int
    commits: int


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The header of a WAL object: everything except the records. `at_ms` is the writer's clock.

    `origins` are the forwarded drafts. Their commits come first, in the same order; the commits of
    the writer's own drafts follow. `store_ms` is the newest time of the store's clock that the
    writer knows, or 0 if it knows none; level 1 does not store it. If `level` is one above the
    cluster's level, the entry raises the cluster's level.
    """

    level: int
    seq: int
    previous: bytes
    entry_id: bytes
    writer: str
    at_ms: int
    chunks: list[Chunk]
    commits: list[Commit]
    origins: list[DraftId] = []
    store_ms: int = 0

    @property
    def time_ms(self) -> int:
        """Return the time of the writer's clock, moved to within SKEW_MS_MAX of the store's."""
        if not self.store_ms:
            return self.at_ms
        return min(max(self.at_ms, self.store_ms - SKEW_MS_MAX), self.store_ms + SKEW_MS_MAX)


class Draft(NamedTuple):
    """The content that a broker proposes for the next entry.

    The positions of `chunks` count from the first body; `origins` has the same meaning as in Entry.
    If the entry raises the cluster's level, `level` is the next level; else it is 0. `header_bytes`
    is an upper bound of the bytes that the draft takes in the header, or 0 if the draft has only a
    few actions.
    """

    commits: list[Commit]
    chunks: list[Chunk]
    bodies: list[Part]
    origins: Sequence[DraftId] = ()
    level: int = 0
    header_bytes: int = 0


class DecodedEntry(NamedTuple):
    """A decoded entry: its header, its hash, and the position of the first chunk in the object."""

    entry: Entry
    hash: bytes
    body_start: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def encode_header(entry: Entry) -> tuple[bytes, bytes]:
    """Return the bytes before the chunks, and the entry's hash.

    Raises InvalidRequest if the entry has an action that its level does not have, because no
    process could read the entry.
    """
    if entry.level < format_levels.KAFKA and has_kafka_part(entry):
        raise InvalidRequest("the format has this action, or record batches, from level 4 on")
    header = _encoder.encode(entry if entry.level > format_levels.FIRST else _first_level(entry))
    assert len(header) <= HEADER_BYTES_MAX, "readers refuse a header of this size"
    return _PREFIX.pack(MAGIC, len(header), crc32c(header)) + header, _hash(header)


def copy_of(entry: Entry, header: bytes) -> list[Part]:
    """Return the bytes that follow the chunks.

    From level 2 on, this is a copy of `header`, the bytes before the chunks. Without this copy, one
    damaged header would end the chain for all readers.
    """
    if entry.level == format_levels.FIRST:
        return []
    return [header, _END.pack(len(header), COPY_MAGIC)]


def copy_in(body: Part) -> bytes | None:
    """Return the copy of the bytes before the chunks.

    `body` is a whole object, and the copy is at its end. Does not verify the copy. Returns None if
    the object has no copy.
    """
    position = len(body) - _END.size
    if position < 0:
        return None
    length, magic = _END.unpack_from(body, position)
    return (
        bytes(memoryview(body)[position - length : position])
        if magic == COPY_MAGIC and length <= position
        else None
    )


def header_length(start: Part, key: str) -> int:
    """Return the number of bytes before the chunks.

    `start` is the beginning of an entry's object, at least 16 bytes. Raises Corrupt.
    """
    if len(start) < _PREFIX.size:
        raise Corrupt(key, f"it has {len(start)} bytes, too few for an entry")
    magic, length, _ = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise Corrupt(key, "it does not begin with the magic of a WAL entry")
    if length > HEADER_BYTES_MAX:
        raise Corrupt(key, f"its header has {length} bytes, over the limit of {HEADER_BYTES_MAX}")
    return _PREFIX.size + int(length)


def decode(start: Part, key: str, *, seq: int, previous: bytes | None) -> DecodedEntry:
    """Decode the entry whose header is in `start`.

    If `previous` is None, do not check the hash of the previous entry.

    Raises Corrupt if the header does not verify, or has another number or previous hash. Raises
    NewerLevel if this version does not know the entry's level.
    """
    end = header_length(start, key)
    header = bytes(memoryview(start)[_PREFIX.size : end])
    if _PREFIX.size + len(header) < end:
        raise Corrupt(key, f"it ends after {len(start)} bytes, inside its header")
    if crc32c(header) != _PREFIX.unpack_from(start)[2]:
        raise Corrupt(key, "checksum of the header differs")
    format_levels.leading(header, key)
    try:
        entry = _decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(key, f"its header does not decode: {error}") from error
    if entry.level == format_levels.FIRST and _exceeds_first_level(entry):
        raise Corrupt(key, "its header has what level 1 of the format does not have")
    if entry.level < format_levels.KAFKA and has_kafka_part(entry):
        raise Corrupt(key, "its header has what the format has from level 4 on")
    if entry.seq != seq:
        raise Corrupt(key, f"its number is {entry.seq}, expected {seq}")
    if previous is not None and entry.previous != previous:
        raise Corrupt(key, "it does not name the entry before it: the chain is broken")
    return DecodedEntry(entry, _hash(header), end)


def shares(entry: Entry) -> Iterator[tuple[DraftId, range]]:
    """Yield each draft id, and the indexes of the draft's commits in the entry."""
    first = 0
    for origin in entry.origins:
        last = min(first + max(origin.commits, 0), len(entry.commits))
        yield origin, range(first, last)
        first = last


def _first_level(entry: Entry) -> list[object]:
    """Return the elements that level 1 has.

    These are without principals and store time, and with `origins` only if it is not empty.
    """
    if _has_action(entry, SecondLevelAction):
        raise InvalidRequest("level 1 of the format has no such action: run `tidelog upgrade`")
    commits = [(it.commit_id, it.actions, it.key, it.hot) for it in entry.commits]
    elements = [
        entry.level,
        entry.seq,
        entry.previous,
        entry.entry_id,
        entry.writer,
        entry.at_ms,
        entry.chunks,
        commits,
    ]
    return [*elements, entry.origins] if entry.origins else elements


def _exceeds_first_level(entry: Entry) -> bool:
    has_more = bool(entry.store_ms) or any(commit.principal for commit in entry.commits)
    return has_more or _has_action(entry, SecondLevelAction)


def _has_action(entry: Entry | Draft, kinds: Any) -> bool:
    return any(isinstance(action, kinds) for commit in entry.commits for action in commit.actions)


def has_kafka_part(entry: Entry | Draft) -> bool:
    """Return whether the entry has record batches, or an action, that only level 4 has."""
    has_batches = any(chunk.codec == KAFKA_CODEC for chunk in entry.chunks)
    return has_batches or _has_action(entry, FourthLevelAction)


def _hash(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=32).digest()
