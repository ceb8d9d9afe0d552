"""The broker under measurement: a process of its own."""

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from deploy.demo.broker_process import BrokerProcess
from deploy.local.cluster import Store

ADMIN_KEY = "an-administrators-key-of-many-characters"
SHM_BYTES_MIN = 8 << 30
"""Of /dev/shm and of free memory: 120 s of the largest load write 5 GB."""
ACL = {
    "resource_type": "TOPIC",
    "pattern_type": "PREFIXED",
    "principal": "User:p",
    "host": "*",
    "operation": "WRITE",
    "permission": "ALLOW",
}


class Broker(BrokerProcess):
    """A broker with the settings given by field name; its log goes with it.

    With `is_keyed` its security is on, and `headers` are the administrator's.
    """

    def __init__(self, store: str, *, is_keyed: bool = False, **settings: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tidelog-bench-")
        self.headers: dict[str, str] = {}
        if is_keyed:
            key_file = Path(self._folder.name) / "key"
            key_file.write_text(ADMIN_KEY)
            key_file.chmod(0o600)
            settings |= {"security": "keys", "admin_key": f"@{key_file}"}
            self.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        super().__init__(store, Path(self._folder.name) / "log", settings)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._folder.cleanup()

    def create_topic(self, name: str, partitions: int, **configs: object) -> None:
        """The names of the configs have `_` for `.`."""
        texts = {key.replace("_", "."): str(value) for key, value in configs.items()}
        body = {"topic_name": name, "partitions_count": partitions, "configs": texts}
        url = f"{self.base_url}/admin/topics"
        httpx.post(url, json=body, headers=self.headers).raise_for_status()

    def key_of_producer(self) -> dict[str, str]:
        """The header of a principal that may write all topics, by one of a thousand ACLs."""
        with httpx.Client(base_url=self.base_url, headers=self.headers) as client:
            answer = client.post("/tidelog/v1/keys", json={"principal": "User:p"})
            cluster = client.get("/v3/clusters").json()["data"][0]["cluster_id"]
            names = [*(f"other-{number}" for number in range(999)), "b"]
            data = [ACL | {"resource_name": name} for name in names]
            path = f"/v3/clusters/{cluster}/acls:batch"
            client.post(path, json={"data": data}).raise_for_status()
        secret = answer.raise_for_status().json()["secret"]
        return {"authorization": "Basic " + base64.b64encode(f"p:{secret}".encode()).decode()}


def metric(broker: BrokerProcess, name: str) -> float:
    headers = broker.headers if isinstance(broker, Broker) else {}
    for line in httpx.get(f"{broker.base_url}/metrics", headers=headers).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise RuntimeError(f"the broker has no {name}")


@contextmanager
def store_folder(folder: Path) -> Iterator[tuple[Path, str]]:
    """An empty folder, removed at the end, and its name for a report.

    It is of memory (/dev/shm) if that has SHM_BYTES_MIN, else `folder`.
    """
    in_memory = Path("/dev/shm")
    free = shutil.disk_usage(in_memory).free if in_memory.is_dir() else 0
    is_memory = min(free, psutil.virtual_memory().available) >= SHM_BYTES_MIN
    place = in_memory if is_memory else folder
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-", dir=place) as name:
        yield Path(name), "/dev/shm" if is_memory else "a folder of the disk"


@contextmanager
def environment(store: Store) -> Iterator[None]:
    """Where the AWS chain of this process looks, too."""
    old_variables = dict(os.environ)
    os.environ.update(store.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old_variables)
