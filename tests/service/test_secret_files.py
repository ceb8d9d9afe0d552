"""Files of secrets: which permissions are refused, and the line that says how to mend them."""

import inspect
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import QUIET, broker_on
from tests.service.keyed import ADMIN_KEY, SETTINGS, allow, key_of, secured
from tidelog.service.cli import keys
from tidelog.service.cli.errors import CommandError
from tidelog.service.http.loop_turns import Turns
from tidelog.service.secret_files import secret_of, why_exposed
from tidelog.service.server.service import security_of
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings, load
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_file_of_this_user_alone_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(mode)
    assert secret_of(f"@{file}") == "secret"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o777, 0o440])
def test_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(ADMIN_KEY)
    file.chmod(mode)
    with pytest.raises(BadSettings) as caught:
        load({"security": "keys", "admin_key": f"@{file}"}, {})
    assert str(caught.value) == (
        f"admin_key: other users can read or change {file} (mode {mode:04o}): chmod 0600 {file}"
    )


@pytest.mark.parametrize(
    ("mode", "is_allowed"),
    [(0o440, True), (0o640, True), (0o400, True), (0o444, False), (0o660, False), (0o644, False)],
)
def test_mounted_secret_may_be_read_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_allowed: bool
) -> None:
    """Kubernetes: a file of root, behind a link, readable by the group of the pod."""
    (tmp_path / "..data").mkdir()
    file = tmp_path / "..data" / "key"
    file.write_text("secret")
    file.chmod(mode)
    (tmp_path / "key").symlink_to(file)
    uid = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    why = why_exposed(tmp_path / "key")
    assert (why is None) is is_allowed
    assert is_allowed or "chmod 0440" in str(why)


def test_pipe_has_no_other_readers(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    assert why_exposed(pipe) is None
    assert why_exposed(tmp_path / "absent") is None


async def test_clusters_secret_that_others_can_read_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder whose name has blanks.

    An open folder is only warned of: its user may have it below a closed one.
    """
    folder = tmp_path / "a store"
    folder.mkdir()
    folder.chmod(0o755)  # with any umask
    store = FolderStore(folder)
    settings = Settings(store=str(folder), **SETTINGS)
    try:
        async with broker_on(store, **SETTINGS) as broker:
            secret = await broker.log.cluster.secret()
            security_of(settings, broker.log, secret, HttpCounters(), Turns())
            assert f"chmod -R go= {folder}" in caplog.text
            (folder / object_keys.SECRET).chmod(0o640)
            with pytest.raises(LogError, match="chmod 0600"):
                security_of(settings, broker.log, secret, HttpCounters(), Turns())
    finally:
        await store.close()


async def test_keys_or_acls_are_served_without_security_only_if_told() -> None:
    store = MemoryStore()
    async with broker_on(store, **SETTINGS) as broker:
        await broker.log.access.create_key("User:alice")
        off = Settings(store="memory://")
        with pytest.raises(LogError, match="has keys or ACLs, but security is off"):
            security_of(off, broker.log, None, HttpCounters(), Turns())
        allowing = Settings(store="memory://", security_off_with_keys=True)
        assert not security_of(allowing, broker.log, None, HttpCounters(), Turns())
    with pytest.raises(BadSettings, match="security_off_with_keys"):
        Settings(store="memory://", security_off_with_keys=True, **SETTINGS)


OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_to_others(root: Path) -> list[str]:
    """Files and folders below the root that other users may read, write or enter."""
    paths = (path for path in root.rglob("*") if path.stat().st_mode & OTHERS)
    return sorted(str(path.relative_to(root)) for path in paths)


async def test_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = FolderStore(tmp_path / "store")
        async with secured(store) as broker:
            await broker.log.topics.create("t", 1, {})
            await broker.log._log.wal.checkpoint()
            await store.put(object_keys.broker("b1"), [b"{}"])
            assert (tmp_path / "store" / object_keys.SECRET).exists()
        await store.close()
    finally:
        os.umask(before)
    assert open_to_others(tmp_path) == []


async def test_process_that_may_write_wal_is_administrator() -> None:
    """Rights with a signature would not help against a process that may write the WAL.

    It can also write a checkpoint with any state, delete records, and read `secret.json`, because
    brokers write the WAL with the same permission. The boundary is the permission to write, and is
    documented.
    """
    store = MemoryStore()
    async with secured(store) as broker:
        header = await key_of(broker.log, "User:mallory")
        asked = await broker.http.get("/tidelog/v1/keys", headers=header)
        assert asked.status_code == 403
        foreign = await LogBroker.open(store, QUIET, clock=SystemClock(), name="foreign")
        await allow(foreign, "User:mallory", "ALL", "CLUSTER", "kafka-cluster")
        await foreign.close()
        await broker.log._log.wal.refresh()
        asked = await broker.http.get("/tidelog/v1/keys", headers=header)
        assert asked.status_code == 200
    root = Path(__file__).parents[2]
    for page in ("SECURITY.md", "terraform/README.md"):
        text = " ".join((root / page).read_text().split())
        assert "may write `wal/` or `checkpoints/` is an administrator" in text, page


def test_secret_that_cannot_be_written_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the broker has created the key: the file is removed."""
    file, opened = tmp_path / "key", os.open

    def full(*arguments: Any) -> int:
        os.close(opened(*arguments))
        return opened("/dev/full", os.O_WRONLY)

    class Command:
        def request(self, *_: object, **__: object) -> dict[str, str]:
            return {"key_id": "k1", "secret": "tl_x", "principal": "User:alice"}

    monkeypatch.setattr(keys.os, "open", full)
    with pytest.raises(
        CommandError, match=r"No space left.* delete it with `tidelog keys delete k1`"
    ):
        inspect.unwrap(keys.create_key)("User:alice", command=Command(), out=file)
    assert not file.exists()
