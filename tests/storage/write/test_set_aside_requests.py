"""Acknowledged requests that the store refuses: set aside, and committed once it takes them."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hotlogs import names
from tests.support.logs import append, kill, made, opened, read_values, with_topic
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.errors import LogError, StoreRefused, Unavailable
from tidelog.storage.core.model import Acks, Part
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.write import set_aside_requests
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_log_file import KEPT
from tidelog.storage.write.set_aside_requests import SetAsideRequests


class Particular(MemoryStore):
    """Refuses entries with some bytes, or all entries."""

    def __init__(self, refuses: bytes = b"odd") -> None:
        super().__init__()
        self.refuses = refuses
        self.is_full = False

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        is_odd = self.refuses and self.refuses in b"".join(map(bytes, parts))
        if key.startswith("wal/") and (self.is_full or is_odd):
            raise StoreRefused(f"{key} is not taken")
        return await super().create(key, parts)


def kept(directory: Path) -> list[str]:
    return [path.name for path in names(directory) if KEPT in path.name]


async def with_one_aside(inner: Particular, hot: Path) -> Broker:
    log = await with_topic(inner, hot_dir=hot)
    for value in ("1", "odd", "2", "3"):
        await append(log, value, acks=Acks.LOCAL)
    await asyncio.sleep(30.0)
    return log


async def test_requests_behind_a_refused_one_are_committed_and_it_follows(tmp_path: Path) -> None:
    inner = Particular()
    log = await with_one_aside(inner, tmp_path)
    assert await read_values(log) == ["1", "2", "3"]
    assert len(kept(tmp_path)) == log.stats().set_aside == 1
    assert log._log.writer.buffered_bytes == 0
    inner.refuses = b""
    await asyncio.sleep(set_aside_requests.KEPT_RETRY_S + 5.0)
    assert await read_values(log) == ["1", "2", "3", "odd"]
    assert (kept(tmp_path), log.set_aside) == ([], 0)
    await log.close()
    assert names(tmp_path) == []
    again = await opened(inner, hot_dir=tmp_path)
    assert await read_values(again) == ["1", "2", "3", "odd"]
    assert again.state.hot_logs == {}
    await again.close()


async def test_no_request_passes_an_acknowledged_one_of_its_partition(tmp_path: Path) -> None:
    """A flush fails for a moment.

    Requests that come after it, with acks=all, stand back behind what is acknowledged, or are
    refused; those of other partitions go on.
    """
    inner = Particular(b"")
    log = await with_topic(inner, hot_dir=tmp_path, partitions=2)
    inner.refuses = b"first"
    await append(log, "first", acks=Acks.LOCAL)
    while not log._log.writer.refused:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)
    later = asyncio.create_task(append(log, "second"))
    await asyncio.sleep(0.0)
    inner.refuses = b""
    await append(log, "other", partition=1)
    await later
    assert await read_values(log) == ["first", "second"]
    inner.refuses = b"third"
    await append(log, "third", acks=Acks.LOCAL)
    while not log._log.writer.refused:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match=r"acknowledged requests to the same.*is not taken"):
        await append(log, "fourth")
    inner.refuses = b""
    await asyncio.sleep(set_aside_requests.PAUSE_MAX_S + 1.0)
    assert await read_values(log) == ["first", "second", "third"]
    await log.close()


async def test_a_store_that_refuses_everything_sets_nothing_aside(tmp_path: Path) -> None:
    inner = Particular(b"")
    log = await with_topic(inner, hot_dir=tmp_path)
    inner.is_full = True
    for value in "12345":
        await append(log, value, acks=Acks.LOCAL)
    await asyncio.sleep(100.0)
    assert log.set_aside == 0
    inner.is_full = False
    await asyncio.sleep(set_aside_requests.PAUSE_MAX_S + 1.0)
    assert await read_values(log) == list("12345")
    await log.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["keep", "_make"])
@pytest.mark.parametrize("error", [MemoryError("a bug"), OSError("no space")], ids=["bug", "disk"])
async def test_an_error_after_the_new_file_leaves_one_file_and_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    real = getattr(HotLog, name)
    failures = [error, error]

    async def kept_and_failed(self: HotLog, *arguments: object) -> object:
        result = await real(self, *arguments)
        if failures:
            raise failures.pop()
        return result

    def made_and_failed(self: HotLog, path: Path, body: bytes) -> object:
        if KEPT in path.name and failures and isinstance(error, OSError):
            raise failures.pop()  # `_make` removes what it made before it raises
        result = real(self, path, body)
        if KEPT in path.name and failures:
            raise failures.pop()
        return result

    inner = Particular()
    monkeypatch.setattr(HotLog, name, kept_and_failed if name == "keep" else made_and_failed)
    log = await with_one_aside(inner, tmp_path)
    assert not failures
    assert await read_values(log) == ["1", "2", "3"]
    assert len(kept(tmp_path)) == log.set_aside == 1
    inner.refuses = b""
    await log.close()
    again = await opened(inner, hot_dir=tmp_path)
    await asyncio.sleep(set_aside_requests.KEPT_RETRY_S + 5.0)
    assert await read_values(again) == ["1", "2", "3", "odd"]
    await again.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["before the file", "after the file", "after the mark"])
async def test_a_crash_while_a_request_is_set_aside_commits_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The process ends between two steps; the next one finds a store that takes everything."""
    real = SetAsideRequests._commit

    async def commit(self: SetAsideRequests, commit: Commit) -> None:
        is_last = commit.hot is not None
        if step == "after the mark" or not is_last:
            await real(self, commit)
        if is_last or step == "before the file":
            await asyncio.Event().wait()

    inner = Particular()
    with monkeypatch.context() as patch:
        patch.setattr(SetAsideRequests, "_commit", commit)
        log = await with_one_aside(inner, tmp_path)
        await kill(log)
    assert len(kept(tmp_path)) == (step != "before the file")
    inner.refuses = b""
    for _ in range(2):
        again = await opened(inner, hot_dir=tmp_path)
        await asyncio.sleep(set_aside_requests.KEPT_RETRY_S + 5.0)
        assert sorted(await read_values(again)) == ["1", "2", "3", "odd"]
        assert kept(tmp_path) == []
        await kill(again)


async def test_the_old_mark_is_used_up_before_the_request_is_tried_again(tmp_path: Path) -> None:
    """Nothing with a later mark follows: the first file alone would be committed once more."""
    inner = Particular()
    log = await with_topic(inner, hot_dir=tmp_path)
    await append(log, "odd", acks=Acks.LOCAL)
    await asyncio.sleep(30.0)
    inner.refuses = b""
    await asyncio.sleep(set_aside_requests.KEPT_RETRY_S + 5.0)
    assert await read_values(log) == ["odd"]
    await kill(log)
    again = await opened(inner, hot_dir=tmp_path)
    assert await read_values(again) == ["odd"]
    await again.close()


async def test_i10_acks_1_waits_at_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.storage.write.writer.KEPT_MAX", 1)
    log = await with_one_aside(Particular(), tmp_path)
    with pytest.raises(StoreRefused):
        await append(log, "odd again", acks=Acks.LOCAL)
    await append(log, "4", acks=Acks.LOCAL)
    assert log.set_aside == 1
    assert await read_values(log) == ["1", "2", "3", "4"]
    await kill(log)


async def test_stored_request_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush of it fails after its commit: the mark in the state decides."""
    inner = Particular(b"")
    log = await with_topic(inner, hot_dir=tmp_path)
    real = log._log.writer._committer.commit

    async def fails_after(draft):
        outcomes = await real(draft)
        if draft.chunks:
            raise RuntimeError("after the commit")
        return outcomes

    monkeypatch.setattr(log._log.writer._committer, "commit", fails_after)
    await append(log, "once", acks=Acks.LOCAL)
    await asyncio.sleep(30.0)
    monkeypatch.undo()
    assert log.set_aside == 0
    assert await read_values(log) == ["once"]
    with contextlib.suppress(LogError):
        await append(log, "after")
    assert await read_values(log) == ["once", "after"]
    await log.close()


# -- other requests beside a refused one


LIMIT_BYTES = 20_000
LARGE = random.Random(11).randbytes(40_000).hex()
"""Stays large, whatever packs it."""
TRIES = 100
"""Produces of other clients, a second apart: as often may the store refuse the large request."""


class Small(MemoryStore):
    """Refuses large objects, as a proxy does (413), a file size limit, or a nearly full disk."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if sum(memoryview(part).nbytes for part in parts) > LIMIT_BYTES:
            raise StoreRefused("413 too large")
        return await super().create(key, parts)


async def with_refused_request(inner: Small, hot: Path) -> Broker:
    """A broker that acked a request which the store refuses."""
    log = await with_topic(inner, hot_dir=hot)
    assert await append(log, "before") is not None
    assert await append(log, LARGE, acks=Acks.LOCAL) is None
    await asyncio.sleep(1.0)
    return log


async def is_produced(log: Broker, value: str) -> bool:
    """Whether one of many tries commits it."""
    for _ in range(TRIES):
        try:
            await append(log, value)
        except LogError:
            await asyncio.sleep(1.0)
        else:
            return True
    return False


async def test_other_produces_are_committed_beside_a_refused_request(tmp_path: Path) -> None:
    log = await with_refused_request(Small(), tmp_path)
    try:
        assert await is_produced(log, "after")
        assert await read_values(log) == ["before", "after"]
        assert names(tmp_path), "the hot log keeps what the broker acked"
    finally:
        await kill(log)


async def test_a_broker_starts_with_a_refused_request_in_its_hot_log(tmp_path: Path) -> None:
    inner = Small()
    await kill(await with_refused_request(inner, tmp_path))
    log = made(inner, hot_dir=tmp_path)
    opening = asyncio.create_task(log.open("c0ffee"))
    try:
        await asyncio.wait([opening], timeout=TRIES)
        assert opening.done(), "the broker is not ready"
        assert await is_produced(await opening, "after")
        assert names(tmp_path), "the hot log keeps what the broker acked"
    finally:
        opening.cancel()
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(result, Broker):
            await kill(result)
