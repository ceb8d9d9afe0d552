"""Produce and InitProducerId.

Each batch of a request is checked, then appended by a commit of its own, so that the refusal of one
batch does not affect the others. The answer is sent when each batch has an outcome. A request is
checked on the event loop if that is quick, else in a thread; the next request of the connection
then waits, so that batches keep their order.

If the write buffer of the log is full, the request waits for room, up to the time that the client
gives. Nothing of a batch that is refused is in the log, so any client may send it again.
"""

import asyncio
import contextlib
import math
import struct
from functools import partial
from typing import Any, NamedTuple

from tidelog.service.http.paging import sliced
from tidelog.service.kafka.client import Client, CloseConnection, Later
from tidelog.service.kafka.context import Context
from tidelog.service.kafka.errors import Code, Kind, message_of
from tidelog.service.kafka.messages.produce import (
    BatchIndexAndErrorMessage,
    InitProducerIdRequest,
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from tidelog.service.security.caller import ALL_RIGHTS, CallerRights, Forbidden, forbidden
from tidelog.service.security.request_time import in_thread
from tidelog.storage.core.acls import CLUSTER, CLUSTER_NAME, IDEMPOTENT_WRITE, TOPIC, WRITE
from tidelog.storage.core.errors import CommitUnknown, LogError, Throttled, UnknownTopic
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.kafka.batch import Batch, KeptBatch, check, decode
from tidelog.storage.kafka.layout import HEADER_SIZE, InvalidBatch
from tidelog.storage.state.access import PRODUCER_BYTE_RATE
from tidelog.storage.state.cluster_state import Topic

ACKS = (0, 1, -1)
FIRST_BY_ID = 13
"""The first version of Produce that names topics by id."""
INLINE_COST = 1024 * 1024
"""Highest cost of a request that the event loop checks itself: about 3 ms. A thread takes about 0.1
ms more."""
BYTE_COSTS = (1, 256, 21, 8, 32, 32, 32, 32)
"""Cost of a byte by codec (none, gzip, snappy, lz4, zstd), because packed bytes take more time."""
RECORD_COST, PART_COST = 80, 2_000
PARTS_MAX = 256
"""Batches that are appended in one turn of the event loop, about 20 us each."""
REFUSED = "a batch with acks=0 was refused"
ROOM_S, ROOM_S_MAX = 0.02, 0.4
"""Time between two attempts to append while the write buffer is full. It doubles, because thousands
of connections may wait."""
WAIT_S_MAX = 30.0
RECORD_ERRORS_MAX = 1_000
API, INIT_API = "Produce", "InitProducerId"
_CODEC_AT = 22
_COUNT = struct.Struct(">57xi")


class _Part(NamedTuple):
    """The batch of one partition, and its answer."""

    topic_data: TopicProduceData
    records: memoryview | None
    answer: PartitionProduceResponse


class _Append(Later):
    """One Produce request, until it is answered."""

    __slots__ = ("_at", "_batches", "_context", "_left", "client", "is_begun", "parts", "response")

    def __init__(self, context: Context, request: ProduceRequest, client: Client) -> None:
        super().__init__()
        self._context = context
        self.client = client
        self.parts: list[_Part] = []
        self._batches: list[Batch | LogError] | None = None
        self._at = 0
        self._left = 0
        self.is_begun = False
        responses = []
        for topic in request.topic_data:
            answers = [
                PartitionProduceResponse(index=each.index, error_code=0, base_offset=-1)
                for each in topic.partition_data
            ]
            self.parts += [
                _Part(topic, each.records, answer)
                for each, answer in zip(topic.partition_data, answers, strict=True)
            ]
            responses.append(
                TopicProduceResponse(
                    name=topic.name, topic_id=topic.topic_id, partition_responses=answers
                )
            )
        self.response = ProduceResponse(responses=responses)

    @property
    def is_done(self) -> bool:
        """Whether each batch has an outcome."""
        return self.is_begun and not self._left

    @property
    def has_failed(self) -> bool:
        return any(part.answer.error_code for part in self.parts)

    def check(self) -> None:
        """Check all batches. A thread may do this."""
        self._batches = check([part.records for part in self.parts])

    def run(self) -> Throttled | None:
        """Append the next PARTS_MAX batches. If the write buffer of the log is full, return
        Throttled. The caller calls again, until `is_begun`."""
        if self._batches is None:
            self.check()
        parts, batches = self.parts, self._batches
        assert batches is not None
        end = min(self._at + PARTS_MAX, len(parts))
        while self._at < end:
            part, checked = parts[self._at], batches[self._at]
            try:
                self._append(part, checked)
            except Throttled as error:
                return error
            except LogError as error:
                self._fail(part, error, checked)
            self._at += 1
        self.is_begun = end == len(parts)
        return None

    def _append(self, part: _Part, checked: Batch | LogError) -> None:
        topic = self._topic(part.topic_data)
        name = part.topic_data.name if topic is None else topic.name
        rights = self.client.rights
        if rights is not ALL_RIGHTS and name and not rights.may(WRITE, TOPIC, name):
            raise forbidden(rights.principal, WRITE, TOPIC, name)
        if topic is None:
            raise UnknownTopic(name)
        if isinstance(checked, LogError):
            raise checked
        index = part.answer.index
        future = self._context.batches.append(topic, index, checked)
        self._left += 1
        future.add_done_callback(partial(self._done, part, topic))

    def _topic(self, data: TopicProduceData) -> Topic | None:
        topic_id = data.topic_id if self.client.version >= FIRST_BY_ID else None
        return self._context.topic(data.name, topic_id)

    def refuse(self, error: LogError) -> None:
        """Give this error to each batch that is not appended."""
        for part in self.parts[self._at :]:
            self._fail(part, error, None)
        self._at = len(self.parts)
        self.is_begun = True

    def refuse_with(self, code: Code, why: str) -> ProduceResponse:
        """Give this code to all batches."""
        self._context.refusal(API, code)
        for part in self.parts:
            part.answer.error_code, part.answer.error_message = code, why
        return self.response

    def _fail(self, part: _Part, error: LogError, checked: Batch | LogError | None) -> None:
        answer = part.answer
        code = self._context.denial(API, self.client, error, Kind.PRODUCE)
        is_by_id = self.client.version >= FIRST_BY_ID
        if code is Code.UNKNOWN_TOPIC_OR_PARTITION and is_by_id and isinstance(error, UnknownTopic):
            code = Code.UNKNOWN_TOPIC_ID
        answer.error_code, answer.error_message = code, message_of(error)
        if isinstance(error, InvalidBatch) and isinstance(checked, Batch) and checked.has_null_key:
            answer.record_errors = _without_key(checked)

    def _done(
        self, part: _Part, topic: Topic, future: "asyncio.Future[list[AppendedRange]]"
    ) -> None:
        """Take the outcome of a batch."""
        error: BaseException | None = None
        if future.cancelled():
            error = CommitUnknown("the broker is shutting down: send the batch again")
        else:
            error = future.exception()
        if error is None:
            self._succeed(part, topic, future.result()[0])
        elif isinstance(error, LogError):
            self._fail(part, error, None)
        else:
            part.answer.error_code = self._context.refusal(API, Code.UNKNOWN_SERVER_ERROR)
            self._context.failed(API, error)
        self._left -= 1
        self.finish()

    def _succeed(self, part: _Part, topic: Topic, placed: AppendedRange) -> None:
        answer, number = part.answer, placed.partition
        answer.base_offset = placed.base_offset
        partition = topic.partitions[number]
        answer.log_start_offset = partition.log_start_offset
        if self._context.broker.state.topics.get(topic.name) is topic:
            config = topic.config
            at = partition.tail_index(placed.base_offset) if config.is_log_append_time else -1
            if at >= 0:
                answer.log_append_time_ms = partition.tail[at].append_ms
        assert part.records is not None, "a batch was appended"
        self._context.traffic.add_records_in(placed.count, part.records.nbytes, topic.name)

    def finish(self) -> None:
        """Answer if each batch has an outcome."""
        if self.on_answer is not None and self.is_done:
            on_answer, self.on_answer = self.on_answer, None
            on_answer(self.response)


class Produce:
    """The APIs of producers. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker

    def produce(self, request: ProduceRequest, client: Client) -> ProduceResponse | Later | None:
        """Append the batches of a request."""
        work = _Append(self._context, request, client)
        if request.acks not in ACKS:
            why = f"acks {request.acks} is not valid: use 0, 1 or -1 (all)"
            return work.refuse_with(Code.INVALID_REQUIRED_ACKS, why)
        if self._context.is_draining:
            return self._answer(
                request, work, work.refuse_with(Code.NOT_LEADER_OR_FOLLOWER, "the broker stops")
            )
        if client.rights is not ALL_RIGHTS:
            self._charge(work, client.rights)
        is_slow = self._is_unknown(request, client) or _cost(work.parts) > INLINE_COST
        if is_slow or work.run() is not None or not work.is_begun:
            work.begun = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run_slowly(work, request))
            task.add_done_callback(partial(self._ended, work))
            return work if request.acks else self._unanswered(work)
        return self._answer(request, work, work.response if work.is_done else work)

    def _answer(self, request: ProduceRequest, work: _Append, answer: Any) -> Any:
        if request.acks:
            return answer
        if work.has_failed:
            raise CloseConnection(REFUSED)
        return None

    def _unanswered(self, work: _Append) -> Later:
        """Return a Later without an answer (acks=0). It is done when the batches of `work` are
        appended."""
        later = Later()
        begun = later.begun = work.begun
        assert begun is not None

        def answer(_: object) -> None:
            if later.on_answer is not None:
                later.on_answer(CloseConnection(REFUSED) if work.has_failed else None)

        begun.add_done_callback(answer)
        return later

    def _charge(self, work: _Append, rights: CallerRights) -> None:
        size = sum(part.records.nbytes for part in work.parts if part.records is not None)
        rights.record(PRODUCER_BYTE_RATE, size)
        throttle_s = rights.throttle_s(PRODUCER_BYTE_RATE)
        work.response.throttle_time_ms = min(math.ceil(throttle_s * 1000), 0x7FFF_FFFF)

    def _is_unknown(self, request: ProduceRequest, client: Client) -> bool:
        """Whether a topic or a partition is not in the view, or the view has no permission of the
        client to write to the topic. Then the view must be refreshed."""
        rights = client.rights
        for data in request.topic_data:
            topic_id = data.topic_id if client.version >= FIRST_BY_ID else None
            topic = self._context.topic(data.name, topic_id)
            if topic is None:
                return True
            if rights is not ALL_RIGHTS and not rights.may(WRITE, TOPIC, topic.name):
                return True
            partitions = len(topic.partitions)
            for part in data.partition_data:
                if not 0 <= part.index < partitions:
                    return True
        return False

    async def _run_slowly(self, work: _Append, request: ProduceRequest) -> None:
        """Check in a thread, and wait for room in the write buffer of the log."""
        rights, loop = work.client.rights, asyncio.get_running_loop()
        deadline_s = loop.time() + min(max(request.timeout_ms / 1000, 0.0), WAIT_S_MAX)
        if self._is_unknown(request, work.client):
            await self._refresh(request, work.client)
        if _cost(work.parts) > INLINE_COST:
            await in_thread(rights, work.check)
        pause_s = ROOM_S
        while not work.is_begun:
            full = work.run()
            if full is None:
                await asyncio.sleep(0)
                continue
            if loop.time() >= deadline_s or self._context.is_draining:
                work.refuse(full)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, ROOM_S_MAX)

    async def _refresh(self, request: ProduceRequest, client: Client) -> None:
        """Refresh the view: another broker may have created a topic, or given a permission."""
        is_refreshed = False
        async for data in sliced(request.topic_data):
            topic_id = data.topic_id if client.version >= FIRST_BY_ID else None
            topic = self._context.topic(data.name, topic_id)
            indexes = [part.index for part in data.partition_data]
            if topic is None or max(indexes, default=0) >= len(topic.partitions):
                if not is_refreshed:  # one refresh is for all topics of the request
                    await self._broker.refresh()
                    is_refreshed = True
                topic = self._context.topic(data.name, topic_id)
            if topic is not None:
                with contextlib.suppress(Forbidden):  # `run` refuses the part
                    await client.rights.check(WRITE, TOPIC, topic.name)

    def _ended(self, work: _Append, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LogError):
            work.refuse(error)
        elif error is not None:
            self._context.failed(API, error)
            work.refuse(LogError("internal error: the broker's log has the details"))
        assert work.begun is not None
        if not work.begun.done():
            work.begun.set_result(None)
        work.finish()

    # -- InitProducerId

    async def init_producer_id(
        self, request: InitProducerIdRequest, client: Client
    ) -> InitProducerIdResponse:
        """Answer InitProducerId: always a new id."""
        context, producer_id = self._context, -1
        if request.transactional_id == "":
            code = context.refusal(INIT_API, Code.INVALID_REQUEST)
        elif request.transactional_id is not None:
            code = context.refusal(INIT_API, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        elif await self._may_write(client.rights):
            code = Code.NONE
        else:
            code = await context.right_refusal(
                INIT_API, client, IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME
            )
        if not code:
            try:
                producer_id = await context.batches.reserve_producer_id()
            except LogError as error:
                code = context.code(INIT_API, error, Kind.GROUP)
        return InitProducerIdResponse(
            throttle_time_ms=0,
            error_code=code,
            producer_id=producer_id,
            producer_epoch=-1 if code else 0,
        )

    async def _may_write(self, rights: CallerRights) -> bool:
        """Whether the client may write to at least one topic. As in Kafka, this implies idempotent
        writes."""
        if rights.may(IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME):
            return True
        async for name in sliced(list(self._broker.state.topics)):
            if rights.may(WRITE, TOPIC, name):
                return True
        return False


def _cost(parts: list[_Part]) -> int:
    """Return the cost of the check, in units of about 3 ns."""
    cost = len(parts) * PART_COST
    for part in parts:
        records = part.records
        if records is not None and records.nbytes >= HEADER_SIZE:
            (count,) = _COUNT.unpack_from(records)
            cost += records.nbytes * BYTE_COSTS[records[_CODEC_AT] & 7]
            cost += max(count, 0) * RECORD_COST
    return cost


def _without_key(batch: Batch) -> list[BatchIndexAndErrorMessage]:
    """Return the records of a batch that have no key. A compacted topic cannot have them."""
    rows = decode([KeptBatch(batch.data, batch.count)], "").rows
    keys = rows.column("key").is_null().to_pylist()
    why = "the topic is compacted by key"
    return [
        BatchIndexAndErrorMessage(batch_index=index, batch_index_error_message=why)
        for index, is_missing in enumerate(keys)
        if is_missing
    ][:RECORD_ERRORS_MAX]
