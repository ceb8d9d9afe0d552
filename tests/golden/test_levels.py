"""The additions of levels 3 and 4 of the format, as they were stored once."""

from pathlib import Path

from tests.golden.make import folder_of
from tests.golden.test_golden import FLIGHTS, folded, golden, header_of, state_in
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import producer_batches as kept_batches
from tidelog.storage.state.cluster_state import ClusterState

A, B = "a" * 32, "b" * 32


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
    assert {who: [record[0][0] for record in records] for who, records in keys.items()} == {
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
    batches = kept_batches.open_chunk(
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
