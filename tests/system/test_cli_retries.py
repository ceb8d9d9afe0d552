"""`tidelog produce` when things go wrong on the way: nothing is lost, nothing doubled."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.broker import Broker, error_line, json_of, running, tidelog, until


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
            until(lambda: sum(broker.high_watermark("t", p) for p in range(3)) > 100)
            broker.kill()
            say(range(2000, 4000))
            time.sleep(0.5)
            broker.start()
            output, errors = producing.communicate(timeout=200)
            assert producing.returncode == 0, errors
        assert json.loads(output)["records"] == 4000
        assert json.loads(output)["retries"] > 0
        records = broker.records("t")
        assert sorted(int(record["value"]) for record in records) == list(range(4000))
        for partition in range(3):
            values = [int(r["value"]) for r in records if r["partition"] == partition]
            assert values == sorted(values)


def test_following_goes_on_when_the_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t")
        broker.cli("produce", "t", stdin="before\n")
        with running(broker, "consume", "t", "--follow", "--max", "2") as following:
            assert following.stdout is not None
            assert following.stdout.readline() == b"before\n"
            broker.restart()
            broker.cli("produce", "t", stdin="after\n")
            assert following.communicate(timeout=200) == (b"after\n", b"")
            assert following.returncode == 0


class Stub:
    """A server that refuses the first produce requests with given answers, and records requests."""

    def __init__(self, *refusals: tuple[int, dict[str, str]]) -> None:
        self.refusals = list(refusals)
        self.told = b'[{"partition":0}]'
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lingers: list[str | None] = []
        self.seen: list[tuple[str | None, bytes, float]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, stub.told, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                stub.seen.append((self.headers["idempotency-key"], body, time.monotonic()))
                stub.lingers.append(self.headers["linger"])
                stub.may_answer.wait()
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
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["Stub"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.may_answer.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def test_an_interrupted_command_says_how_many_records_have_no_answer() -> None:
    with Stub().serving() as stub:
        stub.may_answer.clear()
        with running(stub, "produce", "t") as producing:
            assert producing.stdin is not None
            assert producing.stderr is not None
            producing.stdin.write(b"x\n")
            producing.stdin.flush()
            until(lambda: len(stub.seen) == 1)
            producing.send_signal(signal.SIGINT)
            assert producing.wait(30) == 130
            assert producing.stderr.read() == (
                b"tidelog: interrupted: 0 records acknowledged, "
                b"1 record without an answer may be in the topic\n"
            )


def test_broker_may_hold_records_for_as_long_as_the_command_says() -> None:
    with Stub().serving() as stub:
        for options in ([], ["--flush-ms", "2500"]):
            tidelog("produce", "t", *options, "--server", stub.base_url, stdin="x\n")
    assert stub.lingers == [None, "2.500"]


def test_what_may_succeed_later_is_repeated_with_the_same_key() -> None:
    refusals = [(503, {}), (429, {"Retry-After": "1"}), (504, {}), (502, {})]
    with Stub(*refusals).serving() as stub:
        process = tidelog("produce", "t", "--server", stub.base_url, "--json", stdin="x\n")
    output = json_of(process)
    assert (output["records"], output["retries"]) == (1, 4)
    assert output["offsets"] == {"0": {"first": 7, "end": 8}}
    assert len(stub.seen) == 5
    assert len({(key, body) for key, body, _ in stub.seen}) == 1
    assert stub.seen[0][0]
    waited_s = stub.seen[2][2] - stub.seen[1][2]
    assert waited_s >= 1.0, "Retry-After was not honoured"


@pytest.mark.parametrize(("status", "exit_status"), [(503, 3), (504, 3), (429, 1)])
def test_giving_up_says_so(status: int, exit_status: int) -> None:
    with Stub(*[(status, {})] * 50).serving() as stub:
        arguments = ["produce", "t", "--server", stub.base_url, "--retry-s", "0.5"]
        process = tidelog(*arguments, stdin="x\n", status=exit_status)
    assert "not now (0 records acknowledged)" in error_line(process)
    assert 2 <= len(stub.seen) < 10


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_definite_no_is_not_repeated(status: int) -> None:
    with Stub((status, {})).serving() as stub:
        process = tidelog("produce", "t", "--server", stub.base_url, stdin="x\n", status=1)
    assert "not now" in error_line(process)
    assert len(stub.seen) == 1


def test_requests_of_two_runs_have_different_keys() -> None:
    with Stub().serving() as stub:
        for _ in range(2):
            tidelog("produce", "t", "--server", stub.base_url, stdin="x\n")
    assert len({key for key, _, _ in stub.seen}) == 2


@pytest.mark.parametrize("command", [["produce", "t"], ["consume", "t"], ["topics", "list"]])
def test_a_server_that_is_no_broker_is_said_to_be_none(command: list[str]) -> None:
    stub = Stub()
    stub.told = b"<html>It works!</html>"
    with stub.serving():
        process = tidelog(*command, "--server", stub.base_url, status=1)
    assert "is not a tidelog broker" in error_line(process)
