"""Fetch: record batches of several partitions, with a long poll.

If there is a batch, the answer has at least one, even if this batch is larger than the client's
bounds: after an empty answer, the client would send the same request again, without end. The
isolation level has no effect, because the log has no transactions.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.fetch_sessions import FetchSession, FetchSessions, SessionRefused
from tidelog.service.kafka.messages.compiler import encoder
from tidelog.service.kafka.messages.fetch import (
    FetchablePartitionResponse,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from tidelog.service.kafka.wide_answers import ELEMENTS_INLINE_MAX
from tidelog.service.memory_pool import Share
from tidelog.service.operations.rights import FETCH
from tidelog.service.security.caller import ALL_RIGHTS, forbidden
from tidelog.service.slices import Slices
from tidelog.service.telemetry.http_counters import KAFKA
from tidelog.storage.core.errors import LogError, OffsetOutOfRange, UnknownTopic
from tidelog.storage.state.access import CONSUMER_BYTE_RATE
from tidelog.storage.state.topic import Topic

API = "Fetch"
FIRST_BY_ID = 13
"""The first version of Fetch that names topics by id."""
ROOM_S, ROOM_S_MAX = 0.05, 0.4
"""Time between two attempts if there is no memory for an answer. The time doubles after each
attempt."""
REFRESH_S = 2.0
"""Longest wait for the store before an answer without records."""
STORE_READS_MAX = 16
"""Maximum number of partitions that one fetch reads from the store at the same time. Each has room
for its bytes in the memory of all answers. Partitions that share an object need one GET."""
WIDE_MIN, WIDE_WAIT_MS_MAX = 1_000, 500
"""A request of more partitions waits for no longer than this time. Meanwhile, each of its
partitions uses 500 bytes, and other large requests wait for this memory."""
UNKNOWN = -1


class _ReadablePartition(NamedTuple):
    """A partition of a request that can be read, and its answer."""

    topic: str
    topic_id: str
    request: FetchPartition
    answer: FetchablePartitionResponse


class KafkaFetch:
    """The API of consumers. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        first_id = random.Random(self._broker.clock.new_id()).randrange(1, 2**31)
        self._sessions = FetchSessions(first_id)

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (Api(FetchRequest, FetchResponse, self.fetch, is_waiting=True),)

    async def fetch(
        self, request: FetchRequest, client: ApiClient
    ) -> FetchResponse | EncodedAnswer:
        """Return records, or wait for them up to the time that the client gives."""
        context, rights = self._context, client.rights
        now_s, by_id = asyncio.get_running_loop().time(), client.version >= FIRST_BY_ID
        try:
            session = self._sessions.open(request, rights.principal, now_s, is_by_id=by_id)
        except SessionRefused as refused:
            code = context.refusal(API, refused.code)
            return FetchResponse(throttle_time_ms=0, error_code=code, responses=[])
        topics = request.topics if session is None else session.topics()
        response = FetchResponse(throttle_time_ms=0, responses=[])
        readable_partitions = await self._plan(topics, client, response)
        throttle_s = 0.0 if rights is ALL_RIGHTS else rights.throttle_s(CONSUMER_BYTE_RATE)
        if throttle_s:  # as Kafka: an answer without records, and then a pause
            response.throttle_time_ms = min(math.ceil(throttle_s * 1000), 0x7FFF_FFFF)
            if session is not None:
                response.session_id, response.responses = session.session_id, []
            return response
        share = Share(context.answers, rights.principal)
        try:
            is_readable = len(readable_partitions) == _count(topics)
            size = await self._read(request, readable_partitions, share, not is_readable)
            if rights is not ALL_RIGHTS:
                self._charge(readable_partitions, client, size)
            self._keep_session(session, request, response, client, is_readable=is_readable)
            encode = encoder(FetchResponse, client.version)
            if len(readable_partitions) <= ELEMENTS_INLINE_MAX:
                pieces = encode(response)
            else:
                pieces = await context.threads.run(rights, 0, partial(encode, response), share)
        except BaseException:
            share.end()
            raise
        if not share.size:
            return EncodedAnswer(pieces)
        return EncodedAnswer(pieces, share.end)

    def _keep_session(
        self,
        session: FetchSession | None,
        request: FetchRequest,
        response: FetchResponse,
        client: ApiClient,
        *,
        is_readable: bool,
    ) -> None:
        """Store the answers in the session, or begin one if the client asks.

        A session has only partitions that exist and that the client may read: with others, few
        bytes would ask for a large answer again and again, without any right. So a session with
        such a partition ends with this answer, and the client sends all its partitions each time.
        """
        now_s, by_id = asyncio.get_running_loop().time(), client.version >= FIRST_BY_ID
        if session is not None:
            session.remove_unchanged(response, is_full=False)
            if not is_readable:
                self._sessions.end(session)
        elif is_readable:
            principal = client.rights.principal
            if begun := self._sessions.begin(request, principal, now_s, is_by_id=by_id):
                begun.remove_unchanged(response, is_full=True)

    # -- which partitions

    async def _plan(
        self, topics: list[FetchTopic], client: ApiClient, response: FetchResponse
    ) -> list[_ReadablePartition]:
        """Put an empty answer for each partition into the response.

        Return the partitions to read.
        """
        context, by_id = self._context, client.version >= FIRST_BY_ID
        unread = Code.NONE
        if any(self._topic(fetch_topic, by_id) is None for fetch_topic in topics):
            unread = await context.refreshed(API, RequestKind.FETCH)
        readable_partitions: list[_ReadablePartition] = []
        slices = Slices()
        for fetch_topic in topics:
            await slices.pause()
            topic = self._topic(fetch_topic, by_id)
            if context.is_draining:
                code = context.refusal(API, Code.NOT_LEADER_OR_FOLLOWER)
            else:
                name = "" if by_id else fetch_topic.topic
                code = await context.topic_refusal(API, client, FETCH, topic, name, unread=unread)
            answers = []
            for requested in fetch_topic.partitions:
                await slices.pause()
                answer = _empty(requested, code)
                answers.append(answer)
                if topic is not None and not code:
                    self._add_readable(topic, requested, answer, readable_partitions)
            response.responses.append(
                FetchableTopicResponse(
                    topic=fetch_topic.topic, topic_id=fetch_topic.topic_id, partitions=answers
                )
            )
        return readable_partitions

    def _topic(self, fetch_topic: FetchTopic, by_id: bool) -> Topic | None:
        return self._context.topic(fetch_topic.topic, fetch_topic.topic_id if by_id else None)

    def _add_readable(
        self,
        topic: Topic,
        requested: FetchPartition,
        answer: FetchablePartitionResponse,
        readable_partitions: list[_ReadablePartition],
    ) -> None:
        if not 0 <= requested.partition < len(topic.partitions):
            code = Code.UNKNOWN_TOPIC_OR_PARTITION
            answer.error_code = self._context.refusal(API, code)
            return
        if requested.current_leader_epoch > 0:
            answer.error_code = self._context.refusal(API, Code.UNKNOWN_LEADER_EPOCH)
            return
        readable_partitions.append(
            _ReadablePartition(topic.name, topic.topic_id, requested, answer)
        )

    # -- records

    async def _read(
        self,
        request: FetchRequest,
        readable_partitions: list[_ReadablePartition],
        share: Share,
        has_error: bool,
    ) -> int:
        """Read the partitions, or wait for `min_bytes` of records.

        If there is an error already, or no partition, do not wait. Return the bytes of records.

        Before an answer without records, the view is refreshed. If the request does not wait, each
        record that was acked before it came must be visible (I3); else the view may be as old as
        `read_freshness_ms`.
        """
        arrived_s, is_refreshed = self._broker.clock.boot_s(), not readable_partitions
        loop, settings = asyncio.get_running_loop(), self._context.settings
        wait_ms_max = (
            WIDE_WAIT_MS_MAX if len(readable_partitions) > WIDE_MIN else settings.fetch_wait_ms_max
        )
        wait_s = min(max(request.max_wait_ms, 0), wait_ms_max) / 1000
        deadline_s = loop.time() + wait_s
        pause_s = ROOM_S
        while True:
            reading = _Reading(min(max(request.max_bytes, 1), settings.fetch_bytes_max), share)
            has_error = not await self._read_all(readable_partitions, reading) or has_error
            is_late = loop.time() >= deadline_s or self._context.is_draining
            if reading.size >= request.min_bytes or has_error or is_late or not readable_partitions:
                if reading.size or has_error or is_refreshed or reading.has_no_memory:
                    for topic, records, size in reading.topics:
                        self._context.traffic.add_records_out(records, size, topic, KAFKA)
                    return reading.size
                is_refreshed = True
                with contextlib.suppress(LogError, TimeoutError):  # the client asks again
                    async with asyncio.timeout(REFRESH_S):
                        if wait_s:
                            await self._broker.refresh_to_wait()
                        else:
                            await self._broker.refresh(arrived_s)
                continue
            if reading.has_no_memory:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, ROOM_S_MAX)
                continue
            keys = [
                (readable_partition.topic, readable_partition.request.partition)
                for readable_partition in readable_partitions
            ]
            if not await self._broker.records.wait_any(keys, loop.create_future(), deadline_s):
                deadline_s = loop.time()

    async def _read_all(
        self, readable_partitions: list[_ReadablePartition], reading: "_Reading"
    ) -> bool:
        """Read the partitions into their answers. Return False after an error.

        Reads from the store run at the same time, because many partitions have their newest records
        in one object. Each has room for its bytes in the answer before it begins.
        """
        slices, store_reads = Slices(), _StoreReads()
        is_good = True
        try:
            for readable_partition in readable_partitions:
                await slices.pause()
                topic = self._broker.state.topic_of_id(readable_partition.topic_id)
                request, bytes_max = readable_partition.request, 0
                number, offset = request.partition, request.fetch_offset
                if topic is not None and offset != topic.partitions[number].high_watermark:
                    most = request.partition_max_bytes
                    while not (bytes_max := reading.reserve(most)) and store_reads.are_running:
                        await store_reads.end_one()
                read = self._read_partition(readable_partition, reading, bytes_max)
                if (
                    bytes_max
                    and topic is not None
                    and self._context.batches.is_in_store(topic, number, offset)
                ):
                    await store_reads.begin(read)
                else:
                    is_good = await read and is_good
            while store_reads.are_running:
                await store_reads.end_one()
        finally:
            await store_reads.cancel()
        return is_good and store_reads.are_good

    async def _read_partition(
        self, readable_partition: _ReadablePartition, reading: "_Reading", bytes_max: int
    ) -> bool:
        """Read one partition into its answer. Return False after an error.

        `bytes_max` bytes of the answer are reserved for it.
        """
        answer, requested = readable_partition.answer, readable_partition.request
        answer.records = []
        size = 0
        try:
            topic = self._broker.state.topic_of_id(readable_partition.topic_id)
            if topic is None:  # deleted during the wait
                raise UnknownTopic(readable_partition.topic)
            partition = topic.partitions[requested.partition]
            ends = partition.log_start_offset, partition.high_watermark
            if requested.fetch_offset != partition.high_watermark:
                number, offset = requested.partition, requested.fetch_offset
                batches = await self._context.batches.read(topic, number, offset, bytes_max)
                if reading.has_room(batches.size):
                    size = batches.size
                    answer.records = batches.pieces
                    reading.topics.append((topic.name, batches.records, size))
                ends = batches.log_start_offset, batches.high_watermark
        except LogError as error:
            answer.error_code = self._context.code(API, error, RequestKind.FETCH)
            if not isinstance(error, OffsetOutOfRange):
                return False
            ends = error.log_start_offset, error.high_watermark
        finally:
            reading.take(size, bytes_max)
        answer.log_start_offset, answer.high_watermark = ends
        answer.last_stable_offset = answer.high_watermark
        return not answer.error_code

    def _charge(
        self, readable_partitions: list[_ReadablePartition], client: ApiClient, size: int
    ) -> None:
        """Charge the bytes to the quota.

        Remove the records of topics that the client may no longer read.
        """
        client.rights.check_valid()
        for readable_partition in readable_partitions:
            if not client.rights.may(FETCH, readable_partition.topic):
                readable_partition.answer.records = []
                error = forbidden(client.rights.principal, FETCH, readable_partition.topic)
                readable_partition.answer.error_code = self._context.denial(
                    API, client, error, RequestKind.FETCH
                )
        client.rights.record(CONSUMER_BYTE_RATE, size)


class _StoreReads:
    """The reads of one fetch that run at the same time, because they wait for the store."""

    def __init__(self) -> None:
        self.are_good = True
        """Whether each read that has ended was without an error."""
        self._tasks: set[asyncio.Task[bool]] = set()

    @property
    def are_running(self) -> bool:
        return bool(self._tasks)

    async def begin(self, read: Coroutine[Any, Any, bool]) -> None:
        """Begin a read. If STORE_READS_MAX reads are running then, wait for one of them."""
        self._tasks.add(asyncio.create_task(read))
        if len(self._tasks) == STORE_READS_MAX:
            await self.end_one()

    async def end_one(self) -> None:
        """Wait until a read has ended."""
        ended_tasks, self._tasks = await asyncio.wait(
            self._tasks, return_when=asyncio.FIRST_COMPLETED
        )
        self.are_good = all(task.result() for task in ended_tasks) and self.are_good

    async def cancel(self) -> None:
        """Cancel the reads that are running, and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Reading:
    """The bytes of one answer, within its bounds and the memory of all answers."""

    __slots__ = ("_left", "_reserved", "_share", "has_no_memory", "size", "topics")

    def __init__(self, bytes_max: int, share: Share) -> None:
        self._left = bytes_max
        self._reserved = 0
        self._share = share
        self.size = 0
        self.topics: list[tuple[str, int, int]] = []
        """Topic, records and bytes of each partition that was read."""
        self.has_no_memory = False
        share.set(0)

    def reserve(self, bytes_max: int) -> int:
        """Reserve room for the bytes of a partition, until `take`.

        Return their maximum number; 0 if there is no room.
        """
        most = min(self._left - self._reserved, max(bytes_max, 1))
        if most <= 0:
            return 0
        if not self._share.set(self.size + self._reserved + most):
            self.has_no_memory = self.size + self._reserved == 0
            return 0
        self._reserved += most
        return most

    def has_room(self, size: int) -> bool:
        """Return whether the answer has room for the bytes that were read.

        Only its first batch may be larger than the bounds.
        """
        return size <= self._left or self.size == 0

    def take(self, size: int, reserved: int) -> None:
        """Count the bytes that were read, and end their reservation."""
        self.size += size
        self._left -= size
        self._reserved -= reserved
        self._share.set(self.size + self._reserved)


def _count(topics: list[FetchTopic]) -> int:
    return sum(len(topic.partitions) for topic in topics)


def _empty(requested: FetchPartition, code: Code) -> FetchablePartitionResponse:
    return FetchablePartitionResponse(
        partition_index=requested.partition,
        error_code=code,
        high_watermark=UNKNOWN,
        aborted_transactions=None,
        records=[],
    )
