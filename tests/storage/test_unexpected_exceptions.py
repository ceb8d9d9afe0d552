"""One call raises, once, what no list of exceptions names.

The broker goes on, and each producer gets an answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import logs
from tests.support.faults import Fault
from tests.support.logs import append, closing, kill, opened, read_values, store_of, with_topic
from tests.support.records import rows
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks, Part
from tidelog.storage.log_engine import Log
from tidelog.storage.seal import encode, uploads
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.tables.memory import MemoryManifest
from tidelog.storage.wal.view import WalView
from tidelog.storage.write import hot_log
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.writer import WriterSettings

SETTINGS = LogSettings(is_sealing=False, writer=WriterSettings(answer_timeout_s=3.0))
WAIT_S = 30.0
"""Virtual seconds: ten times as long as an answer may take."""


class Panic(BaseException):
    """A panic of a Rust library comes to Python as such an exception."""


def fail_once(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: type[BaseException] = RuntimeError,
    *,
    is_after: bool = False,
) -> list[BaseException]:
    """The next call of it raises, and has had its effect or not; all others are as before.

    Return the errors that are left to be raised.
    """
    real, remaining_errors = getattr(owner, name), [error("once")]

    async def done_and_raised(awaited: Awaitable[object], failure: BaseException) -> None:
        await awaited
        raise failure

    def call(*arguments: Any, **named: Any) -> Any:
        if not remaining_errors:
            return real(*arguments, **named)
        failure = remaining_errors.pop()
        if is_after:
            return done_and_raised(real(*arguments, **named), failure)
        raise failure

    patch.setattr(owner, name, call)
    return remaining_errors


@contextlib.asynccontextmanager
async def watched(
    inner: MemoryStore,
    settings: LogSettings = SETTINGS,
    hot_dir: Path | None = None,
    **configs: str,
) -> AsyncIterator[tuple[Broker, "asyncio.Task[None]"]]:
    """A broker with topic `t`, and the task that ends with an error when a task of it does."""
    log = await opened(inner, settings, hot_dir=hot_dir)
    watch = asyncio.create_task(log.run_until_failed())
    try:
        named = {name.replace("_", "."): value for name, value in configs.items()}
        await log.topics.create("t", 1, named)
        yield log, watch
    finally:
        watch.cancel()
        ended = [watch]
        if log._log.writer.hot_log is not None and log._log.writer.hot_log._sync is not None:
            ended.append(log._log.writer.hot_log._sync)
            log._log.writer.hot_log._sync = None
        await asyncio.gather(*ended, return_exceptions=True)
        await kill(log)


async def answered(work: Awaitable[object]) -> object:
    """The result, or the exception; None where there is no answer at all.

    A produce with acks=1 has no other result than None, so give it `done`.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            return await work
    except TimeoutError:
        return None
    except Exception as error:  # noqa: BLE001 - which one, the test says
        return error


async def done(work: Awaitable[object]) -> str:
    """For what has no result."""
    await work
    return "done"


# -- a flush

FLUSH = [
    (ClosedSegment, "encode"),
    (ClosedSegment, "_lay"),
    (ClosedSegment, "answers"),
    (WalView, "_attempt"),
    (ClusterState, "_append"),
    (Log, "on_applied"),
]


class FailsAfterwards(MemoryStore):
    """One create stores its object, and then raises what no store should."""

    is_armed = False

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        created = await super().create(key, parts)
        if self.is_armed:
            self.is_armed = False
            raise OSError(5, "Input/output error")
        return created


async def goes_on(log: Broker, watch: "asyncio.Task[None]", inner: MemoryStore) -> None:
    """One produce meets the exception. The next ones are committed, and all brokers agree."""
    hit = await answered(append(log, "hit"))
    next_outcome = await answered(append(log, "after"))
    assert isinstance(next_outcome, list), f"the next produce: {next_outcome!r}"
    assert not watch.done(), "a task of the broker has ended"
    values = await read_values(log)
    assert values in (["hit", "after"], ["after"])
    assert not isinstance(hit, list) or values == ["hit", "after"]
    async with closing(await opened(inner)) as other:
        assert await read_values(other) == values
        assert other.state.encode() == log.state.encode()


@pytest.mark.parametrize(("owner", "name"), FLUSH)
async def test_an_exception_in_a_flush_does_not_end_the_broker(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    async with watched(inner) as (log, watch):
        fail_once(monkeypatch, owner, name)
        await goes_on(log, watch, inner)


async def test_an_oserror_after_a_put_does_not_end_the_broker() -> None:
    inner = FailsAfterwards()
    async with watched(inner) as (log, watch):
        inner.is_armed = True
        await goes_on(log, watch, inner)


# -- the hot log


async def test_hot_log_bug_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with watched(MemoryStore(), hot_dir=tmp_path) as (log, _):
        fail_once(monkeypatch, HotLog, "_write")
        hit = await answered(done(append(log, "hit", acks=Acks.LOCAL)))
        next_outcome = await answered(done(append(log, "after", acks=Acks.LOCAL)))
        assert next_outcome == "done"
        assert hit is not None


@pytest.mark.parametrize(("owner", "name"), [(HotLog, "_write"), (hot_log, "_message")])
async def test_an_exception_in_the_hot_log_gives_the_bytes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str
) -> None:
    async with watched(MemoryStore(), hot_dir=tmp_path) as (log, _):
        assert log._log.writer.buffered_bytes == 0
        fail_once(monkeypatch, owner, name)
        await answered(done(append(log, "hit", acks=Acks.LOCAL)))
        await asyncio.sleep(WAIT_S)
        assert log._log.writer.buffered_bytes == 0


@pytest.mark.parametrize("acks", [Acks.LOCAL, Acks.ALL])
async def test_a_retry_after_an_exception_in_the_hot_log_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, acks: Acks
) -> None:
    async with watched(MemoryStore(), hot_dir=tmp_path) as (log, _):

        async def produce(acks: Acks) -> None:
            topic, key = log.state.topic("t"), IdempotencyKey("k", b"f", 1)
            parts = [(0, rows("hit"))]
            await log.records.append(topic, parts, size=3, is_json=False, acks=acks, key=key)

        fail_once(monkeypatch, hot_log, "_message")
        assert isinstance(await answered(done(produce(Acks.LOCAL))), Exception)
        assert await answered(done(produce(acks))) == "done"
        await asyncio.sleep(WAIT_S)
        assert await read_values(log) == ["hit"]


# -- a seal

SEAL = [
    (TailSegments, "_tail", RuntimeError, False),
    (encode, "_finish", RuntimeError, False),
    (segments.SegmentWriter, "finish", MemoryError, False),
    (uploads, "upload", RuntimeError, False),
    (MemoryManifest, "add", RuntimeError, False),
    (MemoryManifest, "add", RuntimeError, True),
    (MemoryManifest, "add", Panic, False),
    (MemoryManifest, "newest", RuntimeError, False),
]


@pytest.mark.parametrize(("owner", "name", "error", "is_after"), SEAL)
async def test_an_exception_in_a_seal_does_not_end_the_broker(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: type[BaseException],
    is_after: bool,
) -> None:
    settings = SETTINGS._replace(is_sealing=True)
    async with watched(MemoryStore(), settings, segment_ms="100") as (log, watch):
        await append(log, "a", "b")
        remaining_errors = fail_once(monkeypatch, owner, name, error, is_after=is_after)
        await asyncio.sleep(WAIT_S)
        assert not remaining_errors, "the seal does not call it"
        assert not watch.done(), "a task of the broker has ended"
        assert log.state.partition("t", 0).sealed_end == 2
        assert await read_values(log) == ["a", "b"]


# -- an apply (I3)


@pytest.mark.parametrize("error", [MemoryError, Panic])
async def test_i3_another_brokers_entry_that_fails_to_apply_is_read_again(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    log_a, log_b = await logs.opened(inner), await logs.opened(inner)
    async with closing(log_a, log_b):
        await log_a.topics.create("t", 1, {})
        await log_b.refresh()
        await append(log_a, "a")
        fail_once(monkeypatch, ClusterState, "_append", error)
        with pytest.raises(Unavailable):
            await log_b.refresh()
        assert log_b.state.encode() == log_a.state.encode()
        assert await read_values(log_b) == ["a"]
        await append(log_b, "b")
        assert await read_values(log_a) == ["a", "b"]


async def test_i3_half_applied_state_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        fail_once(monkeypatch, ClusterState, "_append", RuntimeError)
        store_of(log).plan = lambda call: None if call.verb == "create" else Fault.UNAVAILABLE
        topic = log.state.topic("t")
        with pytest.raises(CommitUnknown):
            await log.records.append(topic, [(0, rows("a"))], size=1, is_json=False)
        with pytest.raises(Unavailable):
            _ = log.state
        store_of(log).plan = lambda call: None
        await asyncio.sleep(2 * log._settings.poll_interval_s)
        assert await read_values(log) == ["a"]


@pytest.mark.parametrize("owner", [Log, Sequencer])
async def test_failed_observer_keeps_ack(monkeypatch: pytest.MonkeyPatch, owner: type) -> None:
    """Its entry is applied; the view is loaded again for the subscriber's sake."""
    async with closing(await with_topic(MemoryStore())) as log:
        loads = log._log.wal.counters.void
        fail_once(monkeypatch, owner, "on_applied", RuntimeError)
        assert await append(log, "a") is not None
        await log.refresh()
        assert log._log.wal.counters.void > loads
        assert await read_values(log) == ["a"]
