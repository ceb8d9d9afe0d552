"""A compaction that takes hours commits nothing that collection may have deleted."""

import asyncio
from typing import Any

import pytest

from tests.support.logs import read_values
from tests.support.maintenance import caring, log_with
from tidelog.compaction import engine as compaction
from tidelog.compaction.compact import compact
from tidelog.compaction.engine import InProcess
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.memory import MemoryManifest

VALUES = [["a"], ["b"], ["c"], ["d"], ["e"]]


async def test_i9_nothing_is_committed_hours_after_its_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = InProcess.write

    async def slow(self: InProcess, *arguments: Any) -> Any:
        written = await real(self, *arguments)
        await asyncio.sleep(compaction.UPLOAD_AGE_MAX_S + 1)
        return written

    monkeypatch.setattr(InProcess, "write", slow)

    inner = MemoryStore()
    log = await log_with(inner, VALUES)
    table = await log.tables.of(log.state.topic("t"))
    await table.refresh()
    before = table.version
    async with caring(inner) as cluster:
        with pytest.raises(Unavailable, match="hours"):
            await compact(cluster, None, is_dry=False)
    await table.refresh()
    assert table.version == before
    assert await read_values(log) == ["a", "b", "c", "d", "e"]
    await log.close()


async def test_i9_a_commit_that_came_hours_late_is_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = MemoryManifest.replace
    is_first = True

    async def late(self: MemoryManifest, removed: Any, added: Any, *more: Any, **named: Any) -> Any:
        nonlocal is_first
        if is_first:  # suspended before its commit; collection runs meanwhile
            is_first = False
            await asyncio.sleep(compaction.UPLOAD_AGE_MAX_S + 1)
            prefix = self._prefix
            await inner.delete([f"{prefix}/{file.path}" for file in added])
        await real(self, removed, added, *more, **named)

    inner = MemoryStore()

    log = await log_with(inner, VALUES)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryManifest, "replace", late)
        async with caring(inner) as cluster:
            with pytest.raises(Unavailable, match="suspended"):
                await compact(cluster, None, is_dry=False)
    assert await read_values(log) == ["a", "b", "c", "d", "e"]
    await log.close()
