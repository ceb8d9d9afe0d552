"""The local hot log on a disk that fails: a no stays a no, a yes a yes (I6)."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hotlogs import (
    CLUSTER_ID,
    Opened,
    failing,
    names,
    requests_in,
    values,
    values_of_lists,
)
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.write import hot_log
from tidelog.storage.write.hot_log_file import recover


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_i6_on_a_full_disk_nothing_is_done_and_nothing_found_later(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    (path,) = names(tmp_path)
    whole = path.stat().st_size
    for room in (0, 1, 15, 16, 17, 100):
        with (
            file_size_limit(whole + room),
            pytest.raises(Unavailable, match="cannot be written"),
        ):
            await hot.append("refused" * 100)
        assert path.stat().st_size == whole
    await hot.append("b")
    await hot.crash()
    requests = requests_in(tmp_path)
    assert values(requests) == ["a", "b"]
    # Numbers are never given twice.
    assert [request.hot.seq for request in requests if request.hot] == [0, 7]
    assert [request.hot for request in hot.handed] == [request.hot for request in requests]


@pytest.mark.parametrize("room", [0, 5, 60])
async def test_i6_where_no_file_can_be_made_the_next_one_is_made_later(
    tmp_path: Path, room: int
) -> None:
    hot = Opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with file_size_limit(room), pytest.raises(Unavailable):
            await hot.append("refused")
        assert recover(tmp_path, CLUSTER_ID) == []
    await hot.append("a")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a"]
    assert names(tmp_path) == names(tmp_path, "*")


async def test_a_directory_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hot = Opened(tmp_path / "file" / "hot")
    with pytest.raises(Unavailable, match="cannot create a hot log"):
        await hot.append("a")


async def test_i6_a_sync_that_fails_takes_its_frames_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    with monkeypatch.context() as patch:
        patch.setattr(hot_log.os, "fdatasync", failing)
        with pytest.raises(Unavailable):
            await hot.append("refused")
    await hot.append("b")
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("second", ["ftruncate", "fsync"])
async def test_acked_requests_survive_a_file_that_a_failing_disk_has_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Neither written nor truncated: unknown. Later requests are written where a recovery finds
    them."""

    def half(fd: int, body: bytes) -> None:
        os.write(fd, body[: len(body) // 2])
        failing()

    hot = Opened(tmp_path)
    await hot.append("a")
    with monkeypatch.context() as patch:
        patch.setattr(hot_log, "write_all", half)
        patch.setattr(hot_log.os, second, failing)
        with pytest.raises(CommitUnknown):
            await hot.append("unknown")
    await hot.append("b")
    await hot.append("c")
    assert recover(tmp_path, CLUSTER_ID) == []
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b", "c"]


async def test_a_caller_that_goes_away_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    cancelled_task = asyncio.create_task(hot.append("b"))
    stays = asyncio.create_task(hot.append("c"))
    await asyncio.sleep(0)
    cancelled_task.cancel()
    await stays
    assert values_of_lists(hot.handed) == ["a", "b", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(hot_log.os, "fdatasync", failing)
        cancelled_task = asyncio.create_task(hot.append("d"))
        await asyncio.sleep(0)
        cancelled_task.cancel()
        await hot.log.drain()
    assert values_of_lists(hot.failed) == ["d"]
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b", "c"]
