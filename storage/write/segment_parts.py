"""The parts of a flush: those whose upload began while the segment was open, and the remainder.

If the open segment has the bytes of an upload, its requests become a part: they are laid out and
encoded as a closed segment is, and uploaded. The next requests become the next part. A flush takes
the parts of its first requests, in order, and encodes the others: so all requests keep their order,
and one entry has them all (I4). Segments are cut by bytes, never by time, because each cut makes
more chunks.

A part is only work done ahead. If its requests do not come to the next flush as they are (one
timed out, or waits for another), it is dropped, and they are encoded again.

**On a crash**, and if a part is dropped: uploads are left that no entry names (wal.chunk_uploads).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.storage.codec.entry import Draft
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.tasks import TASK_ENDS, begin_duty, retrieve_exception
from tidelog.storage.wal.chunk_uploads import ChunkUploads
from tidelog.storage.write.hot_segment import ClosedSegment, EncodedDraft
from tidelog.storage.write.requests import AppendRequest

log = logging.getLogger("tidelog.writer")

CHUNKS_MAX = 128
"""A part of more partitions waits for more bytes: it has so many for each 8 MiB, so a chunk has
64 KiB on average. Each chunk costs every broker 3.5 us and ~400 bytes until it is sealed."""


class EncodedPart(NamedTuple):
    """Requests of a flush, encoded.

    `draft` is the draft of `encoded`; it refers to uploads if the chunks were uploaded.
    """

    segment: ClosedSegment
    encoded: EncodedDraft
    draft: Draft


@dataclass(eq=False)
class BegunPart:
    """The first requests of the open segment that no earlier part has; `size` is their bytes."""

    requests: list[AppendRequest]
    size: int
    work: asyncio.Task[EncodedPart]


class SegmentParts:
    """The parts of one writer's open segment, and of its flush. Owned by one event loop."""

    def __init__(
        self, new_id: Callable[[], bytes], codec: str, uploads: ChunkUploads | None
    ) -> None:
        """Without `uploads`, a flush is one part."""
        self.bytes = 0
        """Bytes of encoded parts whose commit is not finished, in addition to their requests."""
        self._new_id = new_id
        self._codec = codec
        self._uploads = uploads
        self._context = copy_context()
        """That of the writer, not of the request whose bytes complete a part."""
        self._begun: list[BegunPart] = []
        self._begun_bytes = 0
        self._due_bytes = 0 if uploads is None else uploads.settings.upload_bytes

    def is_due(self, open_bytes: int, left_bytes: int, *, is_behind: bool) -> bool:
        """Return whether the open segment of `open_bytes` has the bytes of a next part.

        `left_bytes` is the memory for the part. A broker without peers uploads ahead only if it
        `is_behind`: a flush is under way. Else one PUT of all bytes is cheaper.
        """
        next_bytes = open_bytes - self._begun_bytes
        if self._uploads is None or not self._due_bytes <= next_bytes <= left_bytes:
            return False
        return is_behind or self._uploads.has_peers()

    def begin(self, open_requests: Sequence[AppendRequest]) -> None:
        """Begin a part with all requests of the open segment that have none.

        If they have too many partitions for their bytes, wait for more bytes.
        """
        assert self._uploads is not None, "a part is due"
        requests = list(open_requests[sum(len(part.requests) for part in self._begun) :])
        size = sum(request.size for request in requests)
        partitions = {partition for request in requests for partition in request.partitions()}
        upload_bytes = self._uploads.settings.upload_bytes
        if len(partitions) * upload_bytes > CHUNKS_MAX * size:
            # The number of partitions takes time to count.
            self._due_bytes = size + upload_bytes // 2
            return
        self._due_bytes = upload_bytes
        work = self._context.run(begin_duty, "commit", self._upload(requests))
        work.add_done_callback(retrieve_exception)
        self._begun.append(BegunPart(requests, size, work))
        self._begun_bytes += size
        self.bytes += size

    def wait_for_flush(self) -> None:
        """Begin no part until the next flush."""
        self._due_bytes = 2**63

    def drop(self) -> None:
        """Drop the parts that no flush has taken."""
        self._release(self._begun)
        self._begun, self._begun_bytes = [], 0

    @contextlib.contextmanager
    def taken(self, requests: Sequence[AppendRequest]) -> Iterator[list[BegunPart]]:
        """Take the parts of the first requests of a flush, until its commit is finished.

        The others are dropped.
        """
        begun, self._begun, self._begun_bytes = self._begun, [], 0
        if self._uploads is not None:
            self._due_bytes = self._uploads.settings.upload_bytes
        matching, count = 0, 0
        for part in begun:
            last = count + len(part.requests)
            if part.requests != requests[count:last]:  # by identity
                break
            matching, count = matching + 1, last
        self._release(begun[matching:])
        try:
            yield begun[:matching]
        finally:
            self._release(begun[:matching])

    async def encode(
        self, requests: Sequence[AppendRequest], begun: Sequence[BegunPart]
    ) -> list[EncodedPart]:
        """Return the parts of a flush in order: those of `begun`, and one of the other requests.

        If an upload failed, or is old, the draft of its part has the bytes, as without parts.
        """
        last_requests = requests[sum(len(part.requests) for part in begun) :]
        encoded_parts = [] if begun and not last_requests else [await self._encode(last_requests)]
        if begun and encoded_parts and self._uploads is not None:
            # While the parts before it are on their way.
            (last,) = encoded_parts
            with _logging_failure():
                draft = await self._uploads.upload_if_large(last.draft)
                encoded_parts = [last._replace(draft=draft)]
        return [*[self._fresh(await part.work) for part in begun], *encoded_parts]

    def _fresh(self, part: EncodedPart) -> EncodedPart:
        assert self._uploads is not None, "the part was begun"
        is_fresh = self._uploads.is_fresh(part.draft)
        return part if is_fresh else part._replace(draft=part.encoded.draft)

    async def _upload(self, requests: Sequence[AppendRequest]) -> EncodedPart:
        assert self._uploads is not None, "a part is due"
        part = await self._encode(requests)
        draft = part.draft
        with _logging_failure():
            draft = await self._uploads.upload(draft)
        return part._replace(draft=draft)

    async def _encode(self, requests: Sequence[AppendRequest]) -> EncodedPart:
        segment = ClosedSegment(requests, self._new_id)
        if segment.is_small:
            encoded = segment.encode(self._codec)
        else:
            encoded = await asyncio.to_thread(segment.encode, self._codec)
        return EncodedPart(segment, encoded, encoded.draft)

    def _release(self, begun: Sequence[BegunPart]) -> None:
        for part in begun:
            part.work.cancel()
            self.bytes -= part.size


@contextlib.contextmanager
def _logging_failure() -> Iterator[None]:
    """Log the error of an upload: the commit of the bytes themselves may succeed."""
    try:
        yield
    except TASK_ENDS:
        raise
    except LogError as error:
        log.warning("an upload before its commit failed: %s", error)
    except BaseException as error:
        log.critical("bug in an upload", exc_info=error)
