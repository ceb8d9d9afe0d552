"""The benchmarks in a form of seconds, so that they keep working. Their numbers mean nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import load
from tests.bench.bodies import Requests, pool
from tests.bench.processes import Watch
from tests.bench.rates import partitions, sealing, sustained

DISTINCT = 2_000


@pytest.mark.parametrize("tool", ["wrk", "asyncio"])
def test_a_sustained_load(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "asyncio":
        monkeypatch.setattr(load, "has_wrk", lambda: False)
    elif not load.has_wrk():
        pytest.skip("wrk is not installed")
    times = sustained.Times(1.0, 0.3, 0.3, 0.5, DISTINCT)
    made = sustained.table(tmp_path, times, (sustained.Case("json", 100, 4),))
    assert made.how.startswith("NOT SUSTAINED")
    assert [len(row) for row in made.rows] == [len(made.columns)]
    assert ("wrk" in made.how) == (tool == "wrk")


def test_sealing_alone(tmp_path: Path) -> None:
    made = sealing.table(tmp_path, {1: 300, 100: 1_000})
    assert [row[:2] for row in made.rows] == [
        ["1", "in memory"],
        ["100", "in memory"],
        ["1", "from the store"],
        ["100", "from the store"],
    ]


def test_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_wrk", lambda: False)  # it takes no parts of a second
    made = partitions.table(tmp_path, partitions.Times(0.3, 0.3, DISTINCT), (2,))
    assert [row[:2] for row in made.rows] == [["2", "yes"], ["2", "no"]]


@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_bodies_do_not_repeat(kind: str) -> None:
    made = pool(kind, 10, DISTINCT)
    head = load.head_of("/topics/t", made)
    requests = Requests(head, made)
    bodies = [requests[number] for number in range(len(requests))]
    assert len(set(bodies)) == len(bodies) > 100
    assert len({len(body) for body in bodies}) == 1


def test_a_watch_tells_threads_apart() -> None:
    code = (
        "import os, threading, time\n"
        "def work(nice):\n"
        "    if nice: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)\n"
        "    while time.thread_time() < 0.3: pass\n"
        "    time.sleep(60)\n"
        "[threading.Thread(target=work, args=(nice,), daemon=True).start() for nice in (0, 1)]\n"
        "while time.process_time() < 0.65: time.sleep(0.01)\n"
        "print(flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with Watch(process.pid) as watch:
            process.stdout.readline()
        process.stdin.close()
        process.kill()
    assert watch.cpu.background_s == pytest.approx(0.3, abs=0.1)
    assert watch.cpu.others_s == pytest.approx(0.3, abs=0.1)
    assert watch.resident_at(0.5) > 0
