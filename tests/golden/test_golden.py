"""Each level of the format as it was stored once: its meaning stays.

Today's code writes the same bytes in a cluster that began at the level.

An unintended failure here is a change of the format, which would break existing clusters: code must
still read old objects, and new ones need a new level (FORMAT.md). Level 2 is not released: until it
is, its bytes may change, and `tests/golden/make.py` writes them again.
"""

import asyncio
import hashlib
import shutil
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.golden.make import HERE, HOT, RAISED, folder_of, make
from tests.support.records import fold
from tidelog.storage.broker import Broker
from tidelog.storage.codec import batches_as_sent, record_columns
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import HotMark, IdempotencyKey
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.wal.wal_objects import CHECKPOINT_MAGIC
from tidelog.storage.write import hot_log_file

CLUSTER_ID = "0123456789abcdef0123456789abcdef"
A, B = "a" * 32, "b" * 32
ENTRIES = [f"wal/{seq:020}" for seq in range(1, 8)]
CHECKPOINT = f"checkpoints/{6:020}"
DATA = "data/00/00000000000000070000000000000013"
HOT_FILE = f"{HOT}/{'e' * 32}-000000.hot"
FOLDER = folder_of(1)
STORE_TIME = f"wal/{8:020}"
"""Of level 2 alone."""
SEGMENT = f"topics/flights-{A}/partition=0/{0:020}-{3:020}-00000000000000070000000000000016.parquet"
START = datetime.fromtimestamp(1_700_000_000, UTC)


def golden(name: str, folder: Path = FOLDER) -> bytes:
    return (folder / name).read_bytes()


def header_of(name: str, folder: Path) -> list[Any]:
    """The elements of an entry's header, without our own code."""
    body = golden(name, folder)
    _, length, _ = struct.unpack_from("<8sII", body)
    header: list[Any] = msgspec.msgpack.decode(body[16 : 16 + length])
    return header


def state_in(name: str, folder: Path) -> list[Any]:
    """The elements of a checkpoint's state, without our own code."""
    state: list[Any] = msgspec.msgpack.decode(golden(name, folder)[12:])
    return state


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def number(value: int) -> bytes:
    """An id as the clock of `make` drew it."""
    return (7).to_bytes(8, "big") + value.to_bytes(8, "big")


def after_ms(value: int) -> datetime:
    return START + timedelta(milliseconds=value)


# -- today's code writes what was written then


@pytest.mark.parametrize("cluster", ["v1", "v2", "v3", "v4", RAISED])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, cluster: str) -> None:
    make(tmp_path / cluster, cluster)
    assert files_in(tmp_path / cluster) == files_in(HERE / cluster)
    for name in sorted(files_in(HERE / cluster)):
        if not name.startswith("topics/"):
            assert golden(name, tmp_path / cluster) == golden(name, HERE / cluster), name


# -- entries


def test_an_entry_is_what_format_md_says() -> None:
    """Without our own code: magic, lengths, checksums, the chain, the order of fields."""
    previous = bytes(32)
    for seq, name in enumerate(ENTRIES, 1):
        body = golden(name)
        magic, length, crc = struct.unpack_from("<8sII", body)
        header, entry_body = body[16 : 16 + length], body[16 + length :]
        assert magic == b"TIDEWAL1"
        assert google_crc32c.value(header) == crc
        format_, entry_seq, named, entry_id, writer, at_ms, carried, commits = (
            msgspec.msgpack.decode(header)
        )
        assert (format_, entry_seq, named, writer) == (1, seq, previous, "golden-broker")
        assert at_ms == 1_700_000_000_000 + seq * 1500
        assert len(entry_id) == 16
        assert commits
        previous = hashlib.blake2b(header, digest_size=32).digest()
        for _, _, position, size, crc, *_, data in carried:
            source = golden(data) if data else entry_body
            assert google_crc32c.value(source[position : position + size]) == crc
        assert sum(size for _, _, _, size, *_, data in carried if not data) == len(entry_body)


def test_the_commits_of_an_entry() -> None:
    _, length, _ = struct.unpack_from("<8sII", golden(ENTRIES[1]))
    header = msgspec.msgpack.decode(golden(ENTRIES[1])[16 : 16 + length])
    key = ["order-17", bytes(range(16)), 3]
    assert header[6:] == [
        [
            [A, 0, 0, 776, 4123894386, 6, 1699999999995, 1700000000003, False, "", 776, ""],
            [A, 2, 776, 632, 2078763581, 2, 1700000000000, 1700000000001, True, "", 632, ""],
            [A, 1, 1408, 624, 1103695872, 2, 1700000000000, 1700000000000, True, "", 624, ""],
            [B, 0, 2032, 568, 3470710847, 1, 5, 5, True, "", 568, ""],
            [
                "f" * 32,
                0,
                2600,
                560,
                2944754339,
                1,
                1700000000000,
                1700000000000,
                True,
                "",
                560,
                "",
            ],
        ],
        [
            [number(7), [["append", 0, 0, 5], ["append", 1, 0, 2]], None, None],
            [number(9), [["append", 2, 0, 1]], key, None],
            [number(10), [["append", 2, 1, 1]], key, None],
            [number(11), [["append", 0, 5, 1]], None, ["d" * 32, 3]],
            [number(12), [["append", 3, 0, 1]], None, ["e" * 32, 0]],
            [number(13), [["append", 4, 0, 1]], None, None],
        ],
    ]


def test_the_other_actions() -> None:
    def actions(name: str) -> list[Any]:
        _, length, _ = struct.unpack_from("<8sII", golden(name))
        commits = msgspec.msgpack.decode(golden(name)[16 : 16 + length])[7]
        return [action for commit in commits for action in commit[1]]

    assert actions(ENTRIES[0]) == [
        ["create-topic", "flights", A, 2, {"retention.ms": "1000"}],
        ["create-topic", "audit.log", B, 1, {"message.timestamp.type": "LogAppendTime"}],
        ["create-topic", "gone", "c" * 32, 1, {}],
        ["create-topic", "gone", "9" * 32, 1, {}],
        ["add-partitions", A, 3],
    ]
    assert actions(ENTRIES[5]) == [
        ["sealed", A, 0, 3],
        ["retire-hot-log", "d" * 32],
        ["alter-topic", A, {"retention.ms": None, "segment.ms": "60000"}],
        ["delete-topic", "c" * 32],
    ]


@pytest.mark.parametrize(
    ("name", "codec", "size", "crc"),
    [(ENTRIES[2], "lz4", 5894, 1521424442), (ENTRIES[3], "zstd", 2915, 1830805270)],
)
def test_a_packed_chunk(name: str, codec: str, size: int, crc: int) -> None:
    body = golden(name)
    decoded = entries.decode(body, name, seq=int(name[-1]), previous=None)
    packed, plain = decoded.entry.chunks
    assert (packed.codec, packed.size, packed.raw_size, packed.crc32c) == (codec, size, 40536, crc)
    assert (plain.codec, plain.size, plain.raw_size) == ("", 552, 552)
    start = decoded.body_start
    batch = chunks.decode(
        body[start : start + size], crc=crc, rows=400, codec=codec, raw_size=40536, key=name
    )
    assert batch.column("value")[399].as_py() == b'{"row":399,"pad":"%s"}' % (b"x" * 60)
    assert batch.column("timestamp")[399].as_py() == after_ms(399)
    assert batch.schema == pa.schema(
        {
            "timestamp": pa.timestamp("us", tz="UTC"),
            "key": pa.binary(),
            "value": pa.binary(),
            "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        }
    )


# -- checkpoints


def folded(
    tmp_path: Path, folder: Path, checkpoint: str
) -> tuple[ClusterState, list[list[Outcome]]]:
    """Fold the entries of a cluster up to a checkpoint, without the checkpoint."""
    shutil.copytree(folder / "wal", tmp_path / "wal")
    shutil.copy(folder / "cluster.json", tmp_path)
    for path in (tmp_path / "wal").iterdir():
        if path.name > Path(checkpoint).name:
            path.unlink()
    store = FolderStore(tmp_path)
    result = asyncio.run(fold(store, CLUSTER_ID))
    asyncio.run(store.close())
    return result


@pytest.mark.parametrize("level", [1, 2])
def test_a_checkpoint_is_the_fold_of_its_entries(tmp_path: Path, level: int) -> None:
    folder = folder_of(level)
    body = golden(CHECKPOINT, folder)
    assert body[:8] == CHECKPOINT_MAGIC == b"TIDECKP1"
    assert int.from_bytes(body[8:12], "little") == google_crc32c.value(body[12:])
    state = ClusterState.decode(body[12:], CHECKPOINT)
    assert state.encode() == body[12:]
    folded_state, outcomes = folded(tmp_path, folder, CHECKPOINT)
    assert folded_state.encode() == body[12:]
    refused = [
        str(outcome.refusal)
        for entry_outcomes in outcomes
        for outcome in entry_outcomes
        if outcome.refusal
    ]
    assert refused == ["topic 'gone' already exists", f"topic {'f' * 32!r} does not exist"]
    assert [outcome.is_duplicate for outcome in outcomes[1]] == [False, False, True, *[False] * 3]


def test_the_state_of_a_checkpoint() -> None:
    raw = msgspec.msgpack.decode(golden(CHECKPOINT)[12:])
    format_, cluster_id, seq, hash_, time_ms, topics, deleted, keys, hot_logs = raw
    assert (format_, cluster_id, seq, time_ms) == (1, CLUSTER_ID, 6, 1700000009000)
    _, length, _ = struct.unpack_from("<8sII", golden(ENTRIES[5]))
    header = golden(ENTRIES[5])[16 : 16 + length]
    assert hash_ == hashlib.blake2b(header, digest_size=32).digest()
    assert [topic[:4] for topic in topics] == [
        ["flights", A, 1700000001500, {"segment.ms": "60000"}],
        ["audit.log", B, 1700000001500, {"message.timestamp.type": "LogAppendTime"}],
    ]
    assert [partition[:3] for topic in topics for partition in topic[4]] == [
        [0, 3, 6],  # log start, sealed end, high watermark
        [0, 0, 3],
        [0, 0, 803],
        [0, 0, 1],
    ]
    assert deleted == [["gone", "c" * 32, 1700000009000]]
    key = ["order-17", bytes(range(16)), 3]
    assert keys == [[key, 1700000003000, [["flights", 1, 0, 1]]]]
    assert hot_logs == {"e" * 32: 0}


# -- level 2


def test_level_2_adds_elements_at_the_ends() -> None:
    """All else is as at level 1: positions in the WAL are after longer headers."""
    first, second = folder_of(1), folder_of(2)
    identity = msgspec.json.decode(golden("cluster.json", second))
    first_bounds = {"view_age_ms": 300_000, "wal_retention_ms": 7_200_000}
    assert identity.pop("bounds") == first_bounds | {"file_grace_ms": 86_400_000}
    assert identity == msgspec.json.decode(golden("cluster.json")) | {"format": 2}
    for name in ENTRIES:
        old, new = header_of(name, first), header_of(name, second)
        assert (new[0], len(new), new[8:]) == (2, 10, [[], 1_700_000_000_077])
        principals = [commit.pop() for commit in new[7]]
        first_principals = ["User:alice"] if name == ENTRIES[1] else [""]
        assert principals == [*first_principals, *[""] * (len(principals) - 1)]
        old[0], old[2], new[0], new[2] = 0, b"", 0, b""  # the level, the hash of the one before
        assert new[:8] == old
    assert golden(DATA, second) == golden(DATA, first)
    old, new = state_in(CHECKPOINT, first), state_in(CHECKPOINT, second)
    last_ms = 1_700_000_000_000 + 6 * 1500
    elapsed = [5 * 1500, [["golden-broker", last_ms, 5 * 1500]]]  # its first entry adds nothing
    bounds_ms = [300_000, 7_200_000, 86_400_000]
    bounds = [False, bounds_ms, bounds_ms, [0, 0]]
    assert (new[0], new[9:]) == (2, [None, None, None, [], None, elapsed, bounds, []])
    assert (len(old), new[6], new[8]) == (9, old[6], old[8])
    ((key, at_ms, placements),) = new[7]  # remembered by elapsed time
    assert [[key, 1_700_000_001_500 + at_ms, placements]] == old[7]
    assert [topic[:4] for topic in new[5]] == [topic[:4] for topic in old[5]]


def test_an_entry_with_the_stores_time() -> None:
    folder = folder_of(2)
    level, seq, previous, *_, origins, store_ms = header_of(STORE_TIME, folder)
    assert (level, seq, origins, store_ms) == (2, 8, [], 1_700_000_000_077)
    body = golden(STORE_TIME, folder)
    decoded = entries.decode(body, STORE_TIME, seq=8, previous=previous)
    assert (decoded.entry.writer, decoded.entry.store_ms) == ("another-broker", store_ms)


def test_a_cluster_that_was_raised(tmp_path: Path) -> None:
    """Level 1, an entry that has nothing but the new level, level 2, the same for 3 and 4."""
    folder = HERE / RAISED
    assert msgspec.json.decode(golden("cluster.json", folder))["format"] == 1
    first, raising, second = (header_of(name, folder) for name in ENTRIES[:3])
    assert (first[0], len(first), [len(commit) for commit in first[7]]) == (1, 8, [4, 4])
    assert (raising[0], raising[4], raising[6:9]) == (2, "golden-broker", [[], [], []])
    assert (second[0], len(second), [commit[4] for commit in second[7]]) == (2, 10, ["User:alice"])
    old_state, new_state = (state_in(f"checkpoints/{seq:020}", folder) for seq in (1, 3))
    assert (old_state[0], len(old_state), new_state[0], len(new_state)) == (1, 9, 2, 17)
    assert [commit[1] for commit in header_of(ENTRIES[3], folder)[7]] == [
        [["lose-records", A, 0, 0, 1]],
        [["set-bounds", None, 5_000_000, 172_800_000]],
        [["take-hold", "first", 60_000], ["take-hold", "second", 60_000]],
        [["renew-hold", "first", 90_000], ["release-hold", "second"]],
    ]
    shutil.copytree(folder, tmp_path / "store")
    store = FolderStore(tmp_path / "store")
    folded, _ = asyncio.run(fold(store, CLUSTER_ID))
    asyncio.run(store.close())
    assert folded.encode() == golden(f"checkpoints/{8:020}", folder)[12:]
    raising, third = (header_of(f"wal/{seq:020}", folder) for seq in (5, 6))
    assert (raising[0], raising[6:9]) == (3, [[], [], []])
    assert (third[0], [len(commit) for commit in third[7]]) == (3, [5])
    last = state_in(f"checkpoints/{6:020}", folder)
    assert (last[0], last[7]) == (3, [])
    ((principal, ((key, _, _),)),) = last[-1][2].items()
    assert (principal, key) == ("User:alice", ["order-19", bytes(16), 1])
    state = state_in(f"checkpoints/{4:020}", folder)
    (elapsed_ms, _), bounds, holds = state[-3:]
    lost_run, kept_run = state[5][0][4][0][4]
    assert (lost_run[:2], lost_run[3], lost_run[-2], kept_run[:2], kept_run[-2]) == (
        [0, 1],
        "",
        "lost",
        [1, 1],
        "",
    )
    assert bounds[1] == bounds[2] == [600_000, 5_000_000, 172_800_000]
    assert holds == [["first", 1_700_000_006_000, elapsed_ms + 90_000]]
    fourth = state_in(f"checkpoints/{8:020}", folder)
    assert (fourth[0], fourth[-2][0][0][:2], fourth[-1]) == (4, [0, 10], {})


# -- segments


FLIGHTS = [
    {"timestamp": after_ms(0), "key": b'"EWR"', "value": b'{"dep_delay":2}', "headers": None},
    {
        "timestamp": after_ms(1),
        "key": None,
        "value": None,
        "headers": [
            {"key": "a", "value": b"1"},
            {"key": "a", "value": None},
            {"key": "\u00e9", "value": b""},
        ],
    },
    {"timestamp": after_ms(-5), "key": b"", "value": b"", "headers": []},
    {"timestamp": after_ms(3), "key": b"\x00\xff", "value": b"\xfe not JSON", "headers": None},
]


def test_a_segment() -> None:
    body = golden(SEGMENT)
    footer = segments.read_footer(body, len(body), SEGMENT)
    (group,) = footer.groups
    assert not footer.is_json
    assert (group.rows, group.base_offset, group.end_offset) == (3, 0, 3)
    assert (group.timestamp_min, group.timestamp_max) == (1699999999995, 1700000000001)
    batch = footer.decode_group(0, body[group.start : group.start + group.length], SEGMENT)
    assert batch.to_pylist() == [
        {"offset": offset, **record} for offset, record in enumerate(FLIGHTS[:3])
    ]


@pytest.mark.parametrize(("level", "numbers"), [(1, [-1] * 6), (2, [1, 2, 3, 4, 7, 8])])
def test_segments_have_field_ids_from_level_2_on(level: int, numbers: list[int]) -> None:
    """As another reader sees them: 5 and 6 are of groups, which pyarrow shows as fields."""
    file = pq.ParquetFile(folder_of(level) / SEGMENT)
    headers = file.schema_arrow.field("headers")
    leaves = [*list(file.schema_arrow)[:4], *headers.type.value_type]
    field_ids = [int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in leaves]
    groups = [
        (field.metadata or {}).get(b"PARQUET:field_id")
        for field in (headers, headers.type.value_field)
    ]
    assert field_ids == numbers
    assert groups == ([None, None] if level == 1 else [b"5", b"6"])


# -- hot logs


@pytest.mark.parametrize(("level", "principals"), [(1, [""] * 3), (2, ["", "User:alice", ""])])
def test_a_hot_log(tmp_path: Path, level: int, principals: list[str]) -> None:
    (tmp_path / Path(HOT_FILE).name).write_bytes(golden(HOT_FILE, folder_of(level)))
    (hot_log,) = hot_log_file.recover(tmp_path, CLUSTER_ID)
    assert hot_log.log_id == "e" * 32
    assert [request.hot for request in hot_log.requests] == [HotMark("e" * 32, n) for n in range(3)]
    assert [request.principal for request in hot_log.requests] == principals
    committed, keyed, wide = hot_log.requests
    assert (committed.topic_id, committed.key, committed.is_json) == (B, None, True)
    assert keyed.key == IdempotencyKey("order-18", bytes(16), 3)
    assert (keyed.topic_id, wide.topic_id, wide.is_json) == (A, None, False)
    assert [(part.topic_id, part.partition) for part in wide.parts] == [(A, 1), (B, 0)]
    rows = [[part.rows.to_pylist() for part in request.parts] for request in hot_log.requests]
    values = [[[row["value"] for row in part] for part in parts] for parts in rows]
    assert values[:2] == [[[b'"hot"']], [[b'"acked"', b'"both"']]]
    assert rows[2][0] == FLIGHTS
    assert values[2][1] == [b'"two topics"']
    hot_log_file.discard([hot_log])


# -- all of it


@pytest.mark.parametrize("level", [1, 2])
def test_a_broker_of_today_goes_on_from_there(tmp_path: Path, level: int) -> None:
    """The whole cluster with what its hot log holds, over both tiers, and one record more."""
    shutil.copytree(folder_of(level), tmp_path / "store")
    rows_by_partition = asyncio.run(_read_all(tmp_path / "store"))
    if level == 2:
        assert rows_by_partition["flights", 0].pop(6)["value"] == b'"store time"'
    assert [len(rows_by_partition["flights", number]) for number in range(3)] == [9, 8, 803]
    assert rows_by_partition["flights", 0][:4] == FLIGHTS
    values = {
        partition: [row["value"] for row in rows] for partition, rows in rows_by_partition.items()
    }
    assert values["flights", 0][4:] == [b"1", b'"hot"', b'"acked"', b'"both"', b'"today"']
    assert values["flights", 1][:4] == [
        b'"keyed"',
        b'"small"',
        b'"small"',
        b'"after the checkpoint"',
    ]
    assert rows_by_partition["flights", 1][4:] == FLIGHTS
    assert values["flights", 2][:2] == [b"2", b"3"]
    assert values["flights", 2][802] == b'"referred"'
    # The WAL has its mark, with another commit id: from level 2 on a recovery takes it for the
    # request of a copy of the machine.
    other = [b'"hot"'] if level > 1 else []
    assert values["audit.log", 0] == [b'"stamped by the log"', *other, b'"two topics"']
    assert rows_by_partition["audit.log", 0][0]["timestamp"] == after_ms(3000)


async def _read_all(folder: Path) -> dict[tuple[str, int], list[Any]]:
    store = FolderStore(folder)
    log = await Broker.open(
        store,
        LogSettings(is_sealing=False),
        clock=SystemClock(),
        name="today",
        cluster_id=CLUSTER_ID,
        hot_dir=folder / HOT,
    )
    record = record_columns.Rows([1], [None], [b'"today"'])
    await log.records.append(log.state.topic("flights"), [(0, record)], size=7, is_json=True)
    rows_by_partition = {}
    for topic, number, _ in log.state.partitions():
        fetched = await log.records.fetch(topic.name, number, 0, bytes_max=2**20)
        rows = [row for piece in fetched.pieces for row in piece.batch.to_pylist()]
        assert [row.pop("offset") for row in rows] == list(range(fetched.high_watermark))
        rows_by_partition[topic.name, number] = rows
    await log.close()
    await store.close()
    return rows_by_partition


# -- level 3


def test_level_3_adds_what_belongs_to_principals(tmp_path: Path) -> None:
    folder, name = folder_of(3), f"checkpoints/{15:020}"
    body = golden(name, folder)
    assert ClusterState.decode(body[12:], name).encode() == body[12:]
    state = state_in(name, folder)
    assert (state[0], len(state)) == (3, 18)
    mine, alice, bob = "8" * 32, "User:alice", "User:bob"
    topics, groups, keys, producers = state[-1]
    assert topics == {mine: [[alice, 1], [bob, 2]], B: [["", 1], [bob, 1]]}
    assert groups == {"group": alice}
    assert {
        principal: [record[0][0] for record in records] for principal, records in keys.items()
    } == {
        alice: ["order-20"],
        bob: ["order-20"],
    }
    assert [record[0][0] for record in state[7]] == ["order-17"]
    assert producers == [{alice: [0]}, {bob: [[0, A, 1]]}]
    assert state[13][2] == {bob: {"members": 5, "mutation_rate": 7}}
    folded_state, _ = folded(tmp_path, folder, name)
    assert folded_state.encode() == body[12:]


# -- level 4


def test_level_4_keeps_the_batches_of_kafka_producers(tmp_path: Path) -> None:
    folder, name = folder_of(4), f"checkpoints/{26:020}"
    state = state_in(name, folder)
    assert (state[0], len(state)) == (4, 20)
    assert state[-2][0] == [[1, 1001, state[14][0] - 10 * 1500]]
    header = header_of(f"wal/{17:020}", folder)
    kept_chunk, rows, stamped = header[6]
    assert [(chunk[5], chunk[9]) for chunk in (kept_chunk, rows, stamped)] == [
        (7, "kafka"),
        (1, ""),
        (1, "kafka"),
    ]
    assert [commit[1] for commit in header[7]] == [
        [["append-of-producer", 0, 0, 4, 1, 0, 0]],
        [["append-of-producer", 0, 4, 1, 1, 0, 4]],
        [["append", 0, 5, 2]],
        [["append", 1, 0, 1]],
        [["append", 2, 0, 1]],
    ]
    folded_state, _ = folded(tmp_path, folder, name)
    assert folded_state.encode() == golden(name, folder)[12:]
    body = golden(f"wal/{17:020}", folder)
    start = entries.header_length(body, "it") + kept_chunk[2]
    batches = batches_as_sent.open_chunk(
        body[start : start + kept_chunk[3]], crc=kept_chunk[4], rows=7, key="it"
    )
    assert [batch.count for batch in batches.batches] == [4, 1, 2]
    assert batches.decoded().column("value").to_pylist() == [
        *(record["value"] for record in FLIGHTS),
        *(b"2", b"3", b"1"),
    ]


def test_level_4_keeps_the_groups_that_clients_assign() -> None:
    folder = folder_of(4)
    state = state_in(f"checkpoints/{26:020}", folder)
    now_ms = state[14][0] - 2 * 1500
    config = ["binary", "latest", False, -1, 1000, 45_000, 300_000, "kafka", "app", ""]
    member = ["m-2", now_ms - 6 * 1500, config, "pod", [], "", False, [], [], "/10.0.0.2"]
    assert state[-2][1] == [
        ["kafka", 2, "consumer", "range", "m-2", "b", 1, 0, True, [[*member, b"m2", b"a2"]]],
        ["alone", 1, "connect", "mine", "m-2", "b", 1, now_ms, False, []],
    ]
    assert list(state[10]["kafka"]) == ["a" * 32]
    assert [row[0] for row in state[10]["kafka"]["a" * 32]] == [0]
    (settled,) = header_of(f"wal/{18:020}", folder)[7][0][1]
    assert settled == [
        "settle-group",
        "kafka",
        "b",
        0,
        1,
        "consumer",
        "range",
        "m-1",
        [
            ["m-1", "", "app", "/10.0.0.1", 45_000, 300_000, b"m1", b"a1", "User:alice"],
            ["m-2", "pod", "app", "/10.0.0.2", 45_000, 300_000, b"m2", b"a2", ""],
        ],
    ]


def test_level_4_keeps_defaults_of_topics() -> None:
    folder = folder_of(4)
    first, second = (header_of(f"wal/{seq:020}", folder)[7][0][1] for seq in (25, 26))
    assert first == [["set-topic-defaults", {"log.retention.bytes": "9", "num.partitions": "3"}]]
    changes = {"log.cleanup.policy": "compact", "num.partitions": None}
    assert second == [["set-topic-defaults", changes]]
    defaults = {"log.cleanup.policy": "compact", "log.retention.bytes": "9"}
    assert state_in(f"checkpoints/{26:020}", folder)[-1] == defaults
