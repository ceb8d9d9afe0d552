"""Writers on a store in memory, and what must be left of one when it ends."""

from storage import keys
from storage.entry import IdempotencyKey
from storage.hot import Request
from storage.model import Placement
from storage.objectstore import MemoryStore
from storage.wal import Wal
from storage.writer import Acks, Writer, WriterSettings
from tests.support.records import request, rows
from tests.support.views import store_of, with_topic


def writing(wal: Wal, settings: WriterSettings | None = None) -> Writer:
    writer = Writer(wal, wal.clock, settings or WriterSettings(), lambda *_: None)
    writer.start()
    return writer


async def started(
    inner: MemoryStore, settings: WriterSettings | None = None, *, latency_s: float = 0.0
) -> Writer:
    wal = await with_topic(inner)
    if latency_s:
        store_of(wal).latency = lambda _: latency_s
    return writing(wal, settings)


def say(writer: Writer, *values: str, key: IdempotencyKey | None = None) -> Request:
    return request(writer.clock, {0: rows(*values)}, key=key)


async def append(writer: Writer, *values: str, acks: Acks = Acks.ALL) -> list[Placement] | None:
    return await writer.append(say(writer, *values), acks)


def puts(writer: Writer) -> int:
    return store_of(writer.wal).count("create", keys.WAL)


async def ended(writer: Writer) -> None:
    """Close, and nothing may be left of what was admitted."""
    await writer.close()
    assert writer.buffered_bytes == 0
    assert not writer._waiters
    assert not writer._keyed
    assert not writer._open
    assert writer._open_bytes == 0
