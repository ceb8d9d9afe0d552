"""`tidelog serve --workers`: several brokers behind one port."""

import contextlib
import os
import secrets
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.broker import Broker, error_line, tidelog
from tests.support.history import violations
from tests.system.checks import check_chain, new_topic, the_log
from tests.system.client import AnswerLost, Client, NotSent, wait_until
from tests.system.load import Load, Mix

PARTITIONS = 2
QUICK = {"workers": 3, "broker_heartbeat_interval_ms": 200, "broker_timeout_ms": 1500}


def workers_of(broker: Broker) -> list[psutil.Process]:
    """Not multiprocessing's own tracker of resources."""
    workers = []
    for child in psutil.Process(broker.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


def names(broker: Broker, tries: int = 40) -> set[str]:
    """The names of the workers that answer at the port."""
    worker_names = set()
    for _ in range(tries):
        try:
            with Client(broker.base_url, answer_s=5.0) as client:
                series = client.metrics()
        except (NotSent, AnswerLost):
            continue
        worker_names |= {name for name in series if name.startswith("tidelog_info{")}
    return worker_names


def is_whole(series: dict[str, float]) -> bool:
    """A worker that does not answer the others in time is absent from one answer."""
    told = {name for name in series if name.startswith("tidelog_wal_seq{")}
    return series["tidelog_workers_answered"] == 3 and told == {
        f'tidelog_wal_seq{{worker="{number}"}}' for number in (1, 2, 3)
    }


def has_all_workers(broker: Broker) -> bool:
    shown = httpx.get(f"{broker.base_url}/tidelog/v1/overview").json()["brokers"]
    return (
        sorted(row["worker"] for row in shown) == [1, 2, 3]
        and all(row["rates"] is not None for row in shown)
        and sum(row["is_sequencer"] for row in shown) == 1
    )


def test_workers_share_the_port_are_started_again_and_end_together(tmp_path: Path) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    with Broker(tmp_path, hot_dir=tmp_path / "hot", is_fresh=True, **QUICK) as broker:
        wait_until(lambda: len(names(broker)) == 3, "three workers")
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            wait_until(lambda: is_whole(client.metrics()), "an answer with all workers' series")
            wait_until(lambda: has_all_workers(broker), "an overview of all workers")
        with Load([broker.base_url] * 2, Mix(topic, PARTITIONS, 6), seed) as load:
            load.wait_for_acks(100)
            old_workers = workers_of(broker)
            victim = old_workers[secrets.randbelow(3)]
            os.kill(victim.pid, signal.SIGKILL)
            wait_until(
                lambda: len(workers_of(broker)) == 3 and victim not in workers_of(broker), "restart"
            )
            load.wait_for_acks(100)
            sent = load.finish()
        assert (
            violations([sending.request for sending in sent], the_log(broker, topic, PARTITIONS))
            == []
        )
        assert "ended with -9" in broker.log()
        wait_until(lambda: len(names(broker)) == 3, "three workers")
        workers = workers_of(broker)
        assert broker.stop() == 0, broker.log()
        assert not any(worker.is_running() for worker in workers)
        assert "Traceback" not in broker.log()
    check_chain(tmp_path / "store")


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    with Broker(tmp_path, hot_dir=tmp_path / "hot", is_fresh=True, **QUICK) as broker:
        wait_until(lambda: len(names(broker)) == 3, "three workers")
        workers = workers_of(broker)
        broker.kill()
        wait_until(lambda: not any(worker.is_running() for worker in workers), "their end")
        assert "Traceback" not in broker.log()
        broker.start()
        assert not {worker.pid for worker in workers} & {it.pid for it in workers_of(broker)}


def test_where_no_worker_can_start_the_parent_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    command = ("serve", "--store", f"{tmp_path}/file", "--workers", "2", "--port", "1")
    process = tidelog(*command, status=None, is_fresh=True)
    assert process.returncode not in (0, -9)
    assert b"Traceback" not in process.stderr
    assert b"tidelog: " in process.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--port", "0"], "workers above 1 share one port"),
        (["--store", "memory://"], "workers above 1 cannot share memory://"),
        (["--broker-id", "b"], "workers above 1: remove peer_port, peer_address and broker_id"),
        (["--peer-port", "4711"], "peer_port"),
    ],
)
def test_what_workers_cannot_share(options: list[str], why: str) -> None:
    process = tidelog("serve", "--workers", "2", *options, is_fresh=True, status=2)
    assert why in error_line(process)
