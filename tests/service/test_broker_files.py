"""The folder of the hot log."""

from pathlib import Path

import pytest

from tidelog.service.server.broker_files import hot_dir
from tidelog.service.settings.settings import load
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore


def test_user_without_home_is_told_to_set_hot_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    store = MeteredStore(MemoryStore())  # no MemoryStore: its objects outlive the process
    with pytest.raises(LogError, match="set hot_dir"):
        hot_dir(load({}, {}), store)
    folder = tmp_path / "hot"
    assert hot_dir(load({"hot_dir": str(folder)}, {}), store) == folder
