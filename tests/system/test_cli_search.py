"""`tidelog search`: the records that have a text, from the store of a broker that runs."""

import json
from collections.abc import Iterator

import pytest

from tests.support.broker import Broker, error_line, tidelog

RECORDS = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """`t`: two partitions, half of them sealed, one record a second from 2020 on."""
    with Broker(tmp_path_factory.mktemp("searched")) as broker:
        broker.create_topic("t", 2)
        lines = [
            json.dumps(
                {
                    "key": f"k{n}",
                    "value": {"n": n, "kind": "odd" if n % 2 else "even"},
                    "partition": n % 2,
                    "timestamp": 1_577_836_800_000 + 1000 * n,
                    "headers": [{"key": "trace", "value": "aGVhZA=="}] if n == 7 else [],
                }
            )
            for n in range(RECORDS)
        ]
        broker.cli("produce", "t", "-f", "ndjson", stdin="\n".join(lines[:30]))
        broker.cli("seal", "t")
        broker.cli("produce", "t", "-f", "ndjson", stdin="\n".join(lines[30:]))
        yield broker


def output(broker: Broker, *words: str) -> list[str]:
    process = tidelog("search", "t", *words, "--store", broker.store)
    assert process.stderr == b""
    lines: list[str] = process.stdout.decode().splitlines()
    return lines


def test_the_newest_come_first_as_consume_prints_them(broker: Broker) -> None:
    found = [json.loads(line) for line in output(broker, '"even"', "--json")]
    assert [json.loads(record["value"])["n"] for record in found] == [*range(58, -1, -2)]
    consumed = broker.cli("consume", "t", "-p", "0", "--format", "text", "--json").stdout
    assert sorted(output(broker, '"even"', "--json")) == sorted(consumed.decode().splitlines())


def test_options(broker: Broker) -> None:
    assert output(broker, "odd", "-n", "1", "--key-separator", "|") == [
        '"k59"|{"n": 59, "kind": "odd"}'
    ]
    assert output(broker, "head", "--in", "headers", "-p", "1") == ['{"n": 7, "kind": "odd"}']
    assert output(broker, "^.k5[0-3]", "-r", "--in", "key", "--since", "@2020-01-01T00:00:52") == [
        '{"n": 53, "kind": "odd"}',
        '{"n": 52, "kind": "even"}',
    ]
    assert output(broker, "nowhere") == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["t", "("], 1, "pattern '(': Invalid regular expression: missing ): ("),
        (["t", ""], 2, "TEXT is empty: every record has it"),
        (["t", "x", "-p", "2"], 4, "topic 't' has no partition 2: it has 0 to 1"),
        (["nope", "x"], 4, "topic 'nope' does not exist"),
    ],
)
def test_a_wrong_search_is_one_line(
    broker: Broker, words: list[str], status: int, said: str
) -> None:
    process = tidelog("search", *words, "-r", "--store", broker.store, status=status)
    assert error_line(process) == said
