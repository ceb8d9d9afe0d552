"""Decoders of storage/, each with bytes as they are, and with their checksums made right.

They are of entries, checkpoints, chunks, segments, hot logs, tables and messages of peers.
Everything in the store has a checksum, and behind it a decoder that verifies its input all the
same.
"""

import functools
import os
import struct
import tempfile
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tests.golden.make import (
    CLUSTER_ID,
    HERE,
    HOT,
    folder_of,
    large_rows,
    rows_of_flights,
    rows_of_json,
)
from tests.tools.fuzz.target import Target, u32
from tidelog.storage.cluster import messages
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import EntryAnnouncement, ForwardDraft
from tidelog.storage.codec import checksum, record_columns
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import DecodedEntry, Entry
from tidelog.storage.core import actions, format_levels, object_keys
from tidelog.storage.core.actions import Chunk
from tidelog.storage.core.errors import Corrupt, NewerLevel, StoreUnfit
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables import delta_json, manifest
from tidelog.storage.tables.manifest import ManifestVersion
from tidelog.storage.wal import wal_objects
from tidelog.storage.wal.announced import AnnouncedEntries
from tidelog.storage.wal.merged_drafts import merge
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.write import hot_log_file

KEY = "the/object"
PREFIX_BYTES = 16
SEQ = 7


def _files(pattern: str) -> list[bytes]:
    """Of every level."""
    return [path.read_bytes() for path in sorted(HERE.glob(f"*/{pattern}")) if path.is_file()]


# -- entries


def _entries() -> list[bytes]:
    return [*_files("wal/*"), *map(_entry_bytes, _groups_and_producers())]


def _entry_bytes(entry: Entry) -> bytes:
    return entries.encode_header(entry)[0]


def _groups_and_producers() -> list[Entry]:
    """Entries with what the golden ones lack: members, offsets, producers, origins."""
    flights = _golden_state().topic("flights").topic_id
    config = actions.MemberConfig()
    kinds: list[list[actions.AnyAction]] = [
        [actions.JoinGroup("g", "m", "b", config, "i", "range"), actions.TakeGroup("g", "c")],
        [actions.Subscribe("g", "m", ["flights"], "f.*")],
        [actions.CommitOffsets("g", 1, [actions.GroupOffset(flights, 0, 3, 0, "x")], "m")],
        [actions.AssignByHand("h", "n", [TopicIdPartition(flights, 1)])],
        [actions.Seek("g", "m", [actions.SeekPosition(flights, 0, 1)])],
        [actions.ExpireMember("g", "m", 1), actions.LeaveGroup("g", "m")],
        [actions.DeleteGroup("h"), actions.MoveLogStart(flights, 0, 2)],
        [actions.InitProducer()],
        [actions.ProducerAppend(0, 0, 2, 0, 0, 0), actions.Append(0, 2, 1)],
        [actions.ForgetTopic("c" * 32)],
        [actions.TakeHold("h", 9), actions.RenewHold("h", 9), actions.ReleaseHold("h")],
    ]
    commits = [
        entries.Commit(bytes([number]) * 16, actions, entries.IdempotencyKey(f"k{number}", b"f"))
        for number, actions in enumerate(kinds)
    ]
    body = chunks.encode(record_columns.batch_of_rows([rows_of_json("1", "2", "3")]))
    chunk = Chunk(flights, 1, 0, body.body.nbytes, body.crc32c, 3, 1, 3, True, "", body.raw_size)
    origins = [entries.DraftId("o1", 1, 2), entries.DraftId("o2", 9, 1)]
    head = (format_levels.NEWEST, SEQ, entries.GENESIS, bytes(16), "b", 1_700_000_000_000, [chunk])
    return [
        Entry(*head, commits, origins),
        Entry(*head, commits[:3]),
        Entry(*head, commits[7:9]),
    ]


@functools.cache
def _golden_checkpoint() -> bytes:
    (path,) = folder_of(format_levels.NEWEST).glob("checkpoints/*")
    return path.read_bytes()


def _golden_state() -> ClusterState:
    return wal_objects.decode_checkpoint(_golden_checkpoint(), KEY, CLUSTER_ID)


@functools.cache
def _busy_checkpoint() -> bytes:
    """Of a cluster in which everything was used."""
    state = _golden_state()
    for entry in _groups_and_producers():
        _apply(state, entry)
    return state.encode()


def check_entry(data: bytes) -> None:
    """A header survives; and no entry that decodes can break `apply`.

    That would end the cluster: every broker would fail at that entry after each start.
    """
    header = data[PREFIX_BYTES:]
    seq = _seq_of(header)
    right = entries.MAGIC + u32(len(header)) + u32(checksum.crc32c(header)) + header
    for body in (data, right):
        try:
            decoded = entries.decode(body, KEY, seq=seq, previous=None)
        except (Corrupt, NewerLevel):
            continue
        again = entries.decode(_entry_bytes(decoded.entry), KEY, seq=seq, previous=None)
        assert again.entry == decoded.entry
        state = ClusterState.decode(_busy_checkpoint(), KEY)
        _apply(state, decoded.entry)
        _check_state(state)


def _seq_of(header: bytes) -> int:
    try:
        return msgspec.msgpack.decode(header, type=tuple[int, int, object], strict=True)[1]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SEQ


def _apply(state: ClusterState, entry: Entry) -> None:
    """Fold it in as the next one of this chain, at its level."""
    fitting = msgspec.structs.replace(
        entry, level=state.level, seq=state.seq + 1, previous=state.hash
    )
    decoded = DecodedEntry(fitting, bytes(32), PREFIX_BYTES)
    outcomes = state.apply(decoded, object_keys.wal(fitting.seq)).outcomes
    assert len(outcomes) == len(entry.commits)


def _check_state(state: ClusterState) -> None:
    encoded = state.encode()
    assert ClusterState.decode(encoded, KEY).encode() == encoded


# -- checkpoints


def _checkpoints() -> list[bytes]:
    busy = _busy_checkpoint()
    head = wal_objects.CHECKPOINT_MAGIC + u32(checksum.crc32c(busy))
    return [*_files("checkpoints/*"), head + busy]


def check_checkpoint(data: bytes) -> None:
    payload = data[12:]
    right = wal_objects.CHECKPOINT_MAGIC + u32(checksum.crc32c(payload)) + payload
    for body in (data, right):
        try:
            state = wal_objects.decode_checkpoint(body, KEY, CLUSTER_ID)
        except (Corrupt, NewerLevel):
            continue
        _check_state(state)


# -- chunks: what an entry says of one, then its bytes

_SAID = struct.Struct("<BIi")
_CODECS = ("", "lz4", "zstd", "brotli")


def _chunks() -> list[bytes]:
    bodies = []
    for rows, codec in (
        (rows_of_flights(), ""),
        (rows_of_json("1"), ""),
        (large_rows(), "lz4"),
        (large_rows(), "zstd"),
    ):
        encoded_chunk = chunks.encode(record_columns.batch_of_rows([rows]), codec)
        header = _SAID.pack(
            _CODECS.index(encoded_chunk.codec), encoded_chunk.rows, encoded_chunk.raw_size
        )
        bodies.append(header + bytes(encoded_chunk.body))
    return bodies


def check_chunk(data: bytes) -> None:
    if len(data) < _SAID.size:
        return
    codec, rows, raw_size = _SAID.unpack_from(data)
    body = data[_SAID.size :]
    crc = checksum.crc32c(body)
    if body:
        attributes = {"rows": rows, "codec": "", "raw_size": len(body), "key": KEY}
        _expect_corrupt(lambda: chunks.decode(body, crc=crc ^ 1, **attributes))
    try:
        batch = chunks.decode(
            body, crc=crc, rows=rows, codec=_CODECS[codec % 4], raw_size=raw_size, key=KEY
        )
    except Corrupt:
        return
    _check_records(batch)


def _expect_corrupt(call) -> None:
    try:
        call()
    except Corrupt:
        return
    raise AssertionError("what does not verify was decoded")


def _check_records(batch: pa.RecordBatch) -> None:
    """Records that may be used: whatever looks at them stays inside of them, and they survive."""
    batch.validate(full=True)
    encoded_chunk = chunks.encode(batch) if batch.num_rows else None
    if encoded_chunk is not None:
        again = chunks.decode(
            encoded_chunk.body,
            crc=encoded_chunk.crc32c,
            rows=encoded_chunk.rows,
            codec="",
            raw_size=encoded_chunk.raw_size,
            key=KEY,
        )
        assert again.equals(batch)


# -- segments


@functools.cache
def _segments() -> list[bytes]:
    batch = chunks.with_offsets(record_columns.batch_of_rows([rows_of_flights()]), 5)
    many = chunks.with_offsets(record_columns.batch_of_rows([large_rows()]), 9)
    written = [
        segments.write([batch], codec="zstd", is_json=False),
        segments.write([many], codec="uncompressed", is_json=True),
        segments.write([many], codec="lz4", is_json=True),
    ]
    return [
        *_files("topics/*/partition=*/*.parquet"),
        *(segment.body.to_pybytes() for segment in written),
    ]


def check_segment(data: bytes) -> None:
    """As it is alone: with checksums made right a footer that lies makes Arrow end the process.

    They tell damage; who may write to the bucket is trusted.
    """
    try:
        footer = segments.read_footer(data, len(data), KEY)
    except Corrupt:
        return
    for group in footer.groups:
        part = data[group.start : group.start + group.length]
        try:
            batch = footer.decode_group(group.index, part, KEY)
        except Corrupt:
            continue
        batch.validate(full=True)


_SAYINGS = ("tidelog.format", "tidelog.json", "tidelog.cleaned", "tidelog.crc32c")


def _sayings() -> list[bytes]:
    mark = segments._MARK + b"0" * 16
    return [
        b"\n".join([b"1", b"true", b"[[5,1700000000000]]", mark]),
        b"\n".join([b"1", b"false", b"[]", mark]),
    ]


def check_segment_metadata(data: bytes) -> None:
    """A sound Parquet file of which our own key-value metadata say anything."""
    metadata = dict(zip(_SAYINGS, data.decode("utf-8", "replace").split("\n"), strict=False))
    if any("\0" in text for text in metadata.values()):
        return  # Arrow's own refusal, at the writing end
    batch = chunks.with_offsets(record_columns.batch_of_rows([rows_of_json("1")]), 5)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, segments.RECORD_SCHEMA, store_schema=False) as writer:
        writer.write_batch(batch)
        writer.add_key_value_metadata(metadata)
    body = _with_right_footer(sink.getvalue().to_pybytes())
    try:
        footer = segments.read_footer(body, len(body), KEY)
    except Corrupt:
        return
    (group,) = footer.groups
    part = body[group.start : group.start + group.length]
    try:
        assert footer.decode_group(0, part, KEY).equals(batch)
    except Corrupt:
        return


def _with_right_footer(data: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little") + 8
    footer = bytearray(data[-length:])
    slot = footer.rfind(segments._MARK) + len(segments._MARK)
    if slot >= len(segments._MARK):
        footer[slot : slot + 8] = segments._footer_checksum(bytes(footer), slot)
    return data[:-length] + footer


# -- hot logs


def check_hotlog(data: bytes) -> None:
    for body in (data, _with_right_frames(data)):
        with tempfile.TemporaryDirectory(prefix="tidelog-fuzz-") as folder:
            path = Path(folder) / f"{'e' * 32}-000000.hot"
            path.write_bytes(body)
            try:
                files = hot_log_file.recover(Path(folder), CLUSTER_ID)
            except StoreUnfit:
                continue
            for recovered in files:
                os.close(recovered.fd)
                for request in recovered.requests:
                    for part in request.parts:
                        assert isinstance(part.rows, pa.RecordBatch)
                        _check_records(part.rows)


def _with_right_frames(data: bytes) -> bytes:
    body = bytearray(data)
    position = len(hot_log_file.MAGIC) + 4 + int.from_bytes(body[8:12], "little")
    while len(body) - position >= hot_log_file.FRAME.size:
        size, _, number = hot_log_file.FRAME.unpack_from(body, position)
        payload = bytes(
            body[position + hot_log_file.FRAME.size : position + hot_log_file.FRAME.size + size]
        )
        checksum = hot_log_file.frame_checksum(number, payload)
        hot_log_file.FRAME.pack_into(body, position, size, checksum, number)
        position += hot_log_file.FRAME.size + size
    return bytes(body)


# -- what peers say


def _hand_overs() -> list[bytes]:
    bodies = []
    for entry in _groups_and_producers():
        body = bytes(
            chunks.encode(record_columns.batch_of_rows([rows_of_json("1", "2", "3")])).body
        )
        origin = entries.DraftId("peer", 4, len(entry.commits))
        draft = ForwardDraft(origin, entry.commits, entry.chunks, body)
        bodies.append(msgspec.msgpack.encode(draft))
    return bodies


def check_hand_over(data: bytes) -> None:
    """A draft that is taken fits into an entry with others, and that entry is applied."""
    for message in (data, _with_right_chunks(data)):
        try:
            draft, wait_ms = messages.decode_forwarded(message)
        except Corrupt:
            continue
        again = messages.encode_forwarded(draft, wait_ms)
        assert messages.decode_forwarded(again) == (draft, wait_ms)
        merged = merge([draft, draft])
        head = (format_levels.NEWEST, SEQ, entries.GENESIS, bytes(16), "b", 1_700_000_000_000)
        entry = Entry(*head, merged.chunks, merged.commits, list(merged.origins))
        decoded = entries.decode(_entry_bytes(entry), KEY, seq=SEQ, previous=None)
        state = ClusterState.decode(_busy_checkpoint(), KEY)
        _apply(state, decoded.entry)
        _check_state(state)


def _with_right_chunks(data: bytes) -> bytes:
    try:
        draft = msgspec.msgpack.decode(data, type=ForwardDraft)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    position, right = 0, []
    for chunk in draft.chunks:
        part = draft.body[position : position + max(chunk.size, 0)]
        fits = msgspec.structs.replace(
            chunk, position=position, size=len(part), crc32c=checksum.crc32c(part)
        )
        right.append(chunk if chunk.data else fits)
        position += 0 if chunk.data else len(part)
    origin = msgspec.structs.replace(draft.origin, commits=len(draft.commits))
    try:
        return msgspec.msgpack.encode(
            ForwardDraft(origin, draft.commits, right, draft.body[:position])
        )
    except OverflowError:
        return data


def _tellings() -> list[bytes]:
    headers = [body[: PREFIX_BYTES + int.from_bytes(body[8:12], "little")] for body in _entries()]
    told = [
        EntryAnnouncement(number + 1, header, b"chunks") for number, header in enumerate(headers)
    ]
    return [
        messages.encode_announcements(announcements)
        for announcements in (told[:2], [EntryAnnouncement(9)])
    ]


def check_told(data: bytes) -> None:
    try:
        tellings = messages.decode_announcements(data)
    except Corrupt:
        return
    assert messages.decode_announcements(messages.encode_announcements(tellings)) == tellings
    offers, bodies = AnnouncedEntries(), TailObjects(MemoryStore(), 1024)
    for told in tellings:
        offers.add(told.seq, told.header)
        bodies.add(KEY + str(told.seq), len(told.header), told.body)
        assert bodies.bytes <= bodies.bytes_max
    for seq in offers.numbers():
        offers.pop_next(seq - 1, bytes(32))
        bodies.peek(KEY + str(seq), 0, 8, 0)


# -- tables, members, names


def _commits() -> list[bytes]:
    return [body for body in _files("topics/*/_delta_log/*.json") if body]


def check_delta_commit(data: bytes) -> None:
    """As `DeltaManifest` reads commits by itself; the rest of Delta's log is read by deltalake."""
    for read in (delta_json.transactions_of, delta_json.removed_of, delta_json.added_of):
        try:
            read(data)
        except (msgspec.DecodeError, Corrupt):
            continue


def _members() -> list[bytes]:
    member = Member("a" * 32, "b1", "http://10.0.0.1:8083", "t" * 32, 5, 8082)
    return [msgspec.json.encode(member), *_files("cluster.json")]


def check_member(data: bytes) -> None:
    for kind in (Member, wal_objects.ClusterIdentity):
        try:
            value = msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value


def _names() -> list[bytes]:
    names = [
        object_keys.wal(17),
        object_keys.checkpoint(3),
        object_keys.data("ab" * 16, 1_700_000_000_000),
        object_keys.segment(2, 5, 9, "c" * 32),
        object_keys.topic("flights", "d" * 32),
    ]
    return [name.encode() for name in names]


def check_name(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    seq = object_keys.seq_of(text)
    assert seq is None or 0 <= seq < 10**20
    end_ms = object_keys.data_not_after_ms(text)
    assert end_ms is None or 0 <= end_ms < 10**16
    name = object_keys.parse_segment(text)
    file = manifest.SegmentFile(text, 0, 0, 1, 1, 1, 0, 0)
    view = ManifestVersion(1, "t", manifest.SegmentColumns.of([file]))
    try:
        index = view.segments(0)
    except Corrupt:
        return
    assert name is not None
    assert len(index) == 1


TARGETS = [
    Target("entry", _entries, check_entry, 120),
    Target("checkpoint", _checkpoints, check_checkpoint, 120),
    Target("chunk", _chunks, check_chunk, 120),
    Target("segment", _segments, check_segment),
    Target("segment-metadata", _sayings, check_segment_metadata),
    Target("hotlog", lambda: _files(f"{HOT}/*.hot"), check_hotlog),
    Target("hand-over", _hand_overs, check_hand_over),
    Target("told", _tellings, check_told),
    Target("delta-commit", _commits, check_delta_commit),
    Target("member", _members, check_member),
    Target("name", _names, check_name),
]
