"""Writers on a store in memory, and what must be left of one when it ends."""

from pathlib import Path

from tests.support.records import request, rows
from tests.support.views import store_of, with_topic
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.log_settings import PaceSettings
from tidelog.storage.core.model import Acks, AppendedRange
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.commit_pace import CommitPace
from tidelog.storage.wal.view import WalView
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.writer import Writer, WriterSettings


def writing(
    wal: WalView,
    settings: WriterSettings | None = None,
    *,
    pace: PaceSettings | None = None,
    hot_dir: Path | None = None,
) -> Writer:
    writer = Writer(
        wal,
        settings or WriterSettings(),
        lambda *_: None,
        pace=None if pace is None else CommitPace(wal.clock, pace),
        hot_dir=hot_dir,
    )
    writer.start()
    return writer


async def started(
    inner: MemoryStore,
    settings: WriterSettings | None = None,
    *,
    latency_s: float = 0.0,
    pace: PaceSettings | None = None,
    hot_dir: Path | None = None,
) -> Writer:
    wal = await with_topic(inner)
    if latency_s:
        store_of(wal).latency = lambda _: latency_s
    return writing(wal, settings, pace=pace, hot_dir=hot_dir)


def say(writer: Writer, *values: str, key: IdempotencyKey | None = None) -> AppendRequest:
    return request(writer.clock, {0: rows(*values)}, key=key)


async def append(writer: Writer, *values: str, acks: Acks = Acks.ALL) -> list[AppendedRange] | None:
    return await writer.append(say(writer, *values), acks)


def puts(writer: Writer) -> int:
    return store_of(writer.wal).count("create", object_keys.WAL)


async def ended(writer: Writer) -> None:
    """Close, and nothing may be left of what was admitted."""
    await writer.close()
    assert writer.buffered_bytes == 0
    assert not writer._waiters
    assert not writer._waiters._keyed
    assert not writer._open
    assert writer._open_bytes == 0
