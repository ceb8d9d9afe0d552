"""`tidelog produce` and `tidelog consume`: bytes, order, positions, and open streams."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broker import (
    Broker,
    environment,
    error_line,
    json_of,
    lines_of,
    running,
    until,
)

# -- produce, consume


def test_lines_are_kept_byte_for_byte(broker: Broker, topic: str) -> None:
    text = 'a\n\n  two  spaces\ttab \nüñí ☃\n"quoted" \\ back\nlast without end'
    process = broker.cli("produce", topic, stdin=text)
    assert "produced 6 records" in process.stdout.decode()
    assert broker.cli("consume", topic).stdout.decode() == text + "\n"


def test_lines_need_not_be_text(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin=b"\xff\xfe\nplain\r\n")
    assert "try --format binary" in error_line(broker.cli("consume", topic, status=1))
    assert broker.cli("consume", topic, "-f", "binary").stdout == b"//4=\ncGxhaW4N\n"


def test_crlf_removes_a_carriage_return_at_the_end_of_a_line(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, "--crlf", stdin=b"a\rb\r\nc\r")
    assert broker.cli("consume", topic).stdout == b"a\rb\nc\n"


def test_keys_and_values(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, "--key-separator", "=>", stdin="k=>v=>w\n=>empty key\n")
    shown = broker.cli("consume", topic, "--key-separator", "=>").stdout
    assert shown == b"k=>v=>w\n=>empty key\n"
    assert [(r["key"], r["value"]) for r in broker.records(topic)] == [
        ("k", "v=>w"),
        ("", "empty key"),
    ]


def test_a_file_of_many_lines_in_many_requests(broker: Broker, tmp_path: Path) -> None:
    name = "many"
    broker.create_topic(name, partitions=6)
    lines = [f"key{number % 97}:{number}" for number in range(20_000)]
    file = tmp_path / "lines"
    file.write_text("\n".join(lines) + "\n")
    limits = ["--batch-records", "700", "--batch-bytes", "20000", "--in-flight", "4"]
    process = broker.cli("produce", name, str(file), "--key-separator", ":", *limits, "--json")
    result = json_of(process)
    assert (result["records"], result["input_bytes"]) == (len(lines), file.stat().st_size)
    assert result["requests"] >= len(lines) // 700
    assert sum(span["end"] - span["first"] for span in result["offsets"].values()) == len(lines)

    records = broker.records(name)
    assert sorted(int(record["value"]) for record in records) == list(range(len(lines)))
    for partition in range(6):
        # More than the order of each key: all of a partition lie in the order of the input.
        partition_records = [r for r in records if r["partition"] == partition]
        assert [r["offset"] for r in partition_records] == list(range(len(partition_records)))
        values = [int(r["value"]) for r in partition_records]
        assert values == sorted(values)
    homes = {(r["key"], r["partition"]) for r in records}
    assert len(homes) == 97


def test_lines_without_keys_stay_in_order_and_use_all_partitions(broker: Broker) -> None:
    name = "unkeyed"
    broker.create_topic(name, partitions=3)
    text = "".join(f"{number}\n" for number in range(5000))
    broker.cli("produce", name, "--batch-records", "200", stdin=text)
    records = broker.records(name)
    assert len(records) == 5000
    for partition in range(3):
        values = [int(r["value"]) for r in records if r["partition"] == partition]
        assert values == sorted(values)
        assert len(values) > 1000


def test_lines_to_one_partition(broker: Broker) -> None:
    name = "third"
    broker.create_topic(name, partitions=3)
    broker.cli("produce", name, "--partition", "2", "--key-separator", ":", stdin="a:1\nb:2\n")
    assert {record["partition"] for record in broker.records(name)} == {2}
    assert "partition" in error_line(broker.cli("produce", name, "-p", "3", stdin="x", status=4))


@pytest.mark.parametrize("acks", ["all", "1", "0"])
def test_acks(broker: Broker, topic: str, acks: str) -> None:
    result = json_of(broker.cli("produce", topic, "--acks", acks, "--json", stdin="a\nb\n"))
    assert result["records"] == 2
    assert result["offsets"] == ({"0": {"first": 0, "end": 2}} if acks == "all" else {})
    until(lambda: broker.high_watermark(topic) == 2)


def test_whole_records_go_from_topic_to_topic(broker: Broker) -> None:
    for name in ("from", "to"):
        broker.create_topic(name, partitions=3)
    records = [
        {"key": "a", "value": {"n": 1, "x": [True, None]}, "timestamp": 1_700_000_000_000},
        {"key": {"id": 7}, "value": "text", "partition": 2},
        {"value": None, "key": "tombstone", "partition": 2},
        {"value": 1.5, "partition": 2, "headers": [{"key": "h", "value": "aGVhZA=="}]},
    ]
    text = "\n\n".join(json.dumps(record) for record in records)
    broker.cli("produce", "from", "--format", "ndjson", stdin=text)
    copied = broker.cli("consume", "from", "--format", "ndjson").stdout
    first = [json.loads(line) for line in copied.splitlines()]
    assert len(first) == 4
    last = [(r["key"], r["value"], r.get("headers")) for r in first if r["partition"] == 2][-2:]
    headers = [{"key": "h", "value": "aGVhZA=="}]
    assert last == [("tombstone", None, None), (None, 1.5, headers)]
    assert next(r for r in first if r["key"] == "a")["timestamp"] == 1_700_000_000_000

    broker.cli("produce", "to", "--format", "ndjson", stdin=copied)
    second = lines_of(broker.cli("consume", "to", "--json"))
    ordered = sorted(second, key=lambda r: (r["partition"], r["offset"]))
    expected = sorted(first, key=lambda r: (r["partition"], r["offset"]))
    assert ordered == [{**record, "topic": "to"} for record in expected]


def test_a_copy_to_another_number_of_partitions(broker: Broker) -> None:
    for name, partitions in (("wide", 5), ("narrow", 1), ("wider", 7)):
        broker.create_topic(name, partitions)
    text = "".join(json.dumps({"key": f"k{n}", "value": n}) + "\n" for n in range(100))
    broker.cli("produce", "wide", "-f", "ndjson", stdin=text)
    copied = broker.cli("consume", "wide", "--json").stdout
    words = ("-f", "ndjson", "--ignore-partition")
    broker.cli("produce", "narrow", *words, stdin=copied)
    assert sorted(int(record["value"]) for record in broker.records("narrow")) == [*range(100)]
    broker.cli("produce", "wider", *words, stdin=copied)
    broker.create_topic("chosen", 7)
    broker.cli("produce", "chosen", "-f", "ndjson", stdin=text)
    placed = [
        {(record["key"], record["partition"]) for record in broker.records(name)}
        for name in ("wider", "chosen")
    ]
    assert placed[0] == placed[1], "the partitions are those of the keys"
    assert {partition for _, partition in placed[0]} == {*range(7)}
    refused = broker.cli("produce", "narrow", "-f", "ndjson", stdin=copied, status=4)
    assert "partition" in error_line(refused)
    assert "needs --format ndjson" in error_line(
        broker.cli("produce", "narrow", "--ignore-partition", status=2)
    )


def test_headers_are_texts_by_name_or_a_list(broker: Broker, topic: str) -> None:
    header_sets = (
        {"source": "shop", "empty": None, "ü": "☃"},
        [{"key": "source", "value": "c2hvcA=="}, {"key": "source", "value": None}],
        {},
    )
    text = "".join(json.dumps({"value": 1, "headers": headers}) + "\n" for headers in header_sets)
    broker.cli("produce", topic, "-f", "ndjson", stdin=text)
    stored = lines_of(broker.cli("consume", topic, "--json"))
    assert [record.get("headers") or [] for record in stored] == [
        [
            {"key": "source", "value": "c2hvcA=="},
            {"key": "empty", "value": None},
            {"key": "ü", "value": "4piD"},
        ],
        header_sets[1],
        [],
    ]
    wrong = json.dumps({"value": 1, "headers": {"n": 1}})
    result = error_line(broker.cli("produce", topic, "-f", "ndjson", stdin=wrong, status=1))
    assert "line 1: not a record" in result
    shown = " ".join(broker.cli("produce", "--help").stdout.decode().split())
    assert '{"key": "k1", "value": {"n": 1}, "headers": {"source": "shop"}}' in shown


@pytest.mark.parametrize("embedded", ["text", "binary"])
def test_records_of_any_bytes_go_from_topic_to_topic(broker: Broker, embedded: str) -> None:
    source, target = f"from-{embedded}", f"to-{embedded}"
    for name in (source, target):
        broker.create_topic(name, partitions=4)
    broker.cli("produce", source, "--key-separator", "|", stdin="ü|1\nb|☃\nc|\n")
    copied = broker.cli("consume", source, "--json", "-f", embedded).stdout
    broker.cli("produce", target, "-f", "ndjson", "--embedded", embedded, stdin=copied)
    again = broker.cli("consume", target, "--json", "-f", embedded).stdout
    assert sorted(again.replace(target.encode(), source.encode()).splitlines()) == sorted(
        copied.splitlines()
    )


def test_keys_without_a_partition_find_the_one_that_the_broker_chooses(broker: Broker) -> None:
    """The client hashes keys to keep order; the broker decides. They must agree."""
    name = "agree"
    broker.create_topic(name, partitions=5)
    records = [json.dumps({"key": f"k{n}", "value": n}) for n in range(200)]
    limits = ["--batch-records", "10", "--in-flight", "5"]
    broker.cli("produce", name, "-f", "ndjson", *limits, stdin="\n".join(records))
    for partition in range(5):
        shown = broker.cli("consume", name, "-p", str(partition), "-f", "json").stdout.split()
        assert shown == sorted(shown, key=int)


def test_values_of_any_json(broker: Broker, topic: str) -> None:
    values = ['{"a": 1}', "[1,2]", '"s"', "1", "true", "null"]
    broker.cli("produce", topic, "-f", "ndjson", "--values", stdin="\n".join(values))
    shown = broker.cli("consume", topic, "-f", "json").stdout.decode()
    assert shown.splitlines() == values


@pytest.mark.parametrize(
    ("options", "line", "words"),
    [
        (["-f", "ndjson"], "{", "not a record"),
        (["-f", "ndjson"], '{"value":1,"valeu":2}', "valeu"),
        (["-f", "ndjson", "--embedded", "text"], '{"key":1,"value":"x"}', "not a record"),
        (["-f", "ndjson", "--values"], "nul", "not JSON"),
        (["--key-separator", ":"], "no separator", "':'"),
    ],
)
def test_a_bad_line_is_named(
    broker: Broker, topic: str, options: list[str], line: str, words: str
) -> None:
    good = "k:v" if "--key-separator" in options else '{"value":"1"}'
    process = broker.cli("produce", topic, *options, stdin=f"{good}\n{good}\n{line}\n", status=1)
    result = error_line(process)
    assert "line 3" in result
    assert "2 records acknowledged" in result
    assert broker.high_watermark(topic) == 2, "the lines before it are produced"
    assert words in result
    assert "acknowledged" in result


@pytest.fixture(scope="module")
def hundred(broker: Broker) -> str:
    """A topic whose one partition holds 0 to 99, stamped second by second from 2020 on."""
    broker.create_topic("hundred")
    records = [{"value": n, "timestamp": 1_577_836_800_000 + 1000 * n} for n in range(100)]
    text = "\n".join(map(json.dumps, records))
    broker.cli("produce", "hundred", "-f", "ndjson", stdin=text)
    return "hundred"


@pytest.mark.parametrize(
    ("options", "first", "end"),
    [
        ([], 0, 100),
        (["--from", "beginning"], 0, 100),
        (["--from", "end"], 0, 0),
        (["--from", "42"], 42, 100),
        (["--from", "1000"], 0, 0),
        (["--until", "42"], 0, 42),
        (["--from", "10", "--until", "42"], 10, 42),
        (["--from", "10", "--until", "5"], 0, 0),
        (["--from", "10", "--max", "7"], 10, 17),
        (["--max", "0"], 0, 0),
        (["--from", "@2020-01-01T00:00:30Z"], 30, 100),
        (["--from", "@2020-01-01T00:00:29.500+00:00"], 30, 100),
        (["--from", "@2020-01-01", "--until", "@2020-01-01T01:01:00+01:00"], 0, 60),
        (["--from", "@2021-01-01"], 0, 0),
        (["--from", "5", "--fetch-bytes", "10", "--until", "77"], 5, 77),
    ],
    ids=str,
)
def test_where_to_start_and_end(
    broker: Broker, hundred: str, options: list[str], first: int, end: int
) -> None:
    shown = broker.cli("consume", hundred, *options).stdout.split()
    assert [int(value) for value in shown] == list(range(first, end))
    records = lines_of(broker.cli("consume", hundred, *options, "--json"))
    assert [record["offset"] for record in records] == list(range(first, end))


def test_some_partitions(broker: Broker) -> None:
    broker.create_topic("some", partitions=3)
    text = "\n".join(json.dumps({"value": n, "partition": n % 3}) for n in range(9))
    broker.cli("produce", "some", "-f", "ndjson", stdin=text)
    shown = broker.cli("consume", "some", "-p", "0", "--partition", "2").stdout.split()
    assert sorted(map(int, shown)) == [0, 2, 3, 5, 6, 8]
    assert "partition" in error_line(broker.cli("consume", "some", "-p", "3", status=4))


def test_a_reader_that_has_enough_is_no_error(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="line\n" * 50_000)
    command = [sys.executable, "-m", "tidelog.service.cli", "consume", topic]
    with subprocess.Popen(
        command,
        env=environment(TIDELOG_URL=broker.base_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as consuming:
        assert consuming.stdout is not None
        assert consuming.stderr is not None
        assert consuming.stdout.readline() == b"line\n"
        consuming.stdout.close()
        assert consuming.wait(30) == 0
        assert consuming.stderr.read() == b""


def test_following_prints_what_comes_and_ends_when_interrupted(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="before\n")
    with running(broker, "consume", topic, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"before\n"
        for text in (b"one\n", b"two\n"):
            broker.cli("produce", topic, stdin=text)
            assert following.stdout.readline() == text
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130


def test_following_ends_at_what_was_asked_for(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="0\n1\n")
    with (
        running(broker, "consume", topic, "--follow", "--until", "4") as until,
        running(broker, "consume", topic, "--follow", "--max", "3") as few,
    ):
        broker.cli("produce", topic, stdin="2\n3\n4\n")
        assert until.communicate(timeout=200) == (b"0\n1\n2\n3\n", b"")
        assert few.communicate(timeout=200) == (b"0\n1\n2\n", b"")
        assert (until.returncode, few.returncode) == (0, 0)


def test_a_line_does_not_wait_for_the_end_of_the_input(broker: Broker, topic: str) -> None:
    with running(broker, "produce", topic) as producing:
        assert producing.stdin is not None
        for number in range(1, 4):
            producing.stdin.write(b"line\n")
            producing.stdin.flush()
            until(lambda wanted=number: broker.high_watermark(topic) == wanted)
        producing.send_signal(signal.SIGINT)
        assert producing.wait(30) == 130
        assert producing.stderr is not None
        # The watermark may move before the answer to the last line arrives: it is unknown then.
        assert producing.stderr.read() in (
            b"tidelog: interrupted: 3 records acknowledged\n",
            b"tidelog: interrupted: 2 records acknowledged, "
            b"1 record without an answer may be in the topic\n",
        )


# -- records that do not decode


@pytest.fixture
def mixed(broker: Broker, topic: str) -> str:
    """A topic of two partitions: text and one record that is none; text alone."""
    name = f"{topic}-mixed"
    broker.create_topic(name, partitions=2)
    broker.cli("produce", name, "-p", "0", stdin=b"a\n\xff\nb\n")
    broker.cli("produce", name, "-p", "1", stdin="x\ny\n")
    return name


def test_consume_stops_skips_or_shows_bytes(broker: Broker, mixed: str) -> None:
    process = broker.cli("consume", mixed, status=1)
    assert sorted(process.stdout.split()) == [b"a", b"x", b"y"]
    error = error_line(process)
    assert f"partition {mixed}-0, offset 1" in error
    assert "--on-error skip" in error
    process = broker.cli("consume", mixed, "--on-error", "skip")
    assert sorted(process.stdout.split()) == [b"a", b"b", b"x", b"y"]
    assert error_line(process) == f"skipped records that do not decode: 1, first {mixed}-0@1"
    process = broker.cli("consume", mixed, "-p", "0", "--on-error", "raw")
    assert process.stdout == b"a\n/w==\nb\n"
    process = broker.cli("consume", mixed, "-p", "0", "--on-error", "raw", "--json", "-f", "text")
    assert [record.get("value_base64") for record in lines_of(process)] == [None, "/w==", None]


def test_escape_and_dead_letters(broker: Broker, mixed: str) -> None:
    process = broker.cli("consume", mixed, "-p", "0", "--on-error", "escape")
    assert process.stdout == b"a\n\\xff\nb\n"
    process = broker.cli(
        "consume", mixed, "-p", "0", "--on-error", "escape", "--json", "-f", "text"
    )
    assert [record["value"] for record in lines_of(process)] == ["a", "\\xff", "b"]
    target = f"{mixed}-dead"
    broker.create_topic(target)
    for options in ([], ["--group", f"{mixed}-letters"]):
        process = broker.cli("consume", mixed, "--dead-letter", target, *options)
        assert sorted(process.stdout.split()) == [b"a", b"b", b"x", b"y"]
        assert error_line(process).endswith(f", sent to topic {target}: 1, first {mixed}-0@1")
    letters = lines_of(broker.cli("consume", target, "--json", "-f", "binary"))
    assert [record["value"] for record in letters] == ["/w==", "/w=="]
    names = [header["key"] for header in letters[0]["headers"]]
    assert names == ["tidelog.source", "tidelog.error"]
    lag = json_of(broker.cli("groups", "lag", f"{mixed}-letters", "--json"))
    assert lag["lag"] == 0
    refused = broker.cli("consume", mixed, "--dead-letter", target, "--on-error", "skip", status=2)
    assert "exclude" in error_line(refused)


def test_a_follower_ends_when_the_other_partitions_are_printed(broker: Broker, mixed: str) -> None:
    process = broker.cli("consume", mixed, "--follow", status=1)
    assert sorted(process.stdout.split()) == [b"a", b"x", b"y"]
    assert f"partition {mixed}-0, offset 1" in error_line(process)


def test_a_member_stops_or_skips(broker: Broker, mixed: str) -> None:
    process = broker.cli("consume", mixed, "-g", f"{mixed}-readers", status=1)
    assert sorted(process.stdout.split()) == [b"a", b"x", b"y"]
    assert f"partition {mixed}-0, offset 1" in error_line(process)
    process = broker.cli("consume", mixed, "-g", f"{mixed}-readers", "--on-error", "skip")
    assert process.stdout == b"b\n", "the group continues where it was"
    assert f"first {mixed}-0@1" in error_line(process)
    process = broker.cli("consume", mixed, "-g", f"{mixed}-others", "--on-error", "raw")
    assert sorted(process.stdout.split()) == [b"/w==", b"a", b"b", b"x", b"y"]
