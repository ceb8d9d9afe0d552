"""Uploads of a seal: as many at once as the bounds allow; the first error ends the others."""

import asyncio

import pytest

from tests.support.faults import FaultyStore
from tests.support.logs import closing, opened
from tests.support.vloop import run
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import StoreRefused
from tidelog.storage.core.model import Part, SegmentFile
from tidelog.storage.io.memory import MemoryStore
from tidelog.storage.io.object_store import Created
from tidelog.storage.log import Log
from tidelog.storage.wal.freshness import Freshness
from tidelog.storage.write import uploads
from tidelog.storage.write.tail_segments import EncodedSegment
from tidelog.storage.write.uploads import CommitUploads, Uploader


class CountingStore(FaultyStore):
    """Knows the largest number of uploads at once, and of their bytes."""

    now = now_bytes = most = most_bytes = 0
    refused = ""

    async def create(self, key: str, parts: list[Part]) -> Created:  # type: ignore[override]
        if self.refused and self.refused in key:
            raise StoreRefused("no space")
        size = sum(map(len, parts))
        self.now, self.now_bytes = self.now + 1, self.now_bytes + size
        self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.now_bytes)
        try:
            await asyncio.sleep(1.0)
            return await super().create(key, parts)
        finally:
            self.now, self.now_bytes = self.now - 1, self.now_bytes - size


def segment(number: int, size: int) -> EncodedSegment:
    path = object_keys.segment(number, 0, 1, f"{number:032x}")
    return EncodedSegment(SegmentFile(path, number, 0, 1, size, 1, 0, 0), memoryview(bytes(size)))


async def upload_all(
    log: Log, store: CountingStore, work: CommitUploads, sizes: list[int]
) -> Uploader:
    uploader = Uploader(store, Freshness(store, log.clock))
    async with uploader.uploading(log.state.topic("t"), work) as start:
        for number, size in enumerate(sizes):
            await start(segment(number, size))
    return uploader


@pytest.mark.parametrize(
    ("sizes", "most", "seconds"), [([1] * 10, 4, 3.0), ([60] * 3, 1, 3.0), ([500, 1, 1], 2, 2.0)]
)
def test_uploads_are_bounded_in_number_and_bytes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], most: int, seconds: float
) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 4)
    monkeypatch.setattr(uploads, "UPLOAD_BYTES_MAX", 100)

    async def main() -> None:
        inner = MemoryStore()
        log = await opened(inner)
        async with closing(log):
            await log.create_topic("t", 1, {})
            store, work = CountingStore(inner), CommitUploads()
            began_s = asyncio.get_running_loop().time()
            await upload_all(log, store, work, sizes)
            assert asyncio.get_running_loop().time() - began_s == seconds
            assert store.most == most
            assert store.most_bytes <= max(100, sizes[0])
            assert [one.file.partition for one in work.take_done()] == list(range(len(sizes)))
            assert work.files() == []

    run(main)


def test_the_first_error_ends_the_other_uploads_and_gives_their_room_back() -> None:
    async def main() -> None:
        inner = MemoryStore()
        log = await opened(inner)
        async with closing(log):
            await log.create_topic("t", 1, {})
            store, work = CountingStore(inner), CommitUploads()
            store.refused = "partition=3"
            with pytest.raises(StoreRefused):
                await upload_all(log, store, work, [1] * 8)
            assert work.take_done() == []
            assert [file.partition for file in work.files()] == list(range(8))  # to be deleted
            store.refused = ""
            uploader = await upload_all(log, store, CommitUploads(), [1] * 8)
            assert (uploader._count, uploader._bytes) == (0, 0)

    run(main)


def test_a_segment_after_one_that_is_not_uploaded_is_not_committed() -> None:
    work = CommitUploads()
    made = [
        uploads.SegmentUpload(segment(0, 1).file, 0, is_done) for is_done in (True, False, True)
    ]
    work.of = {0: made, 1: made[1:], 2: made[:1]}
    assert work.take_done() == [made[0], made[0]]
    assert work.of == {0: made[1:], 1: made[1:], 2: []}
