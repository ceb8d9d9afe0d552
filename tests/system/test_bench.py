"""The benchmarks in a form of seconds, so that they keep working. Their numbers mean nothing."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.counting_s3 import RunningServer
from tests.tools.bench import costs, limits, load, peers
from tests.tools.bench.bodies import Requests, pool
from tests.tools.bench.processes import Watch
from tests.tools.bench.rates import partitions, sealing, sustained

DISTINCT = 2_000


@pytest.mark.parametrize("tool", ["wrk", "asyncio"])
def test_a_sustained_load(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "asyncio":
        monkeypatch.setattr(load, "has_wrk", lambda: False)
    elif not load.has_wrk():
        pytest.skip("wrk is not installed")
    times = sustained.Times(1.0, 0.3, 0.3, 0.5, DISTINCT)
    bench_table = sustained.table(tmp_path, times, (sustained.Case("json", 100, 4),))
    assert bench_table.how.startswith("NOT SUSTAINED")
    assert [len(row) for row in bench_table.rows] == [len(bench_table.columns)]
    assert ("wrk" in bench_table.how) == (tool == "wrk")


def test_sealing_alone(tmp_path: Path) -> None:
    bench_table = sealing.table(tmp_path, {1: 300, 100: 1_000})
    assert [row[0] for row in bench_table.rows] == [
        "sealing, 1 a request, in memory",
        "sealing, 100 a request, in memory",
        "sealing, 1 a request, from the store",
        "sealing, 100 a request, from the store",
    ]


def test_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_wrk", lambda: False)  # it takes no parts of a second
    bench_table = partitions.table(tmp_path, partitions.Times(0.3, 0.3, DISTINCT), (2,))
    assert [row[:2] for row in bench_table.rows] == [["2", "yes"], ["2", "no"]]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("START_S_MAX", "STALL_S_MAX", "ACK_P99_MS_MAX"):
        monkeypatch.setattr(limits, bound, math.inf)  # a busy machine exceeds them
    sizes = limits.Sizes((20, 40), 20, 2, 5, 60.0, 20, 0.5)
    bench_table = limits.table(tmp_path, sizes)
    assert [row[:2] for row in bench_table.rows][:4] == [
        ["partitions with records", "20"],
        ["partitions with records", "40"],
        ["members, in groups of 5", "10"],
        ["idle connections, of several addresses", "21"],
    ]
    assert [row[3].partition(",")[0] for row in bench_table.rows] == ["", "", "the end", "", "", ""]


def test_peers_without_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_wrk", lambda: False)
    case = peers.Case("json", 100, 4)
    bench_table = peers.table(
        tmp_path, "no Maven", 1_000, (case,), warm_up_s=0.3, distinct=DISTINCT
    )
    assert [row[0] for row in bench_table.rows] == [
        "Apache Kafka",
        "REST proxy before Kafka",
        "tidelog",
    ]
    assert bench_table.rows[0][1] == "skipped: no Maven"


@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_bodies_do_not_repeat(kind: str) -> None:
    body_pool = pool(kind, 10, DISTINCT)
    head = load.head_of("/topics/t", body_pool)
    requests = Requests(head, body_pool)
    bodies = [requests[number] for number in range(len(requests))]
    assert len(set(bodies)) == len(bodies) > 100
    assert len({len(body) for body in bodies}) == 1


def test_a_watch_tells_threads_apart() -> None:
    code = (
        "import os, threading, time\n"
        "def work(nice, done):\n"
        "    if nice: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)\n"
        "    while time.thread_time() < 0.15: pass\n"
        "    done.set(); time.sleep(60)\n"
        "for nice in (0, 1):\n"
        "    done = threading.Event()\n"
        "    threading.Thread(target=work, args=(nice, done), daemon=True).start()\n"
        "    done.wait()\n"
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
    assert watch.cpu.background_s == pytest.approx(0.15, abs=0.05)
    assert watch.cpu.others_s == pytest.approx(0.15, abs=0.05)
    assert watch.resident_at(0.5) > 0


def test_costs(counting_s3: RunningServer, tmp_path: Path) -> None:
    case = costs.Case(
        "a case", topics=1, seals=1, records_s=50, readers=1, is_probed=True, round_s=1.0
    )
    measurement = costs.measured(case, counting_s3, tmp_path / "case", 1.0)
    assert measurement.produced > 0
    assert measurement.cost.of("PUT") > 0
    assert measurement.cost.row(case.title)[-1].startswith("PUT wal: $")
    seal_cost = costs.seal_cost(counting_s3, tmp_path / "seals", 2)
    assert seal_cost.of_deltalake < 0.1, "the log commits to its tables itself"
