"""Uploads of a seal: as many at once as the bounds allow; after an error no other begins."""

import asyncio

import pytest

from tests.support.faults import FaultyStore
from tests.support.logs import closing, with_topic
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import StoreRefused
from tidelog.storage.core.model import Part, SegmentFile
from tidelog.storage.seal import uploads
from tidelog.storage.seal.encode import EncodedSegment
from tidelog.storage.seal.uploads import CommitUploads, Uploader
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.view_age import Freshness


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
    uploader: Uploader, log: Broker, work: CommitUploads, sizes: list[int]
) -> None:
    async with uploader.uploading(log.state.topic("t"), work) as start:
        for number, size in enumerate(sizes):
            await start(segment(number, size))


@pytest.mark.parametrize(
    ("sizes", "most", "seconds"), [([1] * 10, 4, 3.0), ([60] * 3, 1, 3.0), ([500, 1, 1], 2, 2.0)]
)
async def test_uploads_are_bounded_in_number_and_bytes(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch, sizes: list[int], most: int, seconds: float
) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 4)
    monkeypatch.setattr(uploads, "UPLOAD_BYTES_MAX", 100)
    async with closing(await with_topic(inner)) as log:
        store, work = CountingStore(inner), CommitUploads()
        began_s = asyncio.get_running_loop().time()
        uploader = Uploader(store, Freshness(store, log.clock))
        await upload_all(uploader, log, work, sizes)
        assert asyncio.get_running_loop().time() - began_s == seconds
        assert store.most == most
        assert store.most_bytes <= max(100, sizes[0])
        assert [encoded_segment.file.partition for encoded_segment in work.take_done()] == list(
            range(len(sizes))
        )
        assert work.files() == []


class ThreadedStore(CountingStore):
    """A create that is cancelled ends nevertheless, as in a thread."""

    async def create(self, key: str, parts: list[Part]) -> Created:  # type: ignore[override]
        return await asyncio.shield(super().create(key, parts))


@pytest.mark.parametrize("refused", [3, 7])
async def test_after_an_error_no_upload_begins_and_none_leaves_a_file(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 4)
    async with closing(await with_topic(inner)) as log:
        topic, store, work = log.state.topic("t"), ThreadedStore(inner), CommitUploads()
        store.refused = f"partition={refused}"
        uploader = Uploader(store, Freshness(store, log.clock))
        with pytest.raises(StoreRefused):
            await upload_all(uploader, log, work, [1] * 12)
        assert [file.partition for file in work.files()] == list(range(refused + 1))
        await uploader.remove(topic, work.files())
        await asyncio.sleep(60)
        assert [info.key async for info in inner.list(topic.prefix)] == []
        assert (uploader._count, uploader._bytes) == (0, 0)
        store.refused = ""
        await upload_all(uploader, log, CommitUploads(), [1] * 8)
        assert (uploader._count, uploader._bytes) == (0, 0)


def test_a_segment_after_one_that_is_not_uploaded_is_not_committed() -> None:
    work = CommitUploads()
    segment_uploads = [
        uploads.SegmentUpload(segment(0, 1).file, 0, is_done) for is_done in (True, False, True)
    ]
    work.of = {0: segment_uploads, 1: segment_uploads[1:], 2: segment_uploads[:1]}
    assert work.take_done() == [segment_uploads[0], segment_uploads[0]]
    assert work.of == {0: segment_uploads[1:], 1: segment_uploads[1:], 2: []}
