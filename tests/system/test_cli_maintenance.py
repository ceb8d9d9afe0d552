"""The commands that care for a log, as processes, with brokers beside them and without."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker, environment, error_line, json_of, tidelog
from tests.support.seaweed import Seaweed
from tidelog.storage.core.format_levels import NEWEST

KEYS = 20
FAST = {
    "wal_view_age_max_ms": 1000,
    "wal_retention_ms": 4000,
    "file_grace_ms": 4000,
    "test_bounds": True,
}
OFTEN = {"sealer": {"check_interval_s": 0.2}}
"""Short, so that a test sees collection happen; a command gets them in the same variable."""


def produce(broker: Broker, topic: str, first: int, count: int) -> None:
    lines = [
        json.dumps({"key": f"k{n % KEYS}", "value": {"n": n}, "partition": 0})
        for n in range(first, first + count)
    ]
    broker.cli("produce", topic, "-f", "ndjson", stdin="\n".join(lines))


def care(broker: Broker, *arguments: str, status: int = 0, **variables: str) -> Any:
    process = tidelog(*arguments, "--store", broker.store, "--json", status=status, **variables)
    return json_of(process)


def numbers(broker: Broker, topic: str) -> list[int]:
    return [json.loads(record["value"])["n"] for record in broker.records(topic)]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that goes on while its log is cared for."""
    with Broker(tmp_path_factory.mktemp("busy")) as broker:
        yield broker


def test_the_commands_beside_a_broker(busy: Broker) -> None:
    busy.create_topic("t", cleanup_policy="compact,delete", retention_ms="-1")
    for first in range(0, 500, 100):
        produce(busy, "t", first, 100)
        busy.cli("seal", "t")
    produce(busy, "t", 500, 10)
    planned = care(busy, "compact", "t")
    assert planned["is_dry"]
    assert [row["what"] for row in planned["compacted"]] == ["compact"]
    assert len(numbers(busy, "t")) == 510
    (result,) = care(busy, "compact", "t", "--yes")["compacted"]
    assert (result["rows"], result["rows_after"], result["segments_after"]) == (500, KEYS, 1)
    assert care(busy, "compact", "t", "--yes")["compacted"] == []
    busy.restart()
    assert numbers(busy, "t") == [*range(480, 510)]
    assert not care(busy, "delete-records", "t", "0:490", "--yes")["is_dry"]
    assert care(busy, "delete-records", "t", "0:490")["retained"] == []
    assert numbers(busy, "t") == [*range(490, 510)]
    told = care(busy, "scrub")
    assert told["is_whole"]
    assert told["findings"] == []
    assert told["rows"] == 20  # 490 to 509: the segment was cut
    result = tidelog("scrub", "t", "--store", busy.store)
    assert result.stdout.startswith(b"whole: ")


def test_what_is_not_known_is_null(busy: Broker) -> None:
    """A collection without garbage has no oldest object, and a dry run no duration."""
    dry = care(busy, "collect")["collected"]
    assert (dry["garbage"], dry["oldest_ms"], dry["seconds"]) == ([], None, None)
    result = care(busy, "collect", "--yes")["collected"]
    assert (result["garbage"], result["oldest_ms"]) == ([], None)
    assert result["seconds"] == round(result["seconds"], 3)


def test_what_cannot_be_done_is_one_line(busy: Broker, tmp_path: Path) -> None:
    busy.create_topic("few")
    produce(busy, "few", 0, 3)
    there = ("--store", busy.store)
    for command in ("retain", "compact", "scrub", "maintain"):
        assert "nope" in error_line(tidelog(command, "nope", *there, status=4))
    assert "partition 7" in error_line(tidelog("delete-records", "few", "7:0", *there, status=4))
    assert "0 to 3" in error_line(tidelog("delete-records", "few", "0:4", *there, status=1))
    for wrong in ("x", "0", "0:", "0:x", ":1", "-1:0"):
        process = tidelog("delete-records", *there, "few", "--", wrong, status=2)
        assert "PARTITION:OFFSET" in error_line(process)
    missing = tmp_path / "missing"
    assert "missing" in error_line(tidelog("collect", "--store", missing.as_uri(), status=3))
    assert not missing.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no cluster" in error_line(tidelog("retain", "--store", str(empty), status=3))
    assert "memory" in error_line(tidelog("retain", "--store", "memory://", status=3))


def test_upgrade_raises_the_level_beside_a_broker(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    identity = {"format": 1, "cluster_id": "c0ffee", "created_ms": 1}
    (store / "cluster.json").write_text(json.dumps(identity))  # as version 0.1 does
    times = {"broker_heartbeat_interval_ms": 500, "broker_timeout_ms": 2000}
    fast = {f"TIDELOG_{name.upper()}": str(value) for name, value in times.items()}
    with Broker(tmp_path, **times) as broker:
        broker.create_topic("t")
        produce(broker, "t", 0, 10)
        (mine,) = (store / "brokers").iterdir()
        old = json.loads(mine.read_text()) | {"id": "0ld", "name": "old-broker"}
        del old["level"], old["writes_rarely"]
        (store / "brokers" / "0ld.json").write_text(json.dumps(old))
        assert care(broker, "upgrade", **fast) == {"is_dry": True, "before": 1, "after": NEWEST}
        process = tidelog("upgrade", "--yes", "--store", broker.store, **fast)
        assert process.stdout == b"level of the format: 1 to %d\n" % NEWEST
        assert care(broker, "upgrade", "--yes", **fast)["before"] == NEWEST
        process = tidelog("upgrade", "--store", broker.store, **fast)
        assert process.stdout.startswith(b"the log has level %d of the format already\n" % NEWEST)
        produce(broker, "t", 10, 10)
        broker.restart()
        assert numbers(broker, "t") == [*range(20)]
        assert care(broker, "scrub")["is_whole"]


def test_upgrade_is_refused_while_a_broker_does_not_know_the_level(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "brokers").mkdir(parents=True)
    identity = {"format": 1, "cluster_id": "c0ffee", "created_ms": 1}
    (store / "cluster.json").write_text(json.dumps(identity))
    old = {"id": "0ld", "name": "old-broker", "address": "", "token": "t", "started_ms": 1}
    fast = {"TIDELOG_BROKER_HEARTBEAT_INTERVAL_MS": "500", "TIDELOG_BROKER_TIMEOUT_MS": "2000"}
    with ThreadPoolExecutor(1) as pool:
        command = ("upgrade", "--yes", "--store", str(store))
        refused = pool.submit(tidelog, *command, status=3, **fast)
        beat = 0
        while not refused.done():
            beat += 1
            (tmp_path / "0ld.json").write_text(json.dumps(old | {"beat": beat}))
            (tmp_path / "0ld.json").replace(store / "brokers" / "0ld.json")
            time.sleep(0.05)
        why = f"do not know level {NEWEST} of the format: old-broker;"
        assert why in error_line(refused.result())
    assert not (store / "wal").exists()


def test_a_flipped_byte_fails_a_scrub(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t")
        produce(broker, "t", 0, 100)
        broker.cli("seal", "t")
    (segment,) = (tmp_path / "store").glob("topics/*/partition=0/*.parquet")
    body = bytearray(segment.read_bytes())
    body[100] ^= 1
    segment.write_bytes(body)
    told = care(broker, "scrub", status=1)
    assert not told["is_whole"]
    (finding,) = told["findings"]
    assert finding["where"].endswith(segment.name)
    process = tidelog("scrub", "--store", broker.store, status=1)
    assert process.stdout.splitlines()[-1].startswith(b"DAMAGED: ")
    assert care(broker, "scrub", "--quick")["is_whole"], "it reads no records"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_at_any_moment_and_run_again(tmp_path: Path) -> None:
    draws = random.Random(7)
    with Broker(tmp_path, **FAST, tuning=OFTEN) as broker:
        broker.create_topic("t", cleanup_policy="compact", min_cleanable_dirty_ratio="0")
        broker.create_topic("u")
        fast = {f"TIDELOG_{name.upper()}": str(value) for name, value in FAST.items()}
        command = [sys.executable, "-m", "tidelog.service.cli", "maintain", "--yes"]
        command += ["--file-grace-ms", "4000", "--store", broker.store]
        first = 0
        for _ in range(2):
            for topic in ("t", "u"):
                produce(broker, topic, first, 50)
                broker.cli("seal", topic)
            first += 50
            with subprocess.Popen(command, env=environment(**fast)) as process:
                time.sleep(0.7 + draws.uniform(0, 0.9))  # it takes that long to start
                process.kill()
            assert care(broker, "scrub", **fast)["is_whole"]
            assert numbers(broker, "u") == [*range(first)]
        care(broker, "maintain", "--yes", **fast)
        broker.restart()
        assert numbers(broker, "t") == [*range(first - KEYS, first)]
        assert numbers(broker, "u") == [*range(first)]
        assert care(broker, "scrub", **fast)["findings"] == []


@pytest.mark.slow
def test_many_at_once_come_to_one_result(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t", cleanup_policy="compact,delete", retention_ms="-1")
        for first in range(0, 300, 50):
            produce(broker, "t", first, 50)
            broker.cli("seal", "t")
        work = [("compact", "t", "--yes")] * 2 + [("delete-records", "t", "0:285", "--yes")]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda arguments: care(broker, *arguments), work))
        care(broker, "compact", "t", "--yes", "--force")
        broker.restart()
        assert numbers(broker, "t") == [*range(285, 300)]
        assert care(broker, "scrub")["findings"] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_i9_a_broker_that_is_stopped_through_a_collection(tmp_path: Path) -> None:
    fast = {f"TIDELOG_{name.upper()}": str(value) for name, value in FAST.items()}
    with Broker(tmp_path, **FAST, tuning=OFTEN) as paused:
        paused.create_topic("t")
        produce(paused, "t", 0, 50)
        paused.cli("seal", "t")
        with Broker(tmp_path / "other", paused.store, **FAST, tuning=OFTEN) as other:
            os.kill(paused.pid, signal.SIGSTOP)
            newest = max((tmp_path / "store" / "wal").iterdir())
            deadline = time.monotonic() + 200
            first = 50
            while newest.exists():  # all that the stopped broker has seen
                assert time.monotonic() < deadline, "nothing is collected"
                produce(other, "t", first, 50)
                other.cli("seal", "t")
                first += 50
                care(other, "collect", "--yes", "--file-grace-ms", "4000", **fast)
            os.kill(paused.pid, signal.SIGCONT)
            assert numbers(paused, "t") == [*range(first)]
            produce(paused, "t", first, 50)
            assert numbers(other, "t") == numbers(paused, "t") == [*range(first + 50)]
            assert care(other, "scrub", **fast)["is_whole"]


@pytest.mark.seaweed
@pytest.mark.slow
def test_on_s3(seaweed: Seaweed, tmp_path: Path) -> None:
    store = f"s3://{seaweed.bucket}/{tmp_path.name}/logs"
    endpoint = {"TIDELOG_S3_ENDPOINT": seaweed.endpoint_url}
    grace = {"file_grace_ms": 0, "test_bounds": True}
    with Broker(tmp_path, store, s3_endpoint=seaweed.endpoint_url, **grace) as broker:
        broker.create_topic("t", cleanup_policy="compact,delete", retention_ms="-1")
        for first in range(0, 150, 50):
            produce(broker, "t", first, 50)
            broker.cli("seal", "t")
        (result,) = care(broker, "compact", "--yes", **endpoint)["compacted"]
        assert (result["rows_after"], result["segments_after"]) == (KEYS, 1)
        care(broker, "delete-records", "t", "0:140", "--yes", **endpoint)
        longer = ("--file-grace-ms", "86400000")
        assert not care(broker, "collect", "--yes", *longer, **endpoint)["collected"]["garbage"]
        collection = care(broker, "collect", "--yes", **endpoint)["collected"]
        assert {garbage["why"] for garbage in collection["garbage"]} == {"no version names it"}
        assert (
            collection["deleted"] == collection["objects"] == 4
        )  # one was rewritten without the deleted records
        broker.restart()
        assert numbers(broker, "t") == [*range(140, 150)]
        told = care(broker, "scrub", **endpoint)
        assert told["is_whole"]
        assert told["segments"] == 1


def test_bounds_are_shown_and_changed(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        usual = care(broker, "bounds")
        assert [bound["in_effect"] for bound in usual["bounds"]] == [600_000, 3_600_000, 86_400_000]
        longer = ("bounds", "--file-grace-ms", "172800000")
        assert care(broker, *longer)["is_dry"]
        assert care(broker, "bounds") == usual
        changed = care(broker, *longer, "--yes")["bounds"]
        assert changed == care(broker, "bounds")["bounds"]
        assert changed[2]["in_effect"] == 172_800_000
        for command in ("collect", "maintain"):
            process = tidelog(
                command, "--file-grace-ms", "86400000", "--store", broker.store, status=2
            )
            assert b"is shorter than the cluster's 172800000" in process.stderr
        process = tidelog("bounds", "--view-age-ms", "1", "--store", broker.store, status=1)
        assert b"view_age_ms must be 60000 to 648000000, not 1" in process.stderr
