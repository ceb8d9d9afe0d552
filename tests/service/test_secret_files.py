"""Files of secrets: which permissions are refused, and the line that says how to mend them."""

import os
from pathlib import Path

import pytest

from tests.service.conftest import broker_on
from tests.service.keyed import ADMIN_KEY, SETTINGS
from tidelog.service.http.turns import Turns
from tidelog.service.secret_files import secret_of, why_exposed
from tidelog.service.server.service import security_of
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings, load
from tidelog.service.telemetry.metrics import HttpCounters
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_this_user_alone_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(mode)
    assert secret_of(f"@{file}") == "secret"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o777, 0o440])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
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
def test_a_mounted_secret_may_be_read_by_the_group(
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


def test_a_pipe_has_no_other_readers(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    assert why_exposed(pipe) is None
    assert why_exposed(tmp_path / "absent") is None


async def test_a_clusters_secret_that_others_can_read_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder whose name has blanks. An open folder is only warned of: its user may have it
    below a closed one."""
    folder = tmp_path / "a store"
    folder.mkdir()
    folder.chmod(0o755)  # with any umask
    store = FolderStore(folder)
    settings = Settings(store=str(folder), **SETTINGS)
    try:
        async with broker_on(store, **SETTINGS) as broker:
            secret = await broker.log.secret()
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
        await broker.log.create_key("User:alice")
        off = Settings(store="memory://")
        with pytest.raises(LogError, match="has keys or ACLs, but security is off"):
            security_of(off, broker.log, None, HttpCounters(), Turns())
        allowing = Settings(store="memory://", security_off_with_keys=True)
        assert not security_of(allowing, broker.log, None, HttpCounters(), Turns())
    with pytest.raises(BadSettings, match="security_off_with_keys"):
        Settings(store="memory://", security_off_with_keys=True, **SETTINGS)
