"""The broker under measurement: a process of its own."""

import tempfile
from pathlib import Path

import httpx

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
