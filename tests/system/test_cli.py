"""`tidelog` as processes against a broker process: what it does, prints, and exits with."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from service.cli_results import EXIT_STATUSES
from service.settings import Settings
from tests.support.broker import Broker, environment, error_line, tidelog
from tests.support.ports import free_port

_numbers = count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for what leaves it as it was: topics have names of their own."""
    with Broker(tmp_path_factory.mktemp("cli")) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with one partition."""
    name = f"t{next(_numbers)}"
    broker.create_topic(name)
    return name


def json_of(done: subprocess.CompletedProcess[bytes]) -> Any:
    return json.loads(done.stdout)


def lines_of(done: subprocess.CompletedProcess[bytes]) -> list[Any]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# -- the command itself


def test_help_names_commands_and_exit_statuses() -> None:
    told = tidelog("--help").stdout.decode()
    for command in ("serve", "topics", "produce", "consume", "replay", "seal", "status"):
        assert f"\n  {command} " in told
    for status, meaning in EXIT_STATUSES.items():
        assert f"{status}  {meaning}" in told


def test_every_setting_is_a_flag_of_serve() -> None:
    told = " ".join(tidelog("serve", "--help").stdout.decode().split())
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in told
        assert f"TIDELOG_{field.name.upper()}" in told.replace(" ", "")


def test_the_command_line_loads_nothing_that_is_slow() -> None:
    slow = ["deltalake", "fastapi", "httpx", "numpy", "pandas", "pyarrow", "pyspark", "uvicorn"]
    code = f"import sys, service.cli; print(sorted(set({slow}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_without_a_command_it_says_which_there_are() -> None:
    assert "Commands:" in tidelog(status=2).stdout.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nope"],
        ["bogus"],
        ["topics", "bogus"],
        ["topics", "create"],
        ["topics", "create", "t", "--partitions", "none"],
        ["topics", "create", "t", "--partitions", "0"],
        ["topics", "create", "t", "--config", "segment.ms"],
        ["topics", "alter", "t"],
        ["topics", "delete", "t"],
        ["topics", "list", "--server", "localhost:8082"],
        ["produce"],
        ["produce", "t", "/no/such/file"],
        ["produce", "t", "--format", "avro"],
        ["produce", "t", "--values"],
        ["produce", "t", "--acks", "2"],
        ["produce", "t", "--format", "ndjson", "--key-separator", ":"],
        ["consume", "t", "--from", "yesterday"],
        ["consume", "t", "--from", "@yesterday"],
        ["consume", "t", "--until", "-1"],
        ["consume", "t", "--json", "--key-separator", ":"],
        ["replay", "t"],
        ["replay", "t", "--to", "d", "--as", "orc"],
        ["replay", "t", "--to", "d", "--from", "17"],
        ["serve", "--port", "x"],
        ["serve", "--port", "70000"],
        ["serve", "--wal-codec", "rar"],
        ["serve", "--wal-retention-ms", "4000"],
        ["serve", "--sealing", "--nope"],
        ["serve", "./a", "--store", "./b"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str]) -> None:
    done = tidelog(*arguments, status=2)
    assert error_line(done)
    assert not done.stdout


def test_a_wrong_variable_is_wrong_usage() -> None:
    assert "TIDELOG_PROT" in error_line(tidelog("serve", status=2, TIDELOG_PROT="1"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "list"],
        ["topics", "create", "t"],
        ["topics", "describe", "t"],
        ["topics", "alter", "t", "--partitions", "3"],
        ["topics", "delete", "t", "--yes"],
        ["produce", "t"],
        ["consume", "t"],
        ["seal", "t"],
        ["status"],
    ],
    ids=" ".join,
)
def test_a_broker_that_is_not_there_is_status_3(arguments: list[str]) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    assert server in error_line(tidelog(*arguments, "--server", server, status=3))


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "describe", "nope"],
        ["topics", "alter", "nope", "--partitions", "3"],
        ["topics", "delete", "nope", "--yes"],
        ["produce", "nope"],
        ["consume", "nope"],
        ["consume", "nope", "--partition", "0"],
        ["seal", "nope"],
    ],
    ids=" ".join,
)
def test_a_topic_that_is_not_there_is_status_4(broker: Broker, arguments: list[str]) -> None:
    assert error_line(broker.cli(*arguments, stdin="x\n", status=4))


# -- topics


def test_the_life_of_a_topic(broker: Broker) -> None:
    name = "life"
    made = broker.cli("topics", "create", name, "-p", "3", "-c", "segment.ms=60000", "--json")
    assert json_of(made) == {"name": name, "partitions": 3}
    assert {"name": name, "partitions": 3} in json_of(broker.cli("topics", "list", "--json"))
    assert f"{name} " in broker.cli("topics", "list").stdout.decode()

    broker.cli("produce", name, stdin="a\nb\n")
    told = json_of(broker.cli("topics", "describe", name, "--json"))
    assert told["name"] == name
    assert [part["partition"] for part in told["partitions"]] == [0, 1, 2]
    assert sum(part["high_watermark"] for part in told["partitions"]) == 2
    assert {part["log_start_offset"] for part in told["partitions"]} == {0}
    assert told["configs"]["segment.ms"] == {"value": "60000", "is_default": False}
    assert told["configs"]["cleanup.policy"] == {"value": "delete", "is_default": True}
    assert "segment.ms" in broker.cli("topics", "describe", name).stdout.decode()

    changes = ["-c", "retention.ms=1000", "--unset", "segment.ms", "--partitions", "4"]
    broker.cli("topics", "alter", name, *changes)
    told = json_of(broker.cli("topics", "describe", name, "--json"))
    assert len(told["partitions"]) == 4
    assert told["configs"]["retention.ms"]["value"] == "1000"
    assert told["configs"]["segment.ms"]["is_default"]

    broker.cli("topics", "delete", name, "--yes")
    assert name not in [each["name"] for each in json_of(broker.cli("topics", "list", "--json"))]


def test_what_the_broker_refuses_is_status_1(broker: Broker, topic: str) -> None:
    for arguments, words in [
        (["create", topic], "already exists"),
        (["create", "new", "-c", "nope=1"], "nope"),
        (["create", "new", "-c", "segment.ms=soon"], "segment.ms"),
        (["create", "a b"], "illegal"),
        (["alter", topic, "--partitions", "1"], "partition"),
        (["alter", topic, "--unset", "nope"], "nope"),
    ]:
        assert words in error_line(broker.cli("topics", *arguments, status=1))


# -- produce, consume


def test_lines_are_kept_byte_for_byte(broker: Broker, topic: str) -> None:
    text = 'a\n\n  two  spaces\ttab \nüñí ☃\n"quoted" \\ back\nlast without end'
    done = broker.cli("produce", topic, stdin=text)
    assert "produced 6 records" in done.stdout.decode()
    assert broker.cli("consume", topic).stdout.decode() == text + "\n"


def test_lines_need_not_be_text(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin=b"\xff\xfe\nplain\r\n")
    assert "try --format binary" in error_line(broker.cli("consume", topic, status=1))
    assert broker.cli("consume", topic, "-f", "binary").stdout == b"//4=\ncGxhaW4=\n"


def test_keys_and_values(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, "--key-separator", "=>", stdin="k=>v=>w\n=>empty key\n")
    shown = broker.cli("consume", topic, "--key-separator", "=>").stdout
    assert shown == b"k=>v=>w\n=>empty key\n"
    assert [(r["key"], r["value"]) for r in _text_records(broker, topic)] == [
        ("k", "v=>w"),
        ("", "empty key"),
    ]


def _text_records(broker: Broker, topic: str, *options: str) -> list[Any]:
    return lines_of(broker.cli("consume", topic, "--json", "-f", "text", *options))


def test_a_file_of_many_lines_in_many_requests(broker: Broker, tmp_path: Path) -> None:
    name = "many"
    broker.create_topic(name, partitions=6)
    lines = [f"key{number % 97}:{number}" for number in range(20_000)]
    file = tmp_path / "lines"
    file.write_text("\n".join(lines) + "\n")
    limits = ["--batch-records", "700", "--batch-bytes", "20000", "--in-flight", "4"]
    done = broker.cli("produce", name, str(file), "--key-separator", ":", *limits, "--json")
    said = json_of(done)
    assert (said["records"], said["input_bytes"]) == (len(lines), file.stat().st_size)
    assert said["requests"] >= len(lines) // 700
    assert sum(each["end"] - each["first"] for each in said["offsets"].values()) == len(lines)

    records = _text_records(broker, name)
    assert sorted(int(record["value"]) for record in records) == list(range(len(lines)))
    for partition in range(6):
        # More than the order of each key: all of a partition lie in the order of the input.
        held = [r for r in records if r["partition"] == partition]
        assert [r["offset"] for r in held] == list(range(len(held)))
        values = [int(r["value"]) for r in held]
        assert values == sorted(values)
    homes = {(r["key"], r["partition"]) for r in records}
    assert len(homes) == 97


def test_lines_without_keys_stay_in_order_and_use_all_partitions(broker: Broker) -> None:
    name = "unkeyed"
    broker.create_topic(name, partitions=3)
    text = "".join(f"{number}\n" for number in range(5000))
    broker.cli("produce", name, "--batch-records", "200", stdin=text)
    records = _text_records(broker, name)
    assert len(records) == 5000
    for partition in range(3):
        values = [int(r["value"]) for r in records if r["partition"] == partition]
        assert values == sorted(values)
        assert len(values) > 1000


def test_lines_to_one_partition(broker: Broker) -> None:
    name = "third"
    broker.create_topic(name, partitions=3)
    broker.cli("produce", name, "--partition", "2", "--key-separator", ":", stdin="a:1\nb:2\n")
    assert {record["partition"] for record in _text_records(broker, name)} == {2}
    assert "partition" in error_line(broker.cli("produce", name, "-p", "3", stdin="x", status=4))


@pytest.mark.parametrize("acks", ["all", "1", "0"])
def test_acks(broker: Broker, topic: str, acks: str) -> None:
    said = json_of(broker.cli("produce", topic, "--acks", acks, "--json", stdin="a\nb\n"))
    assert said["records"] == 2
    assert said["offsets"] == ({"0": {"first": 0, "end": 2}} if acks == "all" else {})
    _until(lambda: broker.high_watermark(topic) == 2)


def test_whole_records_go_from_topic_to_topic(broker: Broker) -> None:
    for name in ("from", "to"):
        broker.create_topic(name, partitions=3)
    given = [
        {"key": "a", "value": {"n": 1, "x": [True, None]}, "timestamp": 1_700_000_000_000},
        {"key": {"id": 7}, "value": "text", "partition": 2},
        {"value": None, "key": "tombstone", "partition": 2},
        {"value": 1.5, "partition": 2, "headers": [{"key": "h", "value": "aGVhZA=="}]},
    ]
    text = "\n\n".join(json.dumps(record) for record in given)
    broker.cli("produce", "from", "--format", "ndjson", stdin=text)
    copied = broker.cli("consume", "from", "--format", "ndjson").stdout
    first = [json.loads(line) for line in copied.splitlines()]
    assert len(first) == 4
    third, fourth = [r for r in first if r["value"] in {None, 1.5}] if False else first[-2:]
    assert (third["key"], third["value"]) == ("tombstone", None)
    assert (fourth["key"], fourth["headers"]) == (None, [{"key": "h", "value": "aGVhZA=="}])
    assert next(r for r in first if r["key"] == "a")["timestamp"] == 1_700_000_000_000

    broker.cli("produce", "to", "--format", "ndjson", stdin=copied)
    second = lines_of(broker.cli("consume", "to", "--json"))
    ordered = sorted(second, key=lambda r: (r["partition"], r["offset"]))
    expected = sorted(first, key=lambda r: (r["partition"], r["offset"]))
    assert ordered == [{**record, "topic": "to"} for record in expected]


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
    done = broker.cli("produce", topic, *options, stdin=f"{good}\n{good}\n{line}\n", status=1)
    said = error_line(done)
    assert "line 3" in said
    assert words in said
    assert "acknowledged" in said


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
    command = [sys.executable, "-m", "service.cli", "consume", topic]
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


@contextmanager
def running(broker: Broker, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on; ended by its id."""
    with subprocess.Popen(
        [sys.executable, "-m", "service.cli", *arguments],
        env=environment(TIDELOG_URL=broker.base_url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


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
        assert until.communicate(timeout=30) == (b"0\n1\n2\n3\n", b"")
        assert few.communicate(timeout=30) == (b"0\n1\n2\n", b"")
        assert (until.returncode, few.returncode) == (0, 0)


def test_a_line_does_not_wait_for_the_end_of_the_input(broker: Broker, topic: str) -> None:
    with running(broker, "produce", topic) as producing:
        assert producing.stdin is not None
        for number in range(1, 4):
            producing.stdin.write(b"line\n")
            producing.stdin.flush()
            _until(lambda wanted=number: broker.high_watermark(topic) == wanted)
        producing.send_signal(signal.SIGINT)
        assert producing.wait(30) == 130
        assert producing.stderr is not None
        assert b"3 records acknowledged" in producing.stderr.read()


def _until(is_done: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


# -- seal, status


def test_seal(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="a\nb\nc\n")
    assert json_of(broker.cli("seal", topic, "--json"))["sealed_records"] == 3
    assert "sealed 0 records" in broker.cli("seal", topic).stdout.decode()
    broker.cli("produce", topic, stdin="d\n")
    assert broker.cli("consume", topic).stdout == b"a\nb\nc\nd\n"


def test_status(broker: Broker) -> None:
    told = json_of(broker.cli("status", "--json"))
    assert told["server"] == broker.base_url
    assert told["brokers"] == [1]
    assert told["is_ready"]
    assert told["cluster_id"] in broker.cli("status").stdout.decode()


def test_a_trailing_slash_of_the_server_does_no_harm(broker: Broker) -> None:
    tidelog("status", "--server", broker.base_url + "/")


# -- nothing lost, nothing doubled


def test_produce_goes_on_when_the_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t", partitions=3)
        limits = ["--batch-records", "20", "--key-separator", ":", "--json"]
        with running(broker, "produce", "t", *limits) as producing:
            assert producing.stdin is not None

            def say(numbers: range) -> None:
                assert producing.stdin is not None
                text = "".join(f"key{number % 10}:{number}\n" for number in numbers)
                producing.stdin.write(text.encode())
                producing.stdin.flush()

            say(range(2000))
            _until(lambda: sum(broker.high_watermark("t", p) for p in range(3)) > 100)
            broker.kill()
            say(range(2000, 4000))
            time.sleep(0.5)
            broker.start()
            said, errors = producing.communicate(timeout=60)
            assert producing.returncode == 0, errors
        assert json.loads(said)["records"] == 4000
        assert json.loads(said)["retries"] > 0
        records = _text_records(broker, "t")
        assert sorted(int(record["value"]) for record in records) == list(range(4000))
        for partition in range(3):
            values = [int(r["value"]) for r in records if r["partition"] == partition]
            assert values == sorted(values)


class Stub:
    """A server that refuses the first produces as told, and remembers what it was sent."""

    def __init__(self, *refusals: tuple[int, dict[str, str]]) -> None:
        self.refusals = list(refusals)
        self.seen: list[tuple[str | None, bytes, float]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, b'[{"partition":0}]', {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                stub.seen.append((self.headers["idempotency-key"], body, time.monotonic()))
                if stub.refusals:
                    status, headers = stub.refusals.pop(0)
                    self.answer(status, b'{"error_code":1,"message":"not now"}', headers)
                else:
                    self.answer(200, b'{"offsets":[{"partition":0,"offset":7}]}', {})

            def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["Stub"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def test_what_may_succeed_later_is_repeated_with_the_same_key() -> None:
    refusals = [(503, {}), (429, {"Retry-After": "1"}), (504, {}), (502, {})]
    with Stub(*refusals).serving() as stub:
        done = tidelog("produce", "t", "--server", stub.url, "--json", stdin="x\n")
    said = json_of(done)
    assert (said["records"], said["retries"]) == (1, 4)
    assert said["offsets"] == {"0": {"first": 7, "end": 8}}
    assert len(stub.seen) == 5
    assert len({(key, body) for key, body, _ in stub.seen}) == 1
    assert stub.seen[0][0]
    waited_s = stub.seen[2][2] - stub.seen[1][2]
    assert waited_s >= 1.0, "Retry-After was not honoured"


@pytest.mark.parametrize(("status", "exit_status"), [(503, 3), (504, 3), (429, 1)])
def test_giving_up_says_so(status: int, exit_status: int) -> None:
    with Stub(*[(status, {})] * 50).serving() as stub:
        arguments = ["produce", "t", "--server", stub.url, "--retry-s", "0.5"]
        done = tidelog(*arguments, stdin="x\n", status=exit_status)
    assert "not now (0 records acknowledged)" in error_line(done)
    assert 2 <= len(stub.seen) < 10


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_definite_no_is_not_repeated(status: int) -> None:
    with Stub((status, {})).serving() as stub:
        done = tidelog("produce", "t", "--server", stub.url, stdin="x\n", status=1)
    assert "not now" in error_line(done)
    assert len(stub.seen) == 1


def test_requests_of_two_runs_have_different_keys() -> None:
    with Stub().serving() as stub:
        for _ in range(2):
            tidelog("produce", "t", "--server", stub.url, stdin="x\n")
    assert len({key for key, _, _ in stub.seen}) == 2


# -- serve


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The line after the log's; asserts that there is no traceback among them."""
    said = done.stderr.decode()
    assert "Traceback" not in said, said
    last = said.splitlines()[-1]
    assert last.startswith("tidelog: "), said
    return last


def serve(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    done = tidelog("serve", "--port", "0", *arguments, status=None, **variables)
    assert done.returncode not in {0, None}
    return done


def test_serve_on_a_store_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in ((tmp_path / "file").as_uri(), (tmp_path / "file" / "below").as_uri()):
        assert "file" in last_line(serve("--store", store))


def test_serve_on_a_store_without_permission() -> None:
    # The tests may run as root, for whom a folder's mode means nothing; /proc takes no folders.
    assert "/proc/tidelog" in last_line(serve("--store", "file:///proc/tidelog"))


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "file://host/x"])
def test_serve_on_a_url_that_is_no_store(url: str) -> None:
    assert "store" in last_line(serve(url))


def test_serve_on_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tidelog("serve", str(tmp_path), "--port", str(port), status=1)
    assert f"cannot listen on 127.0.0.1:{port}" in last_line(done)


def test_serve_refuses_another_cluster(broker: Broker) -> None:
    done = serve("--store", broker.store, "--cluster-id", "another")
    assert "another" in last_line(done)


def test_serve_takes_settings_from_variables_and_ends_politely(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with Broker(tmp_path, default_partitions=3, sealing=False) as broker:
        broker.cli("topics", "create", "t")
        assert json_of(broker.cli("topics", "list", "--json")) == [{"name": "t", "partitions": 3}]
        assert broker.stop() == 0
    assert store in broker.log()
    assert (tmp_path / "store").is_dir()


def test_a_broker_that_was_killed_comes_back_on_its_port(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        url = broker.base_url
        broker.create_topic("t")
        broker.cli("produce", "t", stdin="a\n")
        broker.kill()
        assert not broker.is_running
        broker.start()
        assert broker.base_url == url
        assert broker.cli("consume", "t").stdout == b"a\n"
        broker.restart()
        assert broker.cli("consume", "t").stdout == b"a\n"


# -- replay


def test_replay_of_what_is_not_there_does_not_start_spark(broker: Broker, tmp_path: Path) -> None:
    to = str(tmp_path / "out")
    done = tidelog("replay", "nope", "--store", broker.store, "--to", to, status=4)
    assert "nope" in error_line(done)
    missing = (tmp_path / "missing").as_uri()
    done = tidelog("replay", "t", "--store", missing, "--to", to, status=3)
    assert "missing" in error_line(done)
