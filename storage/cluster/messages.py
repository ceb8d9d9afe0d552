"""The bytes of the messages between brokers: forwarded drafts and announcements of entries.

Pure. Decoding untrusted bytes returns a value or raises Corrupt. `decode_forwarded` verifies chunks
before they go into an entry, because an entry is never changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import Commit, Draft, DraftId
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import Chunk
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.core.model import Part
from tidelog.storage.wal.commit_pace import Tick
from tidelog.storage.wal.tail_objects import PART_BYTES

MESSAGE = "message of a peer"
FAR_BYTES_MAX = 20_000
"""Maximum bytes of an announcement to another zone. They cost $0.02 a GB, and a million GETs cost
$0.40."""


class ForwardRefused(LogError):
    """The peer refused the draft, and will not put it into an entry."""


class ForwardOutcomeUnknown(LogError):
    """Outcome unknown: the peer may have put the draft into an entry, or may do so later."""


class ForwardDraft(msgspec.Struct, frozen=True, array_like=True):
    """A draft that a broker forwards to the sequencer. `origin` is its id.

    `wait_ms` is the time for which its entry may wait to begin, or -1 from earlier versions.
    """

    origin: DraftId
    commits: list[Commit]
    chunks: list[Chunk]
    body: bytes
    wait_ms: int = -1


class DecodedForward(NamedTuple):
    """A decoded draft of a peer; `wait_ms` is as in ForwardDraft."""

    draft: Draft
    wait_ms: int


class EntryAnnouncement(msgspec.Struct, frozen=True, array_like=True):
    """An announcement: entry `seq` is in the chain.

    `header` is the object's part before the chunks, `body` is the chunks. Each is empty if it is
    too large to send. No entry has the number 0: with it, `header` is a Notice, or `body` is a
    Beat, or `tick` asks to begin the next entry within `next_ms`, because requests wait behind a
    forwarded draft. Version 0.1 ignores the number 0, and other earlier ones ignore it without a
    header.

    `tick` is the sequencer's pace. Earlier versions neither send it nor look at it.
    """

    seq: int
    header: bytes = b""
    body: bytes = b""
    tick: Tick | None = None

    def to_zone(self, *, is_near: bool) -> "EntryAnnouncement":
        """Return the announcement for a broker of the sender's zone, or of another one.

        Bytes to another zone cost money. Above FAR_BYTES_MAX, a GET of the other zone is cheaper.
        """
        if is_near or len(self.header) + len(self.body) <= FAR_BYTES_MAX:
            return self
        header = self.header if len(self.header) <= FAR_BYTES_MAX else b""
        return EntryAnnouncement(self.seq, header, tick=self.tick)


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """News of the broker `broker_id`, which has joined or is leaving.

    If `is_leaving`, its duties go to other brokers from now on. `has_released`: it serves no member
    of a REST group any more.
    """

    broker_id: str
    is_leaving: bool = False
    has_released: bool = False


class ObjectRange(msgspec.Struct, frozen=True, array_like=True):
    """A question for bytes [start, start + length) of an object of the tails."""

    key: str
    start: int
    length: int


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """The question of a broker to a peer, and the answer to one: what the broker knows.

    `seq` is the number of its newest entry, and `members` a hash of the ids of the live brokers.
    `is_in_doubt`: a live broker does not answer it, or cannot. Then all brokers write heartbeats
    often.
    """

    broker_id: str
    seq: int
    members: bytes
    is_in_doubt: bool


_encoder = msgspec.msgpack.Encoder()
_forwarded_drafts = msgspec.msgpack.Decoder(ForwardDraft)
_announcements = msgspec.msgpack.Decoder(list[EntryAnnouncement])
_notices = msgspec.msgpack.Decoder(Notice)
_object_ranges = msgspec.msgpack.Decoder(ObjectRange)
_beats = msgspec.msgpack.Decoder(Beat)


def encode_forwarded(draft: Draft, wait_ms: int = -1) -> bytes:
    (origin,) = draft.origins
    body = b"".join(draft.bodies)
    return _encoder.encode(ForwardDraft(origin, draft.commits, draft.chunks, body, wait_ms))


def decode_forwarded(message: Part) -> DecodedForward:
    """Decode a forwarded draft and verify its chunks; raises Corrupt."""
    try:
        draft = _forwarded_drafts.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error
    position = 0
    view = memoryview(draft.body)
    for chunk in draft.chunks:
        if chunk.data:
            if object_keys.data_not_after_ms(chunk.data) is None:
                raise Corrupt(MESSAGE, f"refers to {chunk.data!r}, which is no key of an upload")
            continue
        if chunk.position != position or chunk.size < 0:
            raise Corrupt(MESSAGE, "its chunks are not contiguous")
        if crc32c(view[position : position + chunk.size]) != chunk.crc32c:
            raise Corrupt(MESSAGE, "checksum of a chunk differs")
        position += chunk.size
    if position != len(view) or draft.origin.commits != len(draft.commits):
        raise Corrupt(MESSAGE, "its length or number of commits is wrong")
    bodies: list[Part] = [draft.body] if draft.body else []
    decoded = Draft(draft.commits, draft.chunks, bodies, [draft.origin])
    return DecodedForward(decoded, draft.wait_ms)


def encode_announcements(entries: Sequence[EntryAnnouncement]) -> bytes:
    return _encoder.encode(entries)


def decode_announcements(message: Part) -> list[EntryAnnouncement]:
    """Decode announcements of entries; raises Corrupt."""
    try:
        return _announcements.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error


def announced_notice(notice: Notice) -> EntryAnnouncement:
    return EntryAnnouncement(0, _encoder.encode(notice))


def decode_notice(header: Part) -> Notice:
    """Decode the header of an announcement with the number 0; raises Corrupt."""
    try:
        return _notices.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error


def encode_object_range(object_range: ObjectRange) -> bytes:
    return _encoder.encode(object_range)


def decode_object_range(message: Part) -> ObjectRange:
    """Decode a question for a part of an entry or of an upload; raises Corrupt."""
    try:
        object_range = _object_ranges.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error
    if not object_keys.is_tail_object(object_range.key):
        raise Corrupt(
            MESSAGE, f"asks for {object_range.key!r}, which is no key of an entry or upload"
        )
    if not (object_range.start >= 0 and 0 < object_range.length <= PART_BYTES):
        raise Corrupt(
            MESSAGE, f"asks for {object_range.length} bytes at {object_range.start} of an object"
        )
    return object_range


QUESTION = encode_announcements([])
"""Asks whether a peer answers; all versions know it."""


def encode_question(beat: Beat) -> bytes:
    return encode_announcements([EntryAnnouncement(0, b"", encode_beat(beat))])


def encode_beat(beat: Beat) -> bytes:
    return _encoder.encode(beat)


def decode_beat(message: Part) -> Beat:
    """Decode a beat: the answer to a question, or the body of the question; raises Corrupt."""
    try:
        return _beats.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error
