"""tidelog.client and the commands on it, with real brokers: failover, signals, killed commands."""

import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker, environment, error_line, json_of, running, tidelog, until
from tests.support.threads import Threads
from tests.system.several import QUICK, brokers
from tidelog.client import Admin, Consumer, NotFound, Producer

ROUNDS = int(os.environ.get("CHURN_ROUNDS", "2"))
"""Rounds of the churn: 50 by hand."""


def urls(cluster: list[Broker]) -> str:
    return ",".join(broker.base_url.removeprefix("http://") for broker in cluster)


def test_when_brokers_end_nothing_is_lost(tmp_path: Path) -> None:
    """One producer and one member, while each broker is killed in turn and comes back."""
    with brokers(tmp_path, 3, **QUICK) as cluster:
        cluster[0].create_topic("t", 6)
        stop = threading.Event()
        sent = []

        def load() -> None:
            with Producer(urls(cluster[:2])) as producer:
                while not stop.is_set():
                    number = len(sent)
                    sent.append(producer.send("t", str(number), key=f"k{number % 50}"))
                    time.sleep(0.002)

        counts: collections.Counter[int] = collections.Counter()
        with (
            Threads(load, stop=stop) as loading,
            Consumer(urls(cluster[:2]), "t", group="g", session_timeout_ms=10_000) as consumer,
        ):
            for broker in cluster:
                until(
                    lambda: bool(counts.update(int(r.value) for r in consumer.poll(0.2)) or counts)
                )
                broker.kill()
                for _ in range(5):
                    counts.update(int(record.value) for record in consumer.poll(0.2))
                broker.start()
            loading.end()
            servers = consumer.asynchronous.connection.servers
            until(
                lambda: bool(
                    counts.update(int(record.value) for record in consumer.poll(0.2))
                    or (len(counts) == len(sent) and servers.learned)
                )
            )
        assert set(counts) == set(range(len(sent)))
        places = [(future.result().partition, future.result().offset) for future in sent]
        assert len(set(places)) == len(places)
        with Admin(urls(cluster)) as admin:
            assert sum(end for _, end in admin.offsets("t").values()) == len(sent), "none twice"
            assert sum(partition["lag"] for partition in admin.lag("g")) == 0


def test_several_servers_of_a_command(broker: Broker, topic: str) -> None:
    servers = f"127.0.0.1:9,{broker.base_url}"
    tidelog("produce", topic, "--server", servers, stdin="a\n")
    for options in ([], ["--group", topic]):
        assert tidelog("consume", topic, "--server", servers, *options).stdout == b"a\n"


# -- signals


@contextmanager
def member(broker: Broker, topic: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tidelog consume --group --follow` with its output in a file."""
    with (
        open(out, "wb") as file,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tidelog.service.cli", "consume", topic),
                *("--group", topic, "--follow", "--session-timeout-ms", "10000"),
                *(
                    "--client-id",
                    out.name,
                ),  # else the group holds the joins of a client that comes and goes
            ],
            env=environment(TIDELOG_URL=broker.base_url),
            stdout=file,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def members_of(broker: Broker, group: str) -> list[Any]:
    process = broker.cli("groups", "describe", group, "--json", status=None)
    if process.returncode == 4:  # without members and committed offsets, there is no group
        return []
    members: list[Any] = json_of(process)["members"]
    return members


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_group(broker: Broker, topic: str, number: int, status: int) -> None:
    broker.cli("produce", topic, stdin="a\n")
    with running(broker, "consume", topic, "--group", topic, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"a\n"
        following.send_signal(number)
        assert following.wait(30) == status
    assert members_of(broker, topic) == []
    assert json_of(broker.cli("groups", "lag", topic, "--json"))["lag"] == 0


def test_a_member_whose_reader_blocks_leaves_too(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="line\n" * 50_000)
    with running(broker, "consume", topic, "--group", topic, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"line\n"
        following.send_signal(signal.SIGTERM)
        assert following.wait(30) == 143
    assert members_of(broker, topic) == []


# -- members that come and go


class Churn(Threads):
    """Members of one group under a load, and what each of them has printed."""

    def __init__(self, broker: Broker, topic: str, folder: Path) -> None:
        super().__init__(self._load)
        self._broker, self._topic, self._folder = broker, topic, folder
        self.sent = 0
        self.exits: list[tuple[int, bytes]] = []
        self.stack: list[tuple[Any, subprocess.Popen[bytes]]] = []
        self.started = 0

    def _load(self) -> None:
        with Producer(self._broker.base_url, linger_ms=20) as producer:
            while not self._stop.is_set():
                for _ in range(5):
                    producer.send(self._topic, f"v{self.sent}", key=f"k{self.sent % 997}")
                    self.sent += 1
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.end()
        while self.stack:
            self.end_member(signal.SIGKILL)

    def start(self) -> None:
        """Start a member, and wait until it has joined."""
        name = f"out{self.started}"
        context = member(self._broker, self._topic, self._folder / name)
        self.started += 1
        self.stack.append((context, context.__enter__()))
        until(lambda: name in self._clients(), 60)

    def _clients(self) -> set[str]:
        with contextlib.suppress(NotFound), Admin(self._broker.base_url) as admin:
            return {consumer["client_id"] for consumer in admin.group(self._topic)["consumers"]}
        return set()

    def end_member(self, number: int) -> None:
        self.check()
        context, process = self.stack.pop(0)
        process.send_signal(number)
        status = process.wait(60)
        expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        if status != expected:
            assert process.stderr is not None
            self.exits.append((status, process.stderr.read()))
        context.__exit__(None, None, None)

    def check(self) -> None:
        """Note members that ended by themselves."""
        for pair in list(self.stack):
            if pair[1].poll() is not None:
                assert pair[1].stderr is not None
                self.exits.append((pair[1].returncode, pair[1].stderr.read()))
                self.stack.remove(pair)
                pair[0].__exit__(None, None, None)

    def printed(self) -> collections.Counter[bytes]:
        counts: collections.Counter[bytes] = collections.Counter()
        for number in range(self.started):
            counts.update((self._folder / f"out{number}").read_bytes().splitlines())
        return counts


@pytest.mark.slow
def test_members_come_and_go_by_any_signal(tmp_path: Path) -> None:
    """1 to 2 to 3 to 1 members on 64 partitions: none exits by itself, and no record is missing."""
    rng = random.Random(7)
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    with Broker(tmp_path / "broker") as broker:
        broker.create_topic("churn", 64)
        with Churn(broker, "churn", tmp_path) as churn:
            for round in range(ROUNDS):
                while len(churn.stack) < 3:
                    churn.start()
                    time.sleep(0.3)
                    churn.check()
                if round % 10 == 5:
                    broker.restart()
                while len(churn.stack) > 1:
                    churn.end_member(signals[rng.randrange(3)])
                    time.sleep(0.5)
                    churn.check()
            churn.end()
            values = {f"v{number}".encode() for number in range(churn.sent)}
            until(lambda: set(churn.printed()) == values, 120)
            churn.check()
            assert churn.exits == []
            printed = churn.printed()
            repeats = sum(count - 1 for count in printed.values())
            print(f"rounds {ROUNDS}, members {churn.started}, sent {churn.sent}, twice {repeats}")


# -- produce --state


def lines_in(state: Path) -> int:
    """The number of lines that are in the topic, as the state file says."""
    return int(json.loads(state.read_text())["lines"]) if state.exists() else 0


def test_a_killed_command_goes_on_where_it_was(broker: Broker, tmp_path: Path) -> None:
    """The command is killed at many moments, and run again: each line is in the topic once."""
    count = 4000
    lines = "".join(f"{number}\n" for number in range(count))
    file, state = tmp_path / "lines", tmp_path / "state"
    file.write_text(lines + "last without end")
    rng = random.Random(3)
    broker.create_topic("killed", 3)
    words = ["produce", "killed", str(file), "--state", str(state), "--batch-records", "50"]
    command = [sys.executable, "-m", "tidelog.service.cli", *words]
    kills = 0
    while True:
        with subprocess.Popen(
            command, env=environment(TIDELOG_URL=broker.base_url), stdout=subprocess.DEVNULL
        ) as producing:
            if kills == 6:
                assert producing.wait(200) == 0
                break
            goal = lines_in(state) + rng.randrange(1, 300)
            while producing.poll() is None and lines_in(state) < goal:
                time.sleep(0.005)
            producing.kill()
            kills += 1
    assert json_of(broker.cli(*words, "--json"))["records"] == 0, "all is in"
    records = broker.records("killed")
    values = [record["value"] for record in records]
    assert len(values) == count + 1
    assert set(values) == {*map(str, range(count)), "last without end"}
    for partition in range(3):
        partition_values = [
            record["value"] for record in records if record["partition"] == partition
        ]
        numbers = [int(value) for value in partition_values if value.isdigit()]
        assert numbers == sorted(numbers)


def test_a_request_under_way_is_sent_again_with_the_same_key(
    broker: Broker, tmp_path: Path
) -> None:
    """The command was killed after the broker's commit, before it could write that down."""
    state = tmp_path / "state"
    broker.create_topic("again", 2)
    words = ["produce", "again", "--state", str(state), "--batch-records", "2"]
    broker.cli(*words, stdin="a\nb\n")
    saved_state = json.loads(state.read_text())
    broker.cli(*words, stdin="a\nb\nc\nd\ne\n")
    later = json.loads(state.read_text())
    assert (saved_state["lines"], later["lines"], later["pending"]) == (2, 5, None)
    digest = hashlib.blake2b(b"c\nd\n", digest_size=16).hexdigest()
    saved_state["pending"] = {
        "lines": 4,
        "bytes": 8,
        "digest": digest,
        "since_ms": round(time.time() * 1000),
    }
    state.write_text(json.dumps(saved_state))
    output = json_of(broker.cli(*words, "--json", stdin="a\nb\nc\nd\n"))
    assert output["records"] == 2
    assert len(broker.records("again")) == 5, "c and d are there once"
    state.write_text(json.dumps(saved_state))
    output = error_line(broker.cli(*words, stdin="a\nb\nC\nD\n", status=1))
    assert "lines 3 to 4 of the input have changed" in output
    saved_state["pending"]["since_ms"] -= 3_600_000
    state.write_text(json.dumps(saved_state))
    assert "it is unknown whether" in error_line(broker.cli(*words, stdin="a\n", status=1))


def test_file_that_became_shorter_is_another_input(broker: Broker, tmp_path: Path) -> None:
    """As a log that was rotated: nothing of it is produced, and nothing is skipped silently."""
    broker.create_topic("rotated")
    file, state = tmp_path / "lines", tmp_path / "state"
    words = ["produce", "rotated", str(file), "--state", str(state)]
    file.write_text("1\n2\n3\n")
    broker.cli(*words)
    file.write_text("4\n")
    process = broker.cli(*words, status=1)
    assert error_line(process) == f"the input is shorter than {state} says: it is another one"
    assert broker.high_watermark("rotated") == 3


def test_rotated_file_that_is_longer_again_is_another_input(broker: Broker, tmp_path: Path) -> None:
    broker.create_topic("longer")
    file, state = tmp_path / "lines", tmp_path / "state"
    words = ["produce", "longer", "--state", str(state)]
    file.write_text("1\n2\n3\n")
    broker.cli(*words, str(file))
    other_lines = "4\n5\n6\n7\n"
    file.write_text(other_lines)
    for process in (
        broker.cli(*words, str(file), status=1),
        broker.cli(*words, stdin=other_lines, status=1),
    ):
        assert "line 3 of the input is not the line that is in the topic" in error_line(process)
    assert broker.high_watermark("longer") == 3


def test_a_state_of_another_topic_or_with_a_bad_line(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    other_topic = f"{topic}-other"
    broker.create_topic(other_topic)
    words = ["--state", str(state), "--key-separator", ":"]
    line = error_line(broker.cli("produce", topic, *words, stdin="k:1\nk:2\nbad\n", status=1))
    assert "line 3" in line
    assert "lines 1 to 2 are in the topic" in line
    broker.cli("produce", topic, *words, stdin="k:1\nk:2\nk:3\n")
    assert [record["value"] for record in broker.records(topic)] == ["1", "2", "3"]
    assert f"belongs to topic {topic!r}" in error_line(
        broker.cli("produce", other_topic, *words, stdin="", status=2)
    )
    other = ["--state", str(state), "--key-separator", "="]
    assert "other options" in error_line(broker.cli("produce", topic, *other, status=2))
