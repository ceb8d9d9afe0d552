"""A local user who can read the folder is the administrator, and so is one who can write
`wal/`."""

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from deploy.demo.broker_process import BrokerFailed
from tests.service.conftest import QUIET, V2, broker_on
from tests.service.keyed import ADMIN_KEY, allow, key_of, secured
from tests.support.broker import Broker
from tidelog.service.peers.forwarding import _Request, _Response
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core import object_keys
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore

ROOT = Path(__file__).parents[2]
OTHERS = stat.S_IRWXG | stat.S_IRWXO
FORGED = "User:admin"


def open_to_others(root: Path) -> list[str]:
    """Files and folders below the root that other users may read, write or enter."""
    paths = (path for path in root.rglob("*") if path.stat().st_mode & OTHERS)
    return sorted(str(path.relative_to(root)) for path in paths)


async def test_a_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = FolderStore(tmp_path / "store")
        async with broker_on(store, security="keys", admin_key=ADMIN_KEY) as broker:
            await broker.log.create_topic("t", 1, {})
            await broker.log.wal.checkpoint()
            await store.put(object_keys.broker("b1"), [b"{}"])
            assert (tmp_path / "store" / object_keys.SECRET).exists()
        await store.close()
    finally:
        os.umask(before)
    assert open_to_others(tmp_path) == []


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY)
    key.chmod(0o600)
    broker = Broker(tmp_path, security="keys", admin_key=f"@{key}")
    with broker:
        broker.stop()
        (tmp_path / "store" / object_keys.SECRET).chmod(0o644)
        with pytest.raises(BrokerFailed):
            broker.start()


async def test_security_is_not_turned_off_where_there_are_keys(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    log = await LogBroker.open(store, QUIET, clock=SystemClock(), name="b1")
    await log.create_key("User:alice")
    await log.close()
    await store.close()
    with pytest.raises(BrokerFailed), Broker(tmp_path):
        pass


async def test_the_token_of_a_peer_makes_no_administrator() -> None:
    async with secured(MemoryStore()) as broker:
        body = json.dumps({"name": "i", "format": "json"}).encode()
        said = _Request(
            "POST",
            "/consumers/g",
            b"",
            [(b"content-type", V2.encode())],
            "http",
            ("127.0.0.1", 8082),
            body,
            (FORGED, "127.0.0.1"),
        )
        forwarded = broker.app.forwarded
        answer = await forwarded.take(msgspec.msgpack.encode(said), b"ticket")
        assert msgspec.msgpack.decode(answer, type=_Response).status in (401, 403)


async def test_a_process_that_may_write_the_wal_is_an_administrator() -> None:
    """The finding asked for rights with a signature. That would not help: such a process can also
    write a checkpoint with any state, delete records, and read `secret.json`, because brokers write
    the WAL with the same permission. The boundary is the permission to write, and is documented."""
    store = MemoryStore()
    async with secured(store) as broker:
        header = await key_of(broker.log, "User:mallory")
        asked = await broker.http.get("/tidelog/v1/keys", headers=header)
        assert asked.status_code == 403
        foreign = await LogBroker.open(store, QUIET, clock=SystemClock(), name="foreign")
        await allow(foreign, "User:mallory", "ALL", "CLUSTER", "kafka-cluster")
        await foreign.close()
        await broker.log.wal.refresh()
        asked = await broker.http.get("/tidelog/v1/keys", headers=header)
        assert asked.status_code == 200
    for page in ("SECURITY.md", "terraform/README.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert "may write `wal/` or `checkpoints/` is an administrator" in text, page
