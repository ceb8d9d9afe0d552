"""The objects that have the chunks of tails: WAL entries and uploads, read in parts and kept.

A flush puts chunks of many partitions into one object, and a consumer wants them all. So a broker
reads objects, not chunks: one GET of a part serves all chunks in it. Announced chunks of small
entries are kept here, too, and need no GET.

The brokers of a zone read each object once (`ZoneReader`): one of them reads it from the store, and
the others ask that broker. Nothing depends on what it answers. `read` checks the bytes by the
chunk's checksum in the WAL. If they are missing, wrong or late, it reads the chunk from the store.

Memory is bounded (I10): the bytes that are kept, and the number of parts that are being read.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core.errors import cut_off
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.tasks import retrieve_exception, together
from tidelog.storage.store.object_store import ObjectStore

log = logging.getLogger("tidelog.wal")

PART_BYTES = 4 * 1024 * 1024
"""Parts begin at multiples of this position. S3 gives a connection 50 to 100 MB/s, so a part takes
no more than twice the time of a small range."""
BLOCK_BYTES = 256 * 1024
"""The least number of bytes that a GET asks for. A reader of one partition gets no more."""
STORE_READS_MAX = 8
"""Maximum number of parts that are being read from the store at the same time."""
PART_OVERHEAD = 512
"""Memory of a part in addition to its bytes."""
GATHER_TURNS = 2
"""Turns of the event loop before a GET. Reads that begin together then need one GET."""
RECENT_PARTS = 8
"""If readers wanted several blocks of most of the last parts, the next part is read whole."""


class ZoneReader(Protocol):
    """The other brokers of the zone, as a source of the bytes of objects."""

    async def read(self, key: str, start: int, length: int) -> Part | None:
        """Return bytes [start, start + length) of the object, or fewer at its end.

        Return None if this broker has to read the object from the store.
        """

    def distrust(self, key: str) -> None:
        """Ask the broker that answered for this object no more, for a time."""


class _NoZone:
    """A zone without other brokers."""

    async def read(self, key: str, start: int, length: int) -> Part | None:
        return None

    def distrust(self, key: str) -> None:
        """No broker answered."""


NO_ZONE: ZoneReader = _NoZone()


@dataclass
class TailObjectCounters:
    """Counters since the process started."""

    hits: int = 0
    misses: int = 0
    store_reads: int = 0
    zone_reads: int = 0
    """Reads that another broker of the zone answered."""
    wrong: int = 0
    """Chunks whose kept bytes had another checksum. They were read from the store."""
    served: int = 0
    """Reads of other brokers of the zone that this broker answered."""


class _ObjectPart:
    """The bytes of one part of an object that are known."""

    __slots__ = ("body", "body_start", "end", "load", "start", "wanted")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start + PART_BYTES
        """Less for the last part, once its end has been read."""
        self.body_start = start
        self.body = b""
        """The bytes that are known, from `body_start` on."""
        self.wanted: set[int] = set()
        """The blocks that readers wanted so far."""
        self.load: asyncio.Task[None] | None = None

    @property
    def nbytes(self) -> int:
        return PART_OVERHEAD + len(self.body)

    def get(self, start: int, end: int) -> bytes | None:
        """Return a copy of the bytes [start, end), or those before the object's end, if known.

        Note which blocks are wanted.
        """
        self.wanted.update(range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1))
        end = min(end, self.end)
        if start >= end:
            return b""
        first = self.body_start
        if first <= start and end <= first + len(self.body):
            # A copy: a view would keep all bytes as long as the chunk's records.
            return self.body[start - first : end - first]
        return None

    def range_to_read(self, *, is_whole: bool) -> tuple[int, int]:
        """Return the bytes [start, end) that one GET has to bring for all that is wanted."""
        if is_whole or self.body or len(self.wanted) > 1:
            return self.start, self.end
        (block,) = self.wanted
        return max(block * BLOCK_BYTES, self.start), min((block + 1) * BLOCK_BYTES, self.end)


class TailObjects:
    """The parts that were read last, owned by one event loop."""

    def __init__(self, store: ObjectStore, bytes_max: int, zone: ZoneReader = NO_ZONE) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.counters = TailObjectCounters()
        self._store = store
        self._zone = zone
        self._parts: OrderedDict[tuple[str, int], _ObjectPart] = OrderedDict()
        self._recent: deque[set[int]] = deque(maxlen=RECENT_PARTS)
        """The wanted blocks of the last new parts."""
        self._store_slots = asyncio.Semaphore(STORE_READS_MAX)

    def add(self, key: str, start: int, body: bytes) -> None:
        """Keep announced bytes of an object, from position `start` on."""
        number = start // PART_BYTES
        if body and (key, number) not in self._parts:
            self._set_body(key, self._new_part(key, number), start, body)

    def peek(self, key: str, position: int, size: int, crc: int) -> bytes | None:
        """Return the chunk's bytes if they are here and match the checksum, without a wait."""
        part = self._parts.get((key, position // PART_BYTES))
        body = None if part is None else part.get(position, position + size)
        return body if body is not None and len(body) == size and crc32c(body) == crc else None

    async def read(self, key: str, position: int, size: int, crc: int) -> bytes:
        """Return the bytes of a chunk.

        They match the checksum, or they are those in the store. Raises ObjectNotFound, Unavailable;
        Corrupt if the object is cut off.
        """
        if (body := self.peek(key, position, size, crc)) is not None:
            self.counters.hits += 1
            return body
        self.counters.misses += 1
        body = await self._bytes(key, position, size, is_forwarded=False)
        if len(body) == size and crc32c(body) == crc:
            return body
        self.counters.wrong += 1
        log.warning("%s: bytes %d to %d are wrong here", key, position, position + size)
        self._zone.distrust(key)
        self._forget(key)
        self.counters.store_reads += 1
        body = await self._store.get_range(key, position, size)
        if len(body) != size:
            raise cut_off(key, len(body), size, position)
        return body

    async def beginning(self, key: str, size: int) -> bytes:
        """Return the first `size` bytes of an object, or all. The caller checks them.

        Raises ObjectNotFound, Unavailable.
        """
        return await self._bytes(key, 0, size, is_forwarded=False)

    async def serve(self, key: str, start: int, length: int) -> bytes:
        """Return bytes [start, start + length) for another broker, or fewer at the object's end.

        This broker does not ask a third one. Raises ObjectNotFound, Unavailable.
        """
        self.counters.served += 1
        return await self._bytes(key, start, length, is_forwarded=True)

    async def _bytes(self, key: str, start: int, size: int, *, is_forwarded: bool) -> bytes:
        """Return bytes [start, start + size), or fewer at the object's end."""
        end = start + size
        numbers = range(start // PART_BYTES, max(end - 1, start) // PART_BYTES + 1)
        bounds = [
            (number, max(start, number * PART_BYTES), min(end, (number + 1) * PART_BYTES))
            for number in numbers
        ]
        if len(bounds) == 1:
            return await self._piece(key, *bounds[0], is_forwarded=is_forwarded)
        pieces = [
            self._piece(key, *part_bounds, is_forwarded=is_forwarded) for part_bounds in bounds
        ]
        return b"".join(await together(*pieces))

    async def _piece(
        self, key: str, number: int, start: int, end: int, *, is_forwarded: bool
    ) -> bytes:
        """Return bytes [start, end) of a part, or fewer at the object's end."""
        part = self._parts.get((key, number)) or self._new_part(key, number)
        while (piece := part.get(start, end)) is None:
            if part.load is None or part.load.done():
                # A task of its own: a cancelled reader does not fail the others.
                part.load = asyncio.create_task(self._load(key, part, is_forwarded=is_forwarded))
                part.load.add_done_callback(retrieve_exception)
            await asyncio.shield(part.load)
        if (key, number) in self._parts:
            self._parts.move_to_end((key, number))
        return piece

    async def _load(self, key: str, part: _ObjectPart, *, is_forwarded: bool) -> None:
        """Read what is wanted of the part with one GET."""
        for _ in range(GATHER_TURNS):
            await asyncio.sleep(0)
        start, end = part.range_to_read(is_whole=self._is_dense(part))
        body = None if is_forwarded else await self._zone.read(key, start, end - start)
        if body is not None:
            self.counters.zone_reads += 1
        else:
            async with self._store_slots:
                self.counters.store_reads += 1
                body = await self._store.get_range(key, start, end - start)
        if len(body) < end - start:
            part.end = start + len(body)
        self._set_body(key, part, start, bytes(body))

    def _is_dense(self, part: _ObjectPart) -> bool:
        """Return whether readers wanted several blocks of most of the last other parts."""
        are_dense = [len(blocks) > 1 for blocks in self._recent if blocks is not part.wanted]
        return 2 * sum(are_dense) > len(are_dense)

    def _new_part(self, key: str, number: int) -> _ObjectPart:
        part = self._parts[key, number] = _ObjectPart(number * PART_BYTES)
        self._recent.append(part.wanted)
        self.bytes += part.nbytes
        self._evict()
        return part

    def _set_body(self, key: str, part: _ObjectPart, start: int, body: bytes) -> None:
        """Replace the bytes of the part. If it was evicted meanwhile, only its readers get them."""
        is_kept = self._parts.get((key, part.start // PART_BYTES)) is part
        self.bytes -= part.nbytes if is_kept else 0
        part.body_start, part.body = start, body
        self.bytes += part.nbytes if is_kept else 0
        self._evict()

    def _forget(self, key: str) -> None:
        """Drop all parts of an object."""
        for place in [place for place in self._parts if place[0] == key]:
            self.bytes -= self._parts.pop(place).nbytes

    def _evict(self) -> None:
        while self.bytes > self.bytes_max and self._parts:
            _, part = self._parts.popitem(last=False)
            self.bytes -= part.nbytes
