"""A procedure of deploy/README.md under load: a cluster is backed up as it runs, and restored."""

import shutil
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

from tests.support.broker import Broker, error_line, json_of, tidelog, until
from tests.support.threads import Threads
from tests.system.checks import json_values
from tidelog.client import Producer

WHOLE = "&max_bytes=10000000"


class Clients(Threads):
    """Producers, each with one record at a time. `acked` has the acknowledged values."""

    def __init__(self, url: str, producers: int) -> None:
        super().__init__(*(partial(self._run, number) for number in range(producers)))
        self.acked: list[str] = []
        self._url = url

    def wait_for(self, count: int) -> None:
        goal = len(self.acked) + count
        until(lambda: len(self.acked) >= goal)

    def _run(self, number: int) -> None:
        values = (f"{number}-{index}" for index in count())
        with Producer(self._url, format="json", linger_ms=0) as producer:
            while not self._stop.is_set():
                value = next(values)
                producer.send("t", value).result()
                self.acked.append(value)


def test_a_running_cluster_is_backed_up_and_restored(tmp_path: Path) -> None:
    """Backups while producers write and partitions are sealed; the last one has all."""
    store, place = tmp_path / "store", (tmp_path / "backups").as_uri()
    with Broker(tmp_path / "a", store.as_uri()) as broker:
        broker.create_topic("t", 1, segment_ms="200")
        with Clients(broker.base_url, 4) as clients:
            for _ in range(2):
                clients.wait_for(25)
                until(lambda: list((store / "topics").rglob("*.parquet")) != [])
                old_values = list(clients.acked)
                tidelog("backup", place, "--store", broker.store)
        assert set(old_values) <= set(values_of(tmp_path, place, "running"))
        result = json_of(tidelog("backup", place, "--verify", "--json", "--store", broker.store))
        assert 0 < result["copied_objects"] < result["objects"]
        time_text = datetime.fromtimestamp(result["to_ms"] / 1000, UTC).isoformat()
        broker.kill()
    shutil.rmtree(store)
    assert sorted(values_of(tmp_path, place, "all")) == sorted(clients.acked)
    assert sorted(values_of(tmp_path, place, "at", "--at", time_text)) == sorted(clients.acked)


def values_of(root: Path, place: str, name: str, *options: str) -> list[str]:
    """Restore into a new store; return what a broker on it serves."""
    store = (root / name).as_uri()
    tidelog("restore", place, "--store", store, *options)
    assert b"whole" in tidelog("scrub", "--store", store).stdout
    refused = tidelog("restore", place, "--store", store, status=3)
    assert "restore into an empty" in error_line(refused)
    with Broker(root / f"broker of {name}", store) as broker:
        return json_values(broker.base_url, WHOLE)
