"""Reads of partitions without a group, each from an offset that the client keeps.

Each partition has at most one request at a time. `read` returns as soon as one partition has
records; the other requests go on, and a later `read` returns their responses. The memory is bounded
by READS_AT_ONCE large responses, and a short one for each other partition.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from tidelog.service.client.connection import Connection, quoted
from tidelog.service.client.errors import BadArgument, Refused
from tidelog.service.client.records import ON_ERROR, PartitionPage, ReadFormat
from tidelog.storage.core.model import TopicPartition

READS_AT_ONCE = 8
"""Requests at a time that do not wait for new records."""
OUT_OF_RANGE = 40002
"""Code of invalid parameters, such as an offset that retention has removed."""


class PartitionReader:
    """Positions of partitions, and the requests under way. Belongs to one event loop."""

    def __init__(
        self,
        connection: Connection,
        fmt: ReadFormat,
        *,
        fetch_bytes: int,
        reset: str,
    ) -> None:
        """`reset` is earliest, latest, or empty: then an offset out of range is an error."""
        self._connection = connection
        self._format = fmt
        self._fetch_bytes = fetch_bytes

        self._reset = reset
        self._reads: dict[TopicPartition, asyncio.Task[PartitionPage]] = {}
        self._polls: set[TopicPartition] = set()
        """Partitions of `_reads` whose requests wait at the broker for new records."""
        self._caught_up: set[TopicPartition] = set()
        """Partitions whose last page was short."""
        self.paused: set[TopicPartition] = set()
        self.positions: dict[TopicPartition, int] = {}

    async def start(self, topics: Mapping[str, int]) -> None:
        """Begin at the start or the end of all partitions of these topics (name: partitions)."""
        places = [TopicPartition(name, p) for name, count in topics.items() for p in range(count)]

        async def ends(partition: TopicPartition) -> tuple[int, int]:
            async with gate:
                return await self._connection.ends(*partition)

        gate = asyncio.Semaphore(READS_AT_ONCE)
        bounds = await asyncio.gather(*map(ends, places))
        for partition, (first, end) in zip(places, bounds, strict=True):
            self.positions[partition] = end if self._reset == "latest" else first

    async def read(self, wait_ms: int) -> list[PartitionPage]:
        """Return the pages that have arrived, after up to `wait_ms`.

        With 0, return after one read of each partition. A page may be empty. Raises ClientError;
        then the other partitions keep their requests.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        if not wait_ms:
            for partition in list(self._polls):
                self._cancel(partition)
        tried: set[TopicPartition] = set()
        pages: list[PartitionPage] = []
        while True:
            self._start_reads(wait_ms, tried)
            if not self._reads:
                return pages
            done_tasks, _ = await asyncio.wait(
                self._reads.values(),
                timeout=max(deadline_s - loop.time(), 0) if wait_ms else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            pages += self._taken(done_tasks)
            if not done_tasks or any(page.records for page in pages):
                return pages

    def _start_reads(self, wait_ms: int, tried: set[TopicPartition]) -> None:
        """Start as many requests as the bounds allow.

        Only the request for a partition whose last page was short waits at the broker for new
        records. The other responses are large, so there are at most READS_AT_ONCE of them.
        """
        large = len(self._reads) - len(self._polls)
        for partition in list(self.positions):
            if (
                partition in self._reads
                or partition in self.paused
                or (not wait_ms and partition in tried)
            ):
                continue
            is_poll = wait_ms > 0 and partition in self._caught_up
            if not is_poll and large >= READS_AT_ONCE:
                continue
            if is_poll:
                self._polls.add(partition)
            else:
                large += 1
                self.positions[partition] = self.positions.pop(
                    partition
                )  # to the end: others are next
            tried.add(partition)
            work = self._fetch(partition, wait_ms if is_poll else 0)
            self._reads[partition] = asyncio.create_task(work)

    def _taken(self, done_tasks: "set[asyncio.Task[PartitionPage]]") -> list[PartitionPage]:
        pages = []
        failures = []
        for partition, task in list(self._reads.items()):
            if task not in done_tasks:
                continue
            del self._reads[partition]
            self._polls.discard(partition)
            error = task.exception()
            if error is not None:
                failures.append(error)
                continue
            page = task.result()
            self.positions[partition] = page.next_offset
            pages.append(page)
        if failures and not pages:
            raise failures[0]
        return pages

    async def _fetch(self, partition: TopicPartition, wait_ms: int) -> PartitionPage:
        offset = self.positions[partition]
        params: dict[str, Any] = {
            "offset": offset,
            "timeout": wait_ms,
            "max_bytes": self._fetch_bytes,
            "format": self._format.name,
            "on_error": ON_ERROR,
        }
        path = f"/topics/{quoted(partition.topic)}/partitions/{partition.partition}/records"
        request = self._connection.get(
            path,
            params=params,
            headers={"accept": self._format.accept},
            wait_s=wait_ms / 1000,
        )
        try:
            answer = await request
        except Refused as error:
            if error.code != OUT_OF_RANGE or not self._reset:
                raise
            first, end = await self._connection.ends(*partition)
            if first <= offset <= end:
                raise
            return PartitionPage(partition, [], end if self._reset == "latest" else first)
        try:
            next_offset = int(answer.headers["tidelog-next-offset"])
            records = self._format.decode_fetch(answer.content)
        except (LookupError, ValueError):
            raise self._connection.is_no_broker() from None
        self._connection.learn_soon()
        if len(answer.content) < self._fetch_bytes / 2:
            self._caught_up.add(partition)
        else:
            self._caught_up.discard(partition)
        return PartitionPage(partition, records, next_offset)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition not in self.positions:
            raise BadArgument(
                f"{partition.topic}-{partition.partition} is not read by this consumer"
            )
        self.positions[partition] = offset
        self._caught_up.discard(partition)
        self._cancel(partition)

    def pause(self, partition: TopicPartition) -> None:
        """Read no further records of this partition. A response under way is dropped."""
        self.paused.add(partition)
        self._cancel(partition)

    def _cancel(self, partition: TopicPartition) -> None:
        read = self._reads.pop(partition, None)
        if read is not None:
            read.cancel()
        self._polls.discard(partition)

    async def close(self) -> None:
        reads = list(self._reads.values())
        self._reads.clear()
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
