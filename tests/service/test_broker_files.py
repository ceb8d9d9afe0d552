"""The folder of the hot log."""

from pathlib import Path

import pytest

from tidelog.service.server.broker_files import hot_dir
from tidelog.service.settings.settings import load
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore


def test_user_without_home_is_told_to_set_hot_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    # To `hot_dir` this is no MemoryStore, but a store whose objects outlive the process.
    store = MeteredStore(MemoryStore(), SystemClock())
    with pytest.raises(LogError, match="set hot_dir"):
        hot_dir(load({}, {}), store)
    folder = tmp_path / "hot"
    assert hot_dir(load({"hot_dir": str(folder)}, {}), store) == folder
