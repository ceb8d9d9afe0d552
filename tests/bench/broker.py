"""The broker under measurement: a process of its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from deploy.local.cluster import Store
from service.broker_process import BrokerProcess


class Broker(BrokerProcess):
    """A broker with the settings given by field name; its log goes with it."""

    def __init__(self, store: str, **settings: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tidelog-bench-")
        super().__init__(store, Path(self._folder.name) / "log", settings)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._folder.cleanup()

    def create_topic(self, name: str, partitions: int) -> None:
        body = {"topic_name": name, "partitions_count": partitions}
        httpx.post(f"{self.base_url}/admin/topics", json=body).raise_for_status()


def metric(broker: BrokerProcess, name: str) -> float:
    for line in httpx.get(f"{broker.base_url}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise RuntimeError(f"the broker has no {name}")


@contextmanager
def environment(store: Store) -> Iterator[None]:
    """Where the AWS chain of this process looks, too."""
    before = dict(os.environ)
    os.environ.update(store.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
