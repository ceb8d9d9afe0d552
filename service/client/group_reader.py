"""Reads as a member of a consumer group: one instance after another.

The broker keeps the instance's positions. Whether a response was lost, it knows only as far as TCP
shows. So after a lost response, this reader seeks to its own positions (`positions`) before it
reads again. A new coordinator begins at the committed offsets, so a broker may send records again:
this reader drops them.

- 404/40403: the instance has expired. The reader joins as a new instance, which begins at the
  committed offsets.
- 409/40903: the group has a new generation. The reader asks for its assignment, and forgets
  partitions that it has lost, with their offsets to commit: their new owner reads those records.
- 503 or no connection: Connection repeats the request on another broker. Any broker serves an
  instance.

A request is a heartbeat. While the caller works on records, a task sends one request in a third of
the session timeout. The broker ends a member that does not read for `max.poll.interval.ms`.

**On a crash**: the member expires after the session timeout, and another member reads from the
committed offsets on.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.service.client.connection import Connection, quoted
from tidelog.service.client.errors import (
    BadArgument,
    ClientError,
    NotFound,
    NotReachable,
    Refused,
)
from tidelog.service.client.records import ARROW, PartitionPage, ReadFormat, pages
from tidelog.storage.core.model import TopicPartition

NO_INSTANCE = 40403
ILLEGAL_STATE = 409
EXISTS = 40902
COMMIT_TRIES = 10
"""Tries of one commit, each after a new generation. After the last one, nothing is committed."""
LEAVE_S = 1.0
"""Time for the last commit and for the deletion of the instance, each."""


class GroupReader:
    """A member of a group. Belongs to one event loop, from `start` to `close`."""

    def __init__(
        self,
        connection: Connection,
        fmt: ReadFormat,
        group: str,
        topics: Sequence[str],
        config: Mapping[str, Any],
        *,
        fetch_bytes: int,
    ) -> None:
        self._connection = connection
        self._format = fmt
        self.group = group
        self._topics = list(topics)
        self._config = dict(config)
        self._fetch_bytes = fetch_bytes
        self._path = ""
        self.name = ""
        self.generation = -1
        self.positions: dict[TopicPartition, int] = {}
        """The offset after the last record that was returned, by partition."""
        self.assigned: frozenset[TopicPartition] = frozenset()
        self._lost: set[TopicPartition] = set()
        self.is_in_doubt = False
        """The broker's positions may be beyond ours: a response was lost, or we are still reading
        it."""
        self._is_reading = False
        self._heartbeats: asyncio.Task[None] | None = None

    # -- membership

    async def start(self) -> None:
        """Join the group. Raises ClientError."""
        await self._rejoin()
        period_s = self._config["session.timeout.ms"] / 3000
        self._heartbeats = asyncio.create_task(self._beat(period_s), name="tidelog-client-member")

    async def _join(self) -> None:
        self.name = f"{self._config['client.id']}-{os.urandom(12).hex()}"
        path = f"/consumers/{quoted(self.group)}"
        try:
            await self._connection.post(path, json={"name": self.name, **self._config})
        except Refused as error:
            if error.code != EXISTS:  # the name is random, so the instance is that of our request
                raise
        self._path = f"{path}/instances/{quoted(self.name)}"
        await self._connection.post(f"{self._path}/subscription", json={"topics": self._topics})
        self._lost |= self.assigned
        self.positions.clear()
        self.generation = -1
        self.is_in_doubt = False
        await self._read_assignment()

    async def _rejoin(self) -> None:
        """Join as a new instance, and again if this one expires meanwhile (a broker's restart)."""
        while True:
            try:
                await self._join()
            except NotFound as error:
                if error.code != NO_INSTANCE:
                    raise
            else:
                return

    async def _read_assignment(self) -> None:
        """Ask which partitions this member has, and forget the others."""
        assignment = await self._connection.get_json(f"{self._path}/assignments")
        try:
            places = [TopicPartition(p["topic"], p["partition"]) for p in assignment["partitions"]]
        except (LookupError, TypeError):
            raise self._connection.is_no_broker() from None
        self._lost |= self.assigned.difference(places)
        self.assigned = frozenset(places)
        self.positions = {
            partition: offset
            for partition, offset in self.positions.items()
            if partition in self.assigned
        }

    def take_lost(self) -> set[TopicPartition]:
        """Return the partitions that this member has lost since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    async def _beat(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            if not self._is_reading:
                # The next read or commit raises the error.
                with contextlib.suppress(ClientError):
                    await self._connection.get(f"{self._path}/assignments", retry_s=0.0)

    async def close(self) -> None:
        """Delete the instance, so that other members get its partitions at once.

        If no broker answers in LEAVE_S, the instance expires.
        """
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        if self._path:
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._connection.call("DELETE", self._path, retry_s=LEAVE_S)
            self._path = ""

    # -- records

    async def read(self, wait_ms: int) -> list[PartitionPage]:
        """Return the next records of this member's partitions, after up to `wait_ms`.

        Raises ClientError.
        """
        answer = await self._read(wait_ms, "application/vnd.kafka.v2+json")
        if answer is None:
            return []
        try:
            next_pages = pages(self._format.decode_array(answer.content))
        except ValueError:
            raise self._connection.is_no_broker() from None
        next_pages = [fresh for page in next_pages if (fresh := self._fresh(page)).records]
        self.is_in_doubt = False
        return next_pages

    async def read_arrow(self, wait_ms: int) -> bytes | None:
        """Return the next records as an Arrow stream, or None.

        When the caller has set `positions`, it sets `is_in_doubt` to False.
        """
        answer = await self._read(wait_ms, ARROW)
        return None if answer is None else answer.content

    async def _read(self, wait_ms: int, accept: str) -> Any:
        """Return the response to a read; None if the group has changed or the time has passed."""
        self._is_reading = True
        try:
            if self.is_in_doubt:
                await self._seek_to_own()
            answer = await self._request(wait_ms, accept)
            generation = int(answer.headers["tidelog-generation"])
        except NotFound as error:
            if error.code != NO_INSTANCE:
                raise
            await self._rejoin()
            return None
        except Refused as error:
            if error.status != ILLEGAL_STATE:
                raise
            await self._read_assignment_or_join()
            self.is_in_doubt = False
            return None
        except (LookupError, ValueError):
            raise self._connection.is_no_broker() from None
        finally:
            self._is_reading = False
        self._connection.learn_soon()
        if generation != self.generation:
            await self._read_assignment_or_join()
            self.generation = generation
        return answer

    async def _request(self, wait_ms: int, accept: str) -> Any:
        """Read once, and again after failures.

        The retries are here, because after a lost response the broker's positions are beyond the
        records that this client has.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connection.retry_s
        pause_s = 0.1
        while True:
            self.is_in_doubt = True  # also if this task is cancelled during the request
            try:
                answer = await self._connection.get(
                    f"{self._path}/records",
                    params={"timeout": wait_ms, "max_bytes": self._fetch_bytes},
                    headers={"accept": accept},
                    wait_s=wait_ms / 1000,
                    response_s=self._connection.response_s(deadline_s - loop.time()),
                    retry_s=0.0,
                )
            except NotReachable as error:
                if loop.time() + pause_s > deadline_s:
                    raise
                if not error.is_unknown:
                    self.is_in_doubt = False
            except Refused as error:
                self.is_in_doubt = False
                if error.status != 429 or loop.time() + pause_s > deadline_s:
                    raise
            else:
                return answer
            self._connection.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)
            if self.is_in_doubt:
                await self._seek_to_own()

    def _fresh(self, page: PartitionPage) -> PartitionPage:
        """Drop records that were returned before, and move the position."""
        position = self.positions.get(page.where, -1)
        if page.records[0].offset < position:
            page = page._replace(records=[r for r in page.records if r.offset >= position])
        self.positions[page.where] = max(position, page.next_offset)
        return page

    async def _read_assignment_or_join(self) -> None:
        try:
            await self._read_assignment()
        except NotFound:
            await self._rejoin()

    # -- positions

    async def _seek_to_own(self) -> None:
        """Set the broker's positions to ours.

        A partition of which no record was returned is read from its committed offset on, or from
        where auto.offset.reset says. (With latest and no committed offset, records that arrived
        with the lost response are skipped.)
        """
        await self._read_assignment()
        offsets = dict(self.positions)
        unknown = [partition for partition in self.assigned if partition not in offsets]
        if unknown:
            committed = await self.committed(unknown)
            offsets |= {partition: offset for partition, offset in committed.items() if offset >= 0}
        if offsets:
            await self._seek(offsets)
        first = [{"topic": w.topic, "partition": w.partition} for w in unknown if w not in offsets]
        if first and self._config["auto.offset.reset"] == "earliest":
            path = f"{self._path}/positions/beginning"
            await self._connection.post(path, json={"partitions": first})
        self.is_in_doubt = False

    async def committed(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the committed offsets, -1 for none. Raises ClientError."""
        query = [pair for w in places for pair in (("topic", w.topic), ("partition", w.partition))]
        body = await self._connection.get_json(f"{self._path}/offsets", params=query)
        return {
            TopicPartition(
                committed_offset["topic"], committed_offset["partition"]
            ): committed_offset["offset"]
            for committed_offset in body["offsets"]
        }

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read this partition from `offset` on. Raises BadArgument if it is not assigned."""
        try:
            await self._seek({partition: offset})
        except Refused as error:
            if error.status != ILLEGAL_STATE:
                raise
            raise BadArgument(
                f"{partition.topic}-{partition.partition} is not assigned to this member of group "
                f"{self.group!r}"
            ) from None
        self.positions[partition] = offset

    async def _seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        body = {"offsets": [_offset(partition, offset) for partition, offset in offsets.items()]}
        await self._connection.post(f"{self._path}/positions", json=body)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Commit the next offsets to read.

        Return those that are committed: not those of partitions that this member has lost. Raises
        ClientError.
        """
        remaining_offsets = dict(offsets)
        for _ in range(COMMIT_TRIES):
            if not remaining_offsets:
                break
            body = {
                "partitions": [
                    _offset(partition, offset) for partition, offset in remaining_offsets.items()
                ]
            }
            try:
                await self._connection.post(f"{self._path}/offsets", json=body)
            except NotFound:
                # The instance has expired: its partitions are another member's, or will be read
                # again by this one.
                await self._rejoin()
                return {}
            except Refused as error:
                if error.status != ILLEGAL_STATE:
                    raise
                await self._read_assignment_or_join()
                remaining_offsets = {
                    partition: remaining_offsets[partition]
                    for partition in remaining_offsets
                    if partition in self.positions
                }
            else:
                return remaining_offsets
        return {}


def _offset(partition: TopicPartition, offset: int) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition, "offset": offset}
