"""The bytes of a WAL entry, and the actions it may carry (FORMAT.md section 3).

    magic "TIDEWAL1" | u32 header length | u32 CRC-32C of the header | header | chunks ...

The header (MessagePack) names the entry before it by hash, every chunk by position and checksum,
and every commit; `entry_hash` is the hash of the header alone, and covers the chunks through their
checksums, so that a follower verifies the chain without reading records. Pure: bytes in, values
out; whatever comes in from outside leaves as a value or as Corrupt.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from storage.acls import Acl
from storage.assignors import Owned
from storage.chunk import crc32c
from storage.errors import Corrupt
from storage.objectstore import Part

MAGIC = b"TIDEWAL1"
FORMAT = 1
GENESIS = bytes(32)
"""What the first entry names as the one before it."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
"""An entry's header is refused above this (I10): ~500,000 commits."""

_PREFIX = struct.Struct("<8sII")


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of one partition in one closed hot segment.

    `data` is empty when the chunk lies in this entry, and then `position` counts from the end of
    the header; else it is the key of the object that holds it. Timestamps are ms.
    `is_json`: every key and value is known to be JSON text, so that a reader need not check.
    """

    topic_id: str
    partition: int
    position: int
    size: int
    crc32c: int
    rows: int
    timestamp_min: int
    timestamp_max: int
    is_json: bool
    codec: str
    raw_size: int
    data: str = ""


class Action(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """Something that `apply` does. Decided by kind; unknown kinds do not decode."""


class Append(Action, frozen=True, array_like=True, tag="append", gc=False):
    """Rows [first_row, first_row + count) of the entry's chunk number `chunk`."""

    chunk: int
    first_row: int
    count: int


class ProducerBatch(NamedTuple):
    """How a Kafka producer names a batch: its records have the sequences from this one on."""

    producer_id: int
    epoch: int
    base_sequence: int


class ProducerAppend(Append, frozen=True, array_like=True, tag="append-of-producer", gc=False):
    """An append of a Kafka producer's batch (ProducerBatch): done once, in order.

    A kind of its own, so that the many appends of everybody else do not carry three empty fields.
    """

    producer_id: int
    epoch: int
    base_sequence: int


class InitProducer(Action, frozen=True, array_like=True, tag="init-producer", gc=False):
    """A new producer id (`producer_id` -1), or the next epoch of a known one; `epoch`, unless -1,
    is the one that the producer believes to have. A commit of its own."""

    producer_id: int = -1
    epoch: int = -1


class GroupOffset(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a group goes on reading a partition. `leader_epoch` is kept for Kafka's clients."""

    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class CommitOffsets(Action, frozen=True, array_like=True, tag="commit-offsets", gc=False):
    """The group has come so far. `generation` -1 is a committer that shares no partitions with
    others: no member, or one that was assigned by hand."""

    group_id: str
    generation: int
    offsets: list[GroupOffset]
    member_id: str = ""


class MemberConfig(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an instance was created with. The log itself acts on none of it: it is kept so that any
    broker serves the instance alike. `format` and `dialect` are words of the service; `principal`
    is who made it, where that is asked."""

    format: str = "binary"
    auto_offset_reset: str = "latest"
    auto_commit: bool = True
    fetch_min_bytes: int = -1
    request_timeout_ms: int = 1000
    session_timeout_ms: int = 300_000
    max_poll_interval_ms: int = 300_000
    dialect: str = ""
    client_id: str = ""
    principal: str = ""


class JoinGroup(Action, frozen=True, array_like=True, tag="join-group", gc=False):
    """A new member, which reads nothing yet. One with the `instance_id` of another takes its place.
    `assignor` is that of a group without members; empty: as it is."""

    group_id: str
    member_id: str
    coordinator: str
    config: MemberConfig
    instance_id: str = ""
    assignor: str = ""


class LeaveGroup(Action, frozen=True, array_like=True, tag="leave-group", gc=False):
    """The member is gone."""

    group_id: str
    member_id: str


class ExpireMember(Action, frozen=True, array_like=True, tag="expire-member", gc=False):
    """Nothing was heard of the member for a whole session. `term` is that of the coordinator which
    says so: refused unless nobody has heard the group's members since."""

    group_id: str
    member_id: str
    term: int


class TakeGroup(Action, frozen=True, array_like=True, tag="take-group", gc=False):
    """From now on this broker hears the group's members: a new term."""

    group_id: str
    coordinator: str


class Subscribe(Action, frozen=True, array_like=True, tag="subscribe", gc=False):
    """The member shares these topics' partitions with the others. `pattern`, if any, is what the
    names were found by: `apply` does not look at it. Neither: the member reads nothing."""

    group_id: str
    member_id: str
    topics: list[str]
    pattern: str = ""


class AssignByHand(Action, frozen=True, array_like=True, tag="assign-by-hand", gc=False):
    """The member reads these, whoever else does."""

    group_id: str
    member_id: str
    partitions: list[Owned]


class Sought(NamedTuple):
    """Where a member reads on, whatever was committed."""

    topic_id: str
    partition: int
    offset: int


class Seek(Action, frozen=True, array_like=True, tag="seek", gc=False):
    """The member goes on there: holds until it commits, or loses the partition."""

    group_id: str
    member_id: str
    positions: list[Sought]


class DeleteGroup(Action, frozen=True, array_like=True, tag="delete-group", gc=False):
    """The group and all that it committed is gone; refused while it has members."""

    group_id: str


GroupAction = (
    JoinGroup
    | LeaveGroup
    | ExpireMember
    | TakeGroup
    | Subscribe
    | AssignByHand
    | Seek
    | DeleteGroup
)


class CreateTopic(Action, frozen=True, array_like=True, tag="create-topic", gc=False):
    """Refused when the name is taken. The id makes a later topic of that name another topic."""

    name: str
    topic_id: str
    partitions: int
    configs: dict[str, str]


class DeleteTopic(Action, frozen=True, array_like=True, tag="delete-topic", gc=False):
    """The topic is gone for readers and writers; its objects are collected later."""

    topic_id: str


class AlterTopic(Action, frozen=True, array_like=True, tag="alter-topic", gc=False):
    """Set configs (value) or return them to their defaults (None)."""

    topic_id: str
    configs: dict[str, str | None]


class AddPartitions(Action, frozen=True, array_like=True, tag="add-partitions", gc=False):
    """Grow to `partitions`; refused when that is no growth."""

    topic_id: str
    partitions: int


class Sealed(Action, frozen=True, array_like=True, tag="sealed", gc=False):
    """The partition's table holds everything below `end_offset`: trim the tail."""

    topic_id: str
    partition: int
    end_offset: int


class RetireHotLog(Action, frozen=True, array_like=True, tag="retire-hot-log", gc=False):
    """The hot log's file is gone for good: its mark need not be remembered."""

    log_id: str


class MoveLogStart(Action, frozen=True, array_like=True, tag="log-start", gc=False):
    """Records below `offset` are gone for readers; their bytes are collected later."""

    topic_id: str
    partition: int
    offset: int


class ForgetTopic(Action, frozen=True, array_like=True, tag="forget-topic", gc=False):
    """Nothing is left of a deleted topic's objects: its tombstone need not be remembered."""

    topic_id: str


class CreateKey(Action, frozen=True, array_like=True, tag="create-key", gc=False):
    """From now on, or until then, who shows the secret with this SHA-256 is the principal."""

    key_id: str
    principal: str
    digest: bytes
    expires_ms: int = 0
    note: str = ""


class DeleteKey(Action, frozen=True, array_like=True, tag="delete-key", gc=False):
    """The secret is nobody's any more; repeated: nothing."""

    key_id: str


class CreateAcls(Action, frozen=True, array_like=True, tag="create-acls", gc=False):
    """These bindings hold; those that did already, still."""

    acls: list[Acl]


class DeleteAcls(Action, frozen=True, array_like=True, tag="delete-acls", gc=False):
    """Exactly these bindings hold no more."""

    acls: list[Acl]


class SetQuotas(Action, frozen=True, array_like=True, tag="set-quotas", gc=False):
    """Bytes a second by the quota's name, or None: none of its own. Others stay as they are."""

    principal: str
    rates: dict[str, int | None]


AccessAction = CreateKey | DeleteKey | CreateAcls | DeleteAcls | SetQuotas


AnyAction = (
    Append
    | ProducerAppend
    | InitProducer
    | CommitOffsets
    | CreateTopic
    | DeleteTopic
    | AlterTopic
    | AddPartitions
    | Sealed
    | RetireHotLog
    | MoveLogStart
    | ForgetTopic
    | GroupAction
    | AccessAction
)


class IdempotencyKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's key, the hash of what it asked for, and how many partitions its topic had: a
    retry must be parted as the first was, or its records could not be told apart in the answer.
    A request that may span topics has a list, in the order in which it names them."""

    key: str
    fingerprint: bytes
    partitions: int | list[int] = 0


class HotMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """This commit is number `seq` of a broker's local hot log (acks=1): applied at most once."""

    log_id: str
    seq: int


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The unit of atomicity (I4): all actions or a recorded refusal."""

    commit_id: bytes
    actions: list[AnyAction]
    key: IdempotencyKey | None = None
    hot: HotMark | None = None


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next `commits` of the entry are draft `number` of a broker that handed it over: applied
    at most once, whoever else puts the same draft into an entry."""

    origin_id: str
    number: int
    commits: int


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of a WAL object: everything but the records. `at_ms` is the writer's clock.

    `origins` says whose the commits are, from the first on; those after the last are the writer's.
    """

    format: int
    seq: int
    previous: bytes
    entry_id: bytes
    writer: str
    at_ms: int
    chunks: list[Chunk]
    commits: list[Commit]
    origins: list[Origin] = []


class Draft(NamedTuple):
    """What a broker wants in the next entry. `chunks` positions are relative to each other;
    `origins` is as in Entry."""

    commits: list[Commit]
    chunks: list[Chunk]
    bodies: list[Part]
    origins: Sequence[Origin] = ()


class Decoded(NamedTuple):
    """An entry read back: its header, its hash, and where its chunks begin in the object."""

    entry: Entry
    hash: bytes
    body_start: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def encode_header(entry: Entry) -> tuple[bytes, bytes]:
    """The bytes before the chunks, and the entry's hash."""
    values = msgspec.structs.astuple(entry)
    header = _encoder.encode(values if entry.origins else values[:-1])
    assert len(header) <= HEADER_BYTES_MAX, "nobody would read it: the chain would end here"
    return _PREFIX.pack(MAGIC, len(header), crc32c(header)) + header, _hash(header)


def header_length(start: Part, key: str) -> int:
    """How many bytes of the object come before its chunks; `start` is at least its first 16."""
    if len(start) < _PREFIX.size:
        raise Corrupt(key, f"only {len(start)} bytes, shorter than any entry")
    magic, length, _ = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise Corrupt(key, "does not begin as a WAL entry")
    if length > HEADER_BYTES_MAX:
        raise Corrupt(key, f"header of {length} bytes is over the limit of {HEADER_BYTES_MAX}")
    return _PREFIX.size + int(length)


def decode(start: Part, key: str, *, seq: int, previous: bytes | None) -> Decoded:
    """The entry whose header lies in `start`; `previous` is checked unless None.

    Raises Corrupt when it does not verify, is of another format, number or chain.
    """
    end = header_length(start, key)
    header = bytes(memoryview(start)[_PREFIX.size : end])
    if _PREFIX.size + len(header) < end:
        raise Corrupt(key, f"ends after {len(start)} bytes, inside its header")
    if crc32c(header) != _PREFIX.unpack_from(start)[2]:
        raise Corrupt(key, "checksum of the header differs")
    try:
        entry = _decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(key, f"header does not decode: {error}") from error
    if entry.format != FORMAT:
        raise Corrupt(key, f"format {entry.format} is newer than this version reads ({FORMAT})")
    if entry.seq != seq:
        raise Corrupt(key, f"says it is entry {entry.seq}, expected {seq}")
    if previous is not None and entry.previous != previous:
        raise Corrupt(key, "does not name the entry before it: the chain is broken")
    return Decoded(entry, _hash(header), end)


def shares(entry: Entry) -> Iterator[tuple[Origin, range]]:
    """Each origin, and the numbers of its commits in the entry."""
    first = 0
    for origin in entry.origins:
        last = min(first + max(origin.commits, 0), len(entry.commits))
        yield origin, range(first, last)
        first = last


def _hash(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=32).digest()
