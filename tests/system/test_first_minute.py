"""The first minute: the banner of `tidelog serve`, and `tidelog dev` with its commands."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.broker import Broker, environment, tidelog, until
from tests.support.ports import free_port
from tidelog.service.cli import sample_flights

BIN = Path(sys.executable).parent
BUSY_CPU_S = 5.0
ROWS = re.compile(r"^    (\w*) +(\S.*)$", re.MULTILINE)


def rows(output: str) -> list[tuple[str, str]]:
    return ROWS.findall(output)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder without a log, where the commands are typed."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def typed(text: str, folder: Path) -> str:
    """Run a line of a banner in a shell."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, f"{text}\n{process.stderr}"
    return process.stdout


# -- tidelog serve


def test_serve_prints_one_banner_and_its_command_works(tmp_path: Path, here: Path) -> None:
    with Broker(tmp_path, kafka_port=free_port()) as broker:
        lines = broker.log().splitlines()
        (first,) = (n for n, line in enumerate(lines) if line.endswith(broker.base_url))
        assert " INFO tidelog listening on " in lines[first]
        assert all(line.startswith("    ") for line in lines[first + 1 :]), "other lines are quiet"
        assert not any(" INFO " in line for line in lines[:first])
        banner_rows = dict(rows(broker.log()))
        assert banner_rows["console"] == f"{broker.base_url}/ui/"
        assert banner_rows["store"] == broker.store
        assert banner_rows["Kafka"] == f"127.0.0.1:{broker.settings['kafka_port']}"
        typed(banner_rows["next"].partition("    (")[0], here)
        assert json.loads(broker.cli("topics", "list", "--json").stdout)
        broker.restart()
        assert " topics list " in dict(rows(broker.log()))["next"]


def test_each_fact_of_the_banner_is_an_event_in_json(tmp_path: Path) -> None:
    with Broker(tmp_path, log_format="json") as broker:
        messages = [json.loads(line)["message"] for line in broker.log().splitlines()]
    assert f"listening on {broker.base_url}" in messages
    assert f"the console is at {broker.base_url}/ui/" in messages
    assert not any("\n" in message for message in messages)


# -- tidelog dev


@contextmanager
def running_dev(here: Path, port: int, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`tidelog dev` in a session of its own, as in a terminal; its banner is in `here`/../said."""
    with open(here.parent / "said", "wb") as file:
        process = subprocess.Popen(
            [BIN / "tidelog", "dev", "--port", str(port), *options],
            cwd=here,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or "    end " in banner(here))
        assert process.poll() is None, banner(here)
        yield process
    finally:
        broker = children(process)
        if process.poll() is None:
            process.kill()
            process.wait()
        psutil.wait_procs(broker)  # a broker ends with its parent


def banner(here: Path) -> str:
    return (here.parent / "said").read_text()


def children(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cpu_s(process: "subprocess.Popen[bytes]") -> float:
    both = [psutil.Process(process.pid), *children(process)]
    return sum(sum(running_process.cpu_times()[:2]) for running_process in both)


def ctrl_c(process: "subprocess.Popen[bytes]") -> int:
    """As a terminal does: SIGINT to each process of the foreground group."""
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(120)


def numbers(url: str) -> list[int]:
    """The numbers of all departures in the log."""
    output = tidelog(
        "consume", sample_flights.TOPIC, "--from", "beginning", "--json", TIDELOG_URL=url
    ).stdout
    values = [json.loads(line)["value"] for line in output.splitlines()]
    return sorted(value["number"] for value in values if isinstance(value, dict))


def test_dev_shows_live_data_and_its_commands_work(here: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_dev(here, port, "--rate", "200") as process:
        assert cpu_s(process) < BUSY_CPU_S
        banner_rows = rows(banner(here))
        assert dict(banner_rows)["console"] == f"{url}/ui/"
        assert dict(banner_rows)["store"] == str(here / "tidelog-data")
        start = [name for name, _ in banner_rows].index("next")
        follow, lag, produce = (value for _, value in banner_rows[start : start + 3])
        assert len(typed(follow, here).splitlines()) == 5
        assert sample_flights.TOPIC in typed(lag, here)
        typed(produce, here)
        assert 'hello"' in typed(
            f"{BIN}/tidelog consume {sample_flights.TOPIC} --from beginning --server {url}", here
        )
        until(lambda: lag_of("report", url) > 1000)
        until(lambda: lag_of("dashboard", url) < 1000)
        assert ctrl_c(process) == 0
    said_lines = banner(here).splitlines()
    assert said_lines.pop().startswith("tidelog dev: stopping; connected clients have up to 5 s")
    assert [line for line in said_lines if not line.startswith("    ")] == said_lines[:1], (
        "one banner, no errors"
    )
    with running_dev(here, port) as process:  # the members left: the next ones read at once
        read = numbers(url)
        assert read == sorted(set(read)), "a departure is there twice"
        assert read[: len(read) // 2] == list(range(len(read) // 2))
        started = children(process)
        process.kill()
        process.wait()
        assert psutil.wait_procs(started, timeout=120)[1] == [], "the broker runs without it"


def lag_of(group: str, url: str) -> int:
    answer = json.loads(tidelog("groups", "lag", group, "--json", TIDELOG_URL=url).stdout)
    return int(answer["lag"])


def test_departures_are_those_of_their_number() -> None:
    flights = [sample_flights.departure(number) for number in range(500)]
    assert flights == [sample_flights.departure(number) for number in range(500)]
    assert len({json.dumps(flight) for flight in flights}) == 500
    assert len({flight["key"] for flight in flights}) > 100


def test_dev_ends_with_the_brokers_error(here: Path) -> None:
    with Broker(here / "other") as other:
        process = subprocess.run(
            [BIN / "tidelog", "dev", "--port", str(other.port)],
            cwd=here,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{other.port}" in line
