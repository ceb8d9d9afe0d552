"""`tidelog replay`: from the store to files, with Spark and without a broker."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.broker import Broker, error_line, json_of, tidelog
from tidelog.service.cli.replay import root_cause

PARTITIONS = 2
RECORDS = 300


def test_replay_of_what_is_not_there_does_not_start_spark(broker: Broker, tmp_path: Path) -> None:
    to = str(tmp_path / "out")
    process = tidelog("replay", "nope", "--store", broker.store, "--to", to, status=4)
    assert "nope" in error_line(process)
    missing = (tmp_path / "missing").as_uri()
    process = tidelog("replay", "t", "--store", missing, "--to", to, status=3)
    assert "missing" in error_line(process)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store whose broker has ended, with a topic of which two thirds are sealed.

    It has one record a second from 2020 on.
    """
    with Broker(tmp_path_factory.mktemp("replayed")) as broker:
        broker.create_topic("t", PARTITIONS)
        lines = [
            json.dumps(
                {
                    "key": f"k{n}",
                    "value": {"n": n},
                    "partition": n % PARTITIONS,
                    "timestamp": 1_577_836_800_000 + 1000 * n,
                    "headers": [{"key": "h", "value": "aGVhZA=="}],
                }
            )
            for n in range(RECORDS)
        ]
        broker.cli("produce", "t", "-f", "ndjson", stdin="\n".join(lines[:200]))
        broker.cli("seal", "t")
        broker.cli("produce", "t", "-f", "ndjson", stdin="\n".join(lines[200:]))
        broker.stop()
        return broker.store


def replayed(store: str, to: Path, *options: str) -> int:
    """Records that the command says it has written."""
    process = tidelog("replay", "t", "--store", store, "--to", str(to), "--json", *options)
    assert process.stderr == b""
    records: int = json_of(process)["records"]
    return records


def test_the_innermost_cause_of_a_java_exception() -> None:
    text = """An error occurred while calling o88.save.
: org.apache.spark.SparkException: Job aborted.
\tat org.apache.spark.Job.run(Job.scala:1)
Caused by: java.io.IOException: Mkdirs failed to create file:/x/_temporary/0
\tat org.apache.hadoop.fs.ChecksumFileSystem.create(ChecksumFileSystem.java:1)
\t... 23 more
"""
    assert root_cause(text) == "Mkdirs failed to create file:/x/_temporary/0"
    assert (
        root_cause("An error occurred while calling o1.f.\n: java.lang.Error: no\n\tat x") == "no"
    )
    assert root_cause("An error occurred") == "An error occurred"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_replay_to_parquet_has_every_record(store: str, tmp_path: Path) -> None:
    to = tmp_path / "out"
    assert replayed(store, to) == RECORDS
    table = pq.read_table(to)
    assert sorted(json.loads(value)["n"] for value in table["value"].to_pylist()) == list(
        range(RECORDS)
    )
    first = table.filter(pq.filters_to_expression([("offset", "==", 0), ("partition", "==", 1)]))
    (record,) = first.to_pylist()
    assert (record["topic"], record["key"], record["value"]) == ("t", b'"k1"', b'{"n": 1}')
    assert record["headers"] == [{"key": "h", "value": b"head"}]
    process = tidelog("replay", "t", "--store", store, "--to", str(to), status=1)
    assert "already exists" in error_line(process)
