"""A broker's log, compared with its WAL, its tables, and the answers to retries."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from deltalake import DeltaTable

from tests.support.broker import Broker
from tests.support.history import Log, Read
from tests.support.records import entries_of
from tests.system.client import JSON, Client, NotServed, wait_until
from tests.system.load import Sent
from tidelog.storage.store.folder import FolderStore


class Starting(Broker):
    """A broker whose start is not waited for."""

    def _wait_until_ready(self) -> None:
        pass


def new_topic() -> str:
    """A name that no other test has: a broker at a wrong port does not have it."""
    return f"t-{secrets.token_hex(4)}"


def the_log(broker: Broker, topic: str, partitions: int) -> Log:
    """All of it, as a reader of this broker gets it. After a 503 it tries again."""
    with Client(broker.base_url) as client:
        while True:
            try:
                return client.read_all(topic, partitions)
            except NotServed:
                time.sleep(0.1)


def json_values(url: str, query: str = "", partition: int = 0) -> list[Any]:
    """Of a partition of topic `t` through a balancer, page by page.

    A record acked anywhere is seen at its own offset at the latest.
    """
    values: list[Any] = []
    while True:
        path = f"{url}/topics/t/partitions/{partition}/records?offset={len(values)}{query}"
        page = json.loads(httpx.get(path, headers={"accept": JSON}).raise_for_status().content)
        if not page:
            return values
        values += [record["value"] for record in page]


def wait_for_commits(broker: Broker) -> None:
    """Until nothing that was acked locally waits for its commit."""
    with Client(broker.base_url) as client:
        wait_until(lambda: client.metrics()["tidelog_buffered_bytes"] == 0, "the last commit")


def hot_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.hot")}


def check_retries(broker: Broker, topic: str, sent: Sequence[Sent]) -> None:
    """Send acked requests again; the answers go to the history."""
    with Client(broker.base_url) as client:
        for request, key, form in sent:
            client.send(topic, request, key=key, form=form)


def check_chain(folder: Path) -> None:
    """Every entry names the one before it, and none lies beyond a missing one (I2)."""
    asyncio.run(_check_chain(folder))


async def _check_chain(folder: Path) -> None:
    store = FolderStore(folder)
    try:
        keys = [key for key, _ in await entries_of(store)]
        there = [info.key async for info in store.list("wal/")]
        assert keys == there, "the chain ends before the last entry"
    finally:
        await store.close()


def table_of(folder: Path, partitions: int) -> Log:
    """Read the only topic there as another engine does, without a broker."""
    (directory,) = (folder / "topics").iterdir()
    return table_at(str(directory), partitions)


def table_at(uri: str, partitions: int, options: Mapping[str, str] | None = None) -> Log:
    """The rows of a table by partition, in the order of offsets."""
    table = DeltaTable(uri, storage_options=dict(options or {})).to_pyarrow_table()
    log: dict[int, list[Read]] = {number: [] for number in range(partitions)}
    columns = ("partition", "offset", "value", "key")
    for row in table.select(columns).sort_by("offset").to_pylist():
        log[row["partition"]].append(Read(row["offset"], row["value"], row["key"]))
    return log
