"""Produce requests on their way to the log.

Before a batch is unpacked or read, a request learns which of its batches may be appended: by topic,
right, partition and size. The others cost no more than their answer.

The queue appends the batches of requests, in the order in which the requests came. Each batch is
appended by a commit of its own, so that the refusal of one batch does not affect the others. A
request is answered when each of its batches has an outcome.

If the write buffer of the log is full, the first request waits for room, up to the time that its
client gives, and the others wait behind it. So batches keep their order. A batch for which a topic
or its owner has no share is refused at once, because other clients may have room. Nothing of a
batch that is refused is in the log, so any client may send it again.
"""

import asyncio
import contextvars
import struct
import time
from collections import deque
from functools import lru_cache, partial
from typing import NamedTuple

from tidelog.service.kafka.answer_forms import CloseConnection, Later
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind, message_of
from tidelog.service.kafka.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from tidelog.service.operations.rights import PRODUCE
from tidelog.service.security.caller import forbidden
from tidelog.service.telemetry.http_counters import KAFKA
from tidelog.storage.codec import byte_loops, decompression
from tidelog.storage.codec.batch_header import HEADER_SIZE
from tidelog.storage.codec.record_batch import (
    ANY,
    Batch,
    Effort,
    KeylessRecords,
    Rules,
    TooMuchEffort,
    check,
)
from tidelog.storage.core.errors import (
    BoundReached,
    CommitUnknown,
    LogError,
    Throttled,
    UnknownPartition,
    UnknownTopic,
    bare,
)
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.kafka_log import check_size
from tidelog.storage.state.topic import Topic

API = "Produce"
FIRST_BY_ID = 13
"""The first version of Produce that names topics by id."""
INLINE_COST = 1024 * 1024
"""Highest cost of a request that the event loop checks: about 3 ms. A thread checks a request that
costs more."""
UNPACKED_BYTES_MAX = 128 << 20
"""The most bytes that a batch of a producer may unpack to."""
SLICE_S = 0.02
"""Time after which a slice of checks in a thread ends. One batch may take longer."""
BYTE_COSTS = (byte_loops.BYTE_COST, 256, 21, 8, 32, 32, 32, 32)
"""Cost of a byte by codec (none, gzip, snappy, lz4, zstd), because packed bytes take more time."""
PART_COST = 2_000
PARTS_MAX = 256
"""Batches that are appended in one turn of the event loop, about 20 us each."""
ROOM_S, ROOM_S_MAX = 0.02, 0.4
"""Time between two attempts to append while the write buffer is full. It doubles."""
REFUSED = "a batch with acks=0 was refused"
NO_KEY = "the topic is compacted by key"
BUG = "internal error: the broker's log has the details"
RECORD_ERRORS_MAX = 1_000
"""The records of a request that its answer names."""
UNPACKED_PER_BYTE = 32
"""Unpacked bytes of a batch for each byte of its topic's `max.message.bytes`, which bounds the
packed bytes. UNPACKED_MIN is allowed for each topic."""
_CODEC_AT = 22
_COUNT = struct.Struct(">57xi")


class _PartitionBatch(NamedTuple):
    """The batch of one partition, and its answer."""

    topic_data: TopicProduceData
    records: memoryview | None
    answer: PartitionProduceResponse


class KafkaAppend(Later):
    """One Produce request, until it is answered."""

    __slots__ = (
        "_at",
        "_checked",
        "_context",
        "_left",
        "_record_errors_left",
        "_rules",
        "_variables",
        "batches",
        "client",
        "deadline_s",
        "is_answered",
        "is_begun",
        "parts",
        "response",
    )

    def __init__(
        self, context: Context, request: ProduceRequest, client: ApiClient, deadline_s: float
    ) -> None:
        """At `deadline_s` of the event loop, the request does not wait for room any more."""
        super().__init__()
        self._context = context
        self._variables = contextvars.copy_context()
        self._at = self._left = self._checked = 0
        self._record_errors_left = RECORD_ERRORS_MAX
        self.client = client
        self.deadline_s = deadline_s
        self.is_answered = request.acks != 0
        self.parts: list[_PartitionBatch] = []
        self.batches: list[Batch | LogError | None] = []
        """The outcome of each part that `admit` has decided: None for a batch that must be
        checked, then the checked batch, or the error."""
        self._rules: list[Rules] = []
        self.is_begun = False
        """Whether each batch was appended or refused."""
        responses = []
        for topic in request.topic_data:
            answers = [
                PartitionProduceResponse(index=partition.index, error_code=0, base_offset=-1)
                for partition in topic.partition_data
            ]
            self.parts += [
                _PartitionBatch(topic, partition.records, answer)
                for partition, answer in zip(topic.partition_data, answers, strict=True)
            ]
            responses.append(
                TopicProduceResponse(
                    name=topic.name, topic_id=topic.topic_id, partition_responses=answers
                )
            )
        self.response = ProduceResponse(responses=responses)

    def admit(self, data: TopicProduceData) -> bool:
        """Decide which batches of the next topic may be appended, without a look at their bytes.

        Return False, and decide nothing, if the view has no such topic or partition, or no
        permission of the client to write: another broker may have added it. Then the caller
        refreshes the view and calls `admit_known`.
        """
        topic = self.topic(data)
        if topic is None or not self.client.rights.may(PRODUCE, topic.name):
            return False
        partitions = len(topic.partitions)
        for part in data.partition_data:
            if not 0 <= part.index < partitions:
                return False
        self._admit(data, topic)
        return True

    def admit_known(self, data: TopicProduceData) -> None:
        """Do `admit` with the view as it is: refuse batches of what it does not have."""
        topic = self.topic(data)
        name = data.name if topic is None else topic.name
        refusal: LogError | None = None
        if name and not self.client.rights.may(PRODUCE, name):
            refusal = forbidden(self.client.rights.principal, PRODUCE, name)
        elif topic is None:
            refusal = UnknownTopic(name)
        if refusal is None and topic is not None:
            self._admit(data, topic)
            return
        count = len(data.partition_data)
        self.batches += [refusal] * count
        self._rules += [ANY] * count

    def _admit(self, data: TopicProduceData, topic: Topic) -> None:
        partitions, rules = len(topic.partitions), _rules_of(topic.config)
        for part in data.partition_data:
            refusal: LogError | None = None
            if not 0 <= part.index < partitions:
                refusal = UnknownPartition(topic.name, part.index, partitions)
            elif part.records is not None and part.records.nbytes > rules.bytes_max:
                try:
                    check_size(topic, part.records.nbytes)
                except LogError as error:
                    refusal = bare(error)
            self.batches.append(refusal)
            self._rules.append(rules.of_batch)

    @property
    def is_checked(self) -> bool:
        """Whether each batch that was admitted is checked."""
        return self._checked == len(self.parts)

    @property
    def unpacked_bytes(self) -> int:
        """The most bytes that one of the batches may unpack to."""
        most = 0
        for part, outcome, rules in zip(self.parts, self.batches, self._rules, strict=True):
            if outcome is None and part.records is not None and _codec(part.records):
                most = max(most, decompression.bound_of(part.records.nbytes, rules.unpacked_max))
        return most

    def check_slice(self) -> None:
        """Check the next batches, for SLICE_S. A thread does this."""
        end_s = time.perf_counter() + SLICE_S
        while not self.is_checked:
            self._check_next(None)
            if time.perf_counter() >= end_s:
                return

    def check_inline(self) -> bool:
        """Check the batches, unless this takes long.

        If it does, return False, and a thread has to do the rest.
        """
        cost = 0
        for part, outcome in zip(self.parts, self.batches, strict=True):
            if outcome is None:
                cost += _cost(part.records)
        if cost > INLINE_COST:
            return False
        effort = Effort(byte_loops.INLINE_UNPACKED, byte_loops.INLINE_HEADERS)
        try:
            while self._checked < len(self.parts):
                self._check_next(effort)
        except TooMuchEffort:
            return False
        return True

    def _check_next(self, effort: Effort | None) -> None:
        number = self._checked
        if self.batches[number] is None:
            records = self.parts[number].records
            self.batches[number] = check(records, self._rules[number], effort)
        self._checked += 1

    def run(self, parts_max: int) -> int:
        """Append the next batches, at most `parts_max`; return how many.

        Raises Throttled if the write buffer of the log is full. The caller calls again, until
        `is_begun`.
        """
        return self._variables.run(self._run, parts_max)

    def _run(self, parts_max: int) -> int:
        parts, batches, first = self.parts, self.batches, self._at
        assert self.is_checked, "the batches are checked"
        end = min(first + parts_max, len(parts))
        while self._at < end:
            part, checked = parts[self._at], batches[self._at]
            if isinstance(checked, Batch):
                try:
                    self._append(part, checked)
                except BoundReached as error:
                    self._fail(part, error)
                except Throttled:
                    raise
                except LogError as error:
                    self._fail(part, error)
            else:
                assert checked is not None, "the batch is checked"
                self._fail(part, checked)
            self._at += 1
        self._begin(is_over=end == len(parts))
        return end - first

    def _append(self, part: _PartitionBatch, checked: Batch) -> None:
        # The view may have changed since `admit`.
        topic = self.topic(part.topic_data)
        name = part.topic_data.name if topic is None else topic.name
        if name and not self.client.rights.may(PRODUCE, name):
            raise forbidden(self.client.rights.principal, PRODUCE, name)
        if topic is None:
            raise UnknownTopic(name)
        index = part.answer.index
        future = self._context.batches.append(topic, index, checked)
        self._left += 1
        future.add_done_callback(partial(self._done, part, topic))

    def topic(self, data: TopicProduceData) -> Topic | None:
        """Return a topic of the request, or None if the view has no such topic."""
        topic_id = data.topic_id if self.client.version >= FIRST_BY_ID else None
        return self._context.topic(data.name, topic_id)

    def refuse(self, error: LogError) -> None:
        """Give this error to each batch that is not appended."""
        for part in self.parts[self._at :]:
            self._fail(part, error)
        self._at = len(self.parts)
        self._begin(is_over=True)

    def refuse_with(self, code: Code, why: str) -> ProduceResponse:
        """Give this code to all batches."""
        self._context.refusal(API, code)
        for part in self.parts:
            part.answer.error_code, part.answer.error_message = code, why
        return self.response

    def _fail(self, part: _PartitionBatch, error: LogError) -> None:
        answer, topic = part.answer, self.topic(part.topic_data)
        if part.records is not None and topic is not None:
            place = topic.topic_id, answer.index
            now_s = self._context.broker.clock.boot_s()
            error = self._context.refused_batches.error_of(part.records, *place, error, now_s)
        code = self._context.denial(API, self.client, error, RequestKind.PRODUCE)
        is_by_id = self.client.version >= FIRST_BY_ID
        if code is Code.UNKNOWN_TOPIC_OR_PARTITION and is_by_id and isinstance(error, UnknownTopic):
            code = Code.UNKNOWN_TOPIC_ID
        answer.error_code, answer.error_message = code, message_of(error)
        if isinstance(error, KeylessRecords):
            numbers = error.numbers[: self._record_errors_left]
            self._record_errors_left -= len(numbers)
            answer.record_errors = [
                BatchIndexAndErrorMessage(batch_index=number, batch_index_error_message=NO_KEY)
                for number in numbers
            ]

    def _done(
        self, part: _PartitionBatch, topic: Topic, future: "asyncio.Future[list[AppendedRange]]"
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
            self._fail(part, error)
        else:
            part.answer.error_code = self._context.refusal(API, Code.UNKNOWN_SERVER_ERROR)
            self._context.failed(API, error)
        self._left -= 1
        if self.is_begun and not self._left:
            self._answer()

    def _succeed(self, part: _PartitionBatch, topic: Topic, placed: AppendedRange) -> None:
        answer, number = part.answer, placed.partition
        answer.base_offset = placed.base_offset
        partition = topic.partitions[number]
        answer.log_start_offset = partition.log_start_offset
        if self._context.broker.state.topics.get(topic.name) is topic:
            config = topic.config
            index = partition.tail_index(placed.base_offset) if config.is_log_append_time else -1
            if index >= 0:
                answer.log_append_time_ms = partition.tail[index].append_ms
        assert part.records is not None, "a batch was appended"
        if refused := self._context.refused_batches:
            refused.appended(part.records, topic.topic_id, number)
        self._context.traffic.add_records_in(placed.count, part.records.nbytes, topic.name, KAFKA)

    def _begin(self, *, is_over: bool) -> None:
        """Note whether each batch was appended or refused.

        Then answer, if no batch waits for its commit, or if the client waits for none (acks=0).
        """
        self.is_begun = is_over
        if is_over and not (self._left and self.is_answered):
            self._answer()

    def _answer(self) -> None:
        if self.on_answer is None:
            return  # an answer with acks=0 does not wait for the commits
        on_answer, self.on_answer = self.on_answer, None
        if self.is_answered:
            on_answer(self.response)
        elif any(part.answer.error_code for part in self.parts):
            on_answer(CloseConnection(REFUSED))
        else:
            on_answer(None)


class AppendQueue:
    """The Produce requests of all connections whose batches are not appended.

    Owned by the event loop.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[KafkaAppend] = deque()
        self._is_planned = False
        self._pause_s = ROOM_S

    def add(self, append: KafkaAppend) -> None:
        """Append the batches of a request behind those of all earlier requests."""
        self._waiting.append(append)
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Append up to PARTS_MAX batches."""
        waiting, remaining_batches = self._waiting, PARTS_MAX
        pause_s: float | None = None
        while waiting and remaining_batches > 0 and pause_s is None:
            first = waiting[0]
            try:
                remaining_batches -= max(first.run(remaining_batches), 1)
            except Throttled as full:
                if self._loop.time() < first.deadline_s and not self._context.is_draining:
                    pause_s = self._pause_s
                    self._pause_s = min(2 * pause_s, ROOM_S_MAX)
                else:
                    first.refuse(full)
            except Exception as error:  # noqa: BLE001 no caller handles it
                self._context.failed(API, error)
                first.refuse(LogError(BUG))
            else:
                self._pause_s = ROOM_S
            if first.is_begun:
                waiting.popleft()
        self._is_planned = bool(waiting)
        if pause_s is not None:
            self._loop.call_later(pause_s, self._turn)
        elif waiting:
            self._loop.call_soon(self._turn)


class _TopicRules(NamedTuple):
    bytes_max: int
    of_batch: Rules


def _rules_of(config: TopicConfig) -> _TopicRules:
    return _rules(config.max_message_bytes, "compact" in config.cleanup_policy)


@lru_cache(maxsize=1024)
def _rules(bytes_max: int, is_compacted: bool) -> _TopicRules:
    unpacked_max = max(UNPACKED_PER_BYTE * bytes_max, decompression.UNPACKED_MIN)
    return _TopicRules(bytes_max, Rules(min(unpacked_max, UNPACKED_BYTES_MAX), is_compacted))


def _codec(records: memoryview) -> int:
    return records[_CODEC_AT] & 7 if records.nbytes >= HEADER_SIZE else 0


def _cost(records: memoryview | None) -> int:
    """Return the cost of the check of a batch, in units of about 3 ns."""
    if records is None or records.nbytes < HEADER_SIZE:
        return PART_COST
    (count,) = _COUNT.unpack_from(records)
    unpacking = int(records.nbytes * BYTE_COSTS[records[_CODEC_AT] & 7])
    return PART_COST + unpacking + max(count, 0) * byte_loops.RECORD_COST
