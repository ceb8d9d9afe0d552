"""Segments that are named so late that collection may delete them: a sealer replaces them."""

from collections.abc import Callable

import pytest

from tests.support.clock import ManualClock
from tests.support.logs import COLD, append, closing, opened, read_table, read_values
from tests.support.records import TIME_MS
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.log import Log
from tidelog.storage.seal import uploads
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import Table
from tidelog.storage.tables.memory import MemoryManifest

LATE_S = uploads.UPLOAD_AGE_MAX_S + 1


class Moved:
    """A log with two records in its tail, whose clock and store move together."""

    def __init__(self, inner: MemoryStore, log: Log) -> None:
        self.inner = inner
        self.log = log
        assert isinstance(log.clock, ManualClock)
        self.clock = log.clock
        inner.now_ms = self.clock.now_ms()

    @classmethod
    async def opened(cls) -> "Moved":
        inner = MemoryStore(now_ms=TIME_MS)
        log = await opened(inner, COLD)
        await log.create_topic("t", 1, {})
        await append(log, "a", "b")
        return cls(inner, log)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.inner.now_ms = self.clock.now_ms()

    async def files(self) -> list[SegmentFile]:
        table: Table = await self.log.tables.of(self.log.state.topic("t"))
        await table.refresh()
        return list(await table.segments(0))

    def key(self, file: SegmentFile) -> str:
        return f"{self.log.state.topic('t').prefix}/{file.path}"


async def added_late(
    moved: Moved, patch: pytest.MonkeyPatch, before: Callable[[], None]
) -> SegmentFile:
    """The segment of a sealer that was suspended between its check of the age and its commit."""
    real = MemoryManifest.add

    async def add(self: MemoryManifest, files: object, transactions: object) -> None:
        before()
        await real(self, files, transactions)  # type: ignore[arg-type]

    with patch.context() as patched:
        patched.setattr(MemoryManifest, "add", add)
        with pytest.raises(Unavailable, match="took too long"):
            await moved.log.seal("t")
    (file,) = await moved.files()
    return file


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_i7_i9_a_segment_that_was_named_late_is_replaced(
    monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):
        late = await added_late(moved, monkeypatch, lambda: moved.pass_time(LATE_S))
        if is_deleted:
            await moved.inner.delete([moved.key(late)])
        assert moved.log.state.partition("t", 0).sealed_end == 0
        assert await read_values(moved.log) == ["a", "b"]
        await moved.log.seal("t")
        (file,) = await moved.files()
        assert (file.base_offset, file.end_offset, file.rows) == (0, 2, 2)
        assert file.path != late.path
        assert moved.log.state.partition("t", 0).sealed_end == 2
        await moved.inner.delete([moved.key(late)])  # a plan of collection from before
        assert await read_values(moved.log) == ["a", "b"]
        assert (await read_table(moved.log)).num_rows == 2


async def test_a_young_segment_of_another_sealer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):

        async def killed(*_: object, **__: object) -> None:
            raise Unavailable("killed")

        with monkeypatch.context() as patched:
            patched.setattr(moved.log.writer, "append", killed)
            with pytest.raises(Unavailable, match="killed"):
                await moved.log.seal("t")
        before = await moved.files()
        moved.pass_time(LATE_S - 100)
        await moved.log.seal("t")
        assert await moved.files() == before
        assert moved.log.state.partition("t", 0).sealed_end == 2


async def test_two_sealers_that_replace_one_segment_replace_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):
        await added_late(moved, monkeypatch, lambda: moved.pass_time(LATE_S))
        async with closing(await opened(moved.inner, COLD)) as other:
            other_clock = other.clock
            assert isinstance(other_clock, ManualClock)
            other_clock.advance(LATE_S)
            real = MemoryManifest.replace

            async def replace(self: MemoryManifest, *given: object, **named: object) -> None:
                monkeypatch.setattr(MemoryManifest, "replace", real)
                await other.seal("t")
                await real(self, *given, **named)  # type: ignore[arg-type]

            monkeypatch.setattr(MemoryManifest, "replace", replace)
            assert await moved.log.seal("t") == 0
            assert moved.log.sealer.counters.conflicts == 1
            await moved.log.seal("t")
            assert len(await moved.files()) == 1
            assert await read_values(moved.log) == ["a", "b"]
