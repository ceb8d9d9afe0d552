"""Uploads of segments before their commit to the table: several at once, and never too old."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.seal.encode import EncodedSegment
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.moments import NEVER, Moment
from tidelog.storage.store.object_store import ObjectStore, upload
from tidelog.storage.wal.view_age import Freshness

UPLOAD_AGE_MAX_S = 3600.0
"""Maximum time from a segment's upload to its commit. The grace of collection is several times as
long. One upload and one commit must take less than half of this time."""
UPLOADS_MAX = 16
"""Uploads of a broker's seals at the same time."""
UPLOAD_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of these uploads, unless one segment is larger (I10)."""
END_S = 60.0
"""Time that the uploads of a commit have to end after one of them has failed."""


@dataclass
class SegmentUpload:
    """The upload of one segment; `lost_end` as in EncodedSegment."""

    file: SegmentFile
    lost_end: int
    is_done: bool = False


@dataclass
class CommitUploads:
    """The uploads for one commit to the table.

    `limit`, if given, ends them and the reads for them when the uploaded segments must be
    committed.
    """

    limit: asyncio.Timeout | None = None
    started: Moment = NEVER
    started_s: float = 0.0
    """The moment before the first upload; `started_s` is the same moment by the loop's time."""
    of: dict[int, list[SegmentUpload]] = field(default_factory=dict)
    """By partition, in offset order."""

    def take_done(self) -> list[SegmentUpload]:
        """Return the uploads that can be committed, and drop them here.

        These are, of each partition, those before the first one that is not done.
        """
        done_uploads: list[SegmentUpload] = []
        for number, uploads in self.of.items():
            undone = [
                index for index, segment_upload in enumerate(uploads) if not segment_upload.is_done
            ]
            count = undone[0] if undone else len(uploads)
            done_uploads += uploads[:count]
            self.of[number] = uploads[count:]
        return done_uploads

    def files(self) -> list[SegmentFile]:
        """Return the files of all uploads that began and are still here."""
        return [segment_upload.file for uploads in self.of.values() for segment_upload in uploads]


Start: TypeAlias = Callable[[EncodedSegment], Awaitable[None]]
"""Starts the upload of a segment as soon as there is room for its bytes."""


class Uploader:
    """The uploads of a broker's seals. Owned by one event loop."""

    def __init__(self, store: ObjectStore, freshness: Freshness) -> None:
        self._store = store
        self._freshness = freshness
        self._bytes = self._count = 0
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def uploading(self, topic: Topic, work: CommitUploads) -> AsyncIterator[Start]:
        """Upload segments of a topic, in the block; at its end wait for all uploads.

        After an error no upload begins; those under way have up to END_S to end, because a
        cancelled upload may still make its file, after `remove`.
        """
        uploads: list[asyncio.Task[None]] = []

        async def start(segment: EncodedSegment) -> None:
            nbytes = len(segment.body)
            await self._take(nbytes)
            try:
                _raise_error(uploads)
            except BaseException:
                self._give_back(nbytes)
                raise
            if not work.of:
                work.started = self._freshness.now()
                work.started_s = asyncio.get_running_loop().time()
            segment_upload = SegmentUpload(segment.file, segment.lost_end)
            work.of.setdefault(segment.file.partition, []).append(segment_upload)
            task = asyncio.create_task(self._upload(topic, segment, work, segment_upload))
            task.add_done_callback(lambda _: self._give_back(nbytes))
            uploads.append(task)

        try:
            yield start
            await asyncio.gather(*uploads)
        except Exception:
            if uploads:
                await asyncio.wait(uploads, timeout=END_S)
            raise
        finally:
            for task in uploads:
                task.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)

    def check_age(self, topic: Topic, started: Moment) -> None:
        """Raise Unavailable if collection may delete files that were uploaded since `started`."""
        if self._freshness.age_s(started) > UPLOAD_AGE_MAX_S:
            raise Unavailable(f"sealing {topic.name} took too long: its files may be deleted")

    async def remove(self, topic: Topic, files: Sequence[SegmentFile]) -> None:
        """Delete uploads that no commit names.

        Otherwise each retry of a seal would leave as many again, on a disk that may be full.
        """
        if files:
            with contextlib.suppress(LogError):
                await self._store.delete([f"{topic.prefix}/{file.path}" for file in files])

    async def _upload(
        self,
        topic: Topic,
        segment: EncodedSegment,
        work: CommitUploads,
        segment_upload: SegmentUpload,
    ) -> None:
        await upload(self._store, f"{topic.prefix}/{segment.file.path}", [segment.body])
        segment_upload.is_done = True
        # The first upload that can be committed is never stopped: each commit has a segment.
        limit = work.limit
        if limit and limit.when() is None and work.of[segment.file.partition][0] is segment_upload:
            limit.reschedule(work.started_s + UPLOAD_AGE_MAX_S / 2)

    async def _take(self, nbytes: int) -> None:
        while self._count and (
            self._count >= UPLOADS_MAX or self._bytes + nbytes > UPLOAD_BYTES_MAX
        ):
            self._freed.clear()
            await self._freed.wait()
        self._bytes += nbytes
        self._count += 1

    def _give_back(self, nbytes: int) -> None:
        self._bytes -= nbytes
        self._count -= 1
        self._freed.set()


def _raise_error(uploads: Iterable[asyncio.Task[None]]) -> None:
    for task in uploads:
        if task.done():
            task.result()
