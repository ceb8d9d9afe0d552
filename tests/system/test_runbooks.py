"""A procedure of deploy/README.md under load: a cluster is backed up as it runs, and restored."""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.support.broker import Broker, error_line, json_of, tidelog, until
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


def test_a_running_cluster_is_backed_up_and_restored(tmp_path: Path) -> None:
    """Backups while producers write and partitions are sealed; the last one has all."""
    store, place = tmp_path / "store", (tmp_path / "backups").as_uri()
    with Broker(tmp_path / "a", store.as_uri()) as broker:
        broker.create_topic("t", 1, segment_ms="200")
        clients = Clients(broker.base_url, 4)
        with clients.at_work():
            for _ in range(2):
                clients.wait_for(25)
                until(lambda: list((store / "topics").rglob("*.parquet")) != [])
                before = list(clients.acked)
                tidelog("backup", place, "--store", broker.store)
        assert set(before) <= set(values_of(tmp_path, place, "running"))
        done = json_of(tidelog("backup", place, "--verify", "--json", "--store", broker.store))
        assert 0 < done["copied_objects"] < done["objects"]
        at = datetime.fromtimestamp(done["to_ms"] / 1000, UTC).isoformat()
        broker.kill()
    shutil.rmtree(store)
    assert sorted(values_of(tmp_path, place, "all")) == sorted(clients.acked)
    assert sorted(values_of(tmp_path, place, "at", "--at", at)) == sorted(clients.acked)


def values_of(root: Path, place: str, name: str, *options: str) -> list[str]:
    """Restore into a new store; return what a broker on it serves."""
    store = (root / name).as_uri()
    tidelog("restore", place, "--store", store, *options)
    assert b"whole" in tidelog("scrub", "--store", store).stdout
    refused = tidelog("restore", place, "--store", store, status=3)
    assert "restore into an empty" in error_line(refused)
    with Broker(root / f"broker of {name}", store) as broker:
        return json_values(broker.base_url, WHOLE)
