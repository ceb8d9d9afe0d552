"""`tidelog query`: SQL over the store of a broker that runs."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.broker import Broker, error_line, tidelog

RECORDS = 90
PARTITIONS = 2


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """`sales-eu` is sealed up to two thirds; `Case` and `case` differ in case only."""
    with Broker(tmp_path_factory.mktemp("queried")) as broker:
        broker.create_topic("sales-eu", PARTITIONS)
        for name in ("Case", "case"):
            broker.create_topic(name, 1)
        lines = [
            json.dumps({"key": f"k{n % 3}", "value": {"n": n}, "partition": n % PARTITIONS})
            for n in range(RECORDS)
        ]
        broker.cli("produce", "sales-eu", "-f", "ndjson", stdin="\n".join(lines[:60]))
        broker.cli("seal", "sales-eu")
        broker.cli("produce", "sales-eu", "-f", "ndjson", stdin="\n".join(lines[60:]))
        broker.cli("produce", "case", stdin=b"\xff\xfe\n")
        yield broker


def answer(broker: Broker, sql: str, *options: str) -> bytes:
    process = tidelog("query", sql, "--store", broker.store, *options)
    assert process.stderr == b""
    output: bytes = process.stdout
    return output


def rows(broker: Broker, sql: str) -> list[dict]:
    return [json.loads(line) for line in answer(broker, sql, "--format", "json").splitlines()]


def test_a_query_sees_table_and_tail(broker: Broker) -> None:
    sides = (
        'SELECT (SELECT count(*) FROM "sales-eu") a, (SELECT count(*) FROM "sales-eu$sealed") s, '
        '(SELECT count(*) FROM "sales-eu$tail") t'
    )
    assert rows(broker, sides) == [{"a": 90, "s": 60, "t": 30}]
    sums = (
        "SELECT decode(key) k, sum((decode(value)::JSON->>'n')::INT) n, max(\"offset\") o "
        'FROM "sales-eu" GROUP BY ALL ORDER BY k'
    )
    expected = [
        {"k": f'"k{k}"', "n": sum(range(k, 90, 3)), "o": max(n // 2 for n in range(k, 90, 3))}
        for k in range(3)
    ]
    assert rows(broker, sums) == expected


def test_a_table_of_text(broker: Broker) -> None:
    sql = 'SELECT partition, count(*) AS records FROM "sales-eu" GROUP BY 1 ORDER BY 1'
    assert answer(broker, sql).decode().split() == ["partition", "records", "0", "45", "1", "45"]
    assert answer(broker, 'SELECT value FROM "case"', "-f", "csv") == b"value\n\\xff\\xfe\n"
    assert b"sales-eu$tail" in answer(broker, "SHOW TABLES")
    assert b"offset" in answer(broker, 'DESCRIBE "sales-eu"')


def test_binary_formats(broker: Broker) -> None:
    sql = 'SELECT "offset", value FROM "sales-eu" WHERE partition = 1 ORDER BY 1'
    read = pa.ipc.open_stream(io.BytesIO(answer(broker, sql, "--format", "arrow"))).read_all()
    assert read["offset"].to_pylist() == [*range(45)]
    table = pq.read_table(io.BytesIO(answer(broker, sql, "--format", "parquet")))
    assert table["value"].to_pylist()[-1] == b'{"n": 89}'
    empty = answer(broker, 'SELECT key FROM "sales-eu" WHERE false', "--format", "csv")
    assert empty == b"key\n"


def test_the_log_as_of_a_time(broker: Broker) -> None:
    sql = 'SELECT count(*) FROM "sales-eu"'
    assert answer(broker, sql, "--as-of", "-0s", "-f", "csv") == b"count_star()\n90\n"
    process = tidelog("query", sql, "--store", broker.store, "--as-of", "@2020-01-01", status=1)
    assert error_line(process) == "topic 'sales-eu' did not exist at 2020-01-01T00:00:00.000+00:00"
    process = tidelog("query", sql, "--store", broker.store, "--as-of", "never", status=2)
    assert "is not a time" in error_line(process)


@pytest.mark.parametrize(
    ("sql", "status", "words"),
    [
        ('SELECT nope FROM "sales-eu"', 1, "SQL: Binder Error: Referenced column"),
        ("SELECT", 1, "SQL: Parser Error: "),
        ("SELECT 1 FROM sales", 1, 'Topics are tables: "Case", "case", "sales-eu"'),
        ("SELECT 1; SELECT 2", 2, "one statement is expected, not 2"),
        ("", 2, "one statement is expected, not 0"),
        ('SELECT 1 FROM "CASE"', 1, "topics Case and case differ in case only"),
    ],
)
def test_a_wrong_query_is_one_line(broker: Broker, sql: str, status: int, words: str) -> None:
    process = tidelog("query", sql, "--store", broker.store, status=status)
    assert words in error_line(process)


def test_a_store_without_a_cluster(tmp_path: Path) -> None:
    process = tidelog("query", "SELECT 1", "--store", str(tmp_path), status=3)
    assert "holds no cluster" in error_line(process)


def test_damage_ends_with_status_1(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t", 1)
        broker.cli("produce", "t", stdin="x" * 5000 + "\n")
        broker.cli("seal", "t")
        broker.stop()
        (path,) = Path(broker.store.removeprefix("file://")).glob("topics/*/partition=0/*.parquet")
        body = bytearray(path.read_bytes())
        body[40] ^= 1
        path.write_bytes(body)
        process = tidelog("query", "SELECT value FROM t", "--store", broker.store, status=1)
        assert "topics/t-" in error_line(process)
        assert "checksum" in error_line(process)
