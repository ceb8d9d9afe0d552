"""The procedures of deploy/README.md on a cluster under load: brokers replaced one
by one behind a balancer; a prefix copied, checked and brought back."""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.local.balancer import balancer, installed_balancer
from deploy.local.cluster import Store, brokers
from tests.support.broker import Broker, tidelog, until
from tests.support.pace import is_within
from tests.system.checks import json_values

JSON = "application/vnd.kafka.json.v2+json"
STOP_S = 10.0
WHOLE = "&max_bytes=10000000"


class Clients:
    """Producers through one URL, each with one request at a time, retried under its key until it is
    acked. `tries` counts the answers by what they were."""

    def __init__(self, url: str, count: int) -> None:
        self.tries: Counter[str] = Counter()
        self.acked: list[str] = []
        self._url = url
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(count)
        ]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def wait_for(self, more: int) -> None:
        wanted = len(self.acked) + more
        until(lambda: len(self.acked) >= wanted)

    def _run(self, producer: int) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            number = 0
            while not self._stop.is_set():
                value = f"{producer}-{number}"
                number += 1
                while not self._is_acked(client, value):
                    time.sleep(0.01)

    def _is_acked(self, client: httpx.Client, value: str) -> bool:
        headers = {"content-type": JSON, "idempotency-key": f'"{value}"'}
        try:
            body = {"records": [{"value": value}]}
            answer = client.post("/topics/t", json=body, headers=headers)
            word = str(answer.status_code)
        except httpx.TransportError as error:
            word = type(error).__name__
        with self._lock:
            self.tries[word] += 1
            if word == "200":
                self.acked.append(value)
        return word == "200"


@pytest.mark.skipif(installed_balancer() is None, reason="needs nginx or haproxy")
def test_brokers_are_replaced_one_by_one_under_load(tmp_path: Path) -> None:
    store = Store((tmp_path / "store").as_uri())
    with brokers(3, store, tmp_path) as made:
        with balancer(tmp_path, [broker.port for broker in made]) as port:
            url = f"http://127.0.0.1:{port}"
            topic = {"topic_name": "t", "partitions_count": 1}
            httpx.post(f"{url}/admin/topics", json=topic).raise_for_status()
            clients = Clients(url, 4)
            with clients.at_work():
                for broker in made:
                    clients.wait_for(25)
                    began = time.monotonic()
                    assert broker.stop() == 0, broker.log()
                    assert is_within(time.monotonic() - began, STOP_S)
                    clients.wait_for(25)
                    broker.start()
                clients.wait_for(25)
            tries, acked = clients.tries, clients.acked
            print(f"answers: {dict(tries)}")
            # The balancer must not repeat a request that an ending broker may have received.
            assert set(tries) <= {"200", "502", "503"}
            assert tries.total() - tries["200"] <= 3 * 4, "more than what was under way"
            assert sorted(json_values(url, WHOLE)) == sorted(acked)
        assert len(set(acked)) == len(acked)


def test_a_prefix_is_copied_and_brought_back(tmp_path: Path) -> None:
    """Most of it while brokers write, the rest when they have ended."""
    backup = tmp_path / "backup"
    with Broker(tmp_path / "a", (tmp_path / "store").as_uri()) as broker:
        broker.create_topic("t", 1, segment_ms="200")
        clients = Clients(broker.base_url, 4)
        with clients.at_work():
            clients.wait_for(25)
            until(lambda: list((tmp_path / "store" / "topics").rglob("*.parquet")) != [])
            synchronise(tmp_path / "store", backup)
            clients.wait_for(25)
        assert broker.stop() == 0
    synchronise(tmp_path / "store", backup)
    assert b"whole" in tidelog("scrub", "--store", backup.as_uri()).stdout
    shutil.rmtree(tmp_path / "store")
    synchronise(backup, tmp_path / "store")
    with Broker(tmp_path / "b", (tmp_path / "store").as_uri()) as broker:
        assert sorted(json_values(broker.base_url, WHOLE)) == sorted(clients.acked)


def synchronise(source: Path, target: Path) -> None:
    """As `aws s3 sync --delete --exclude 'brokers/*'`: by name and size."""
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    wanted = {path for path in wanted if path.parts[0] not in {"brokers", ".hot"}}
    there = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
    for path in there - wanted:
        (target / path).unlink()
    for path in wanted:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if path not in there or (target / path).stat().st_size != (source / path).stat().st_size:
            shutil.copy2(source / path, target / path)
