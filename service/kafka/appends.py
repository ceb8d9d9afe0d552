"""Produce requests on their way to the log.

The queue appends the batches of requests, in the order in which the requests came. Each batch is
appended by a commit of its own, so that the refusal of one batch does not affect the others. A
request is answered when each of its batches has an outcome.

Where tidelog has no code in C, the queue also checks the batches. In a turn of the event loop, it
checks all requests together that came since the turn before, because numpy needs ~70 us for a call,
for one batch as for many.

If the write buffer of the log is full, the first request waits for room, up to the time that its
client gives, and the others wait behind it. So batches keep their order. Nothing of a batch that is
refused is in the log, so any client may send it again.
"""

import asyncio
import contextvars
import struct
from collections import deque
from functools import partial
from itertools import islice
from typing import NamedTuple

from tidelog.service.kafka.client import Client, CloseConnection, Later
from tidelog.service.kafka.context import Context
from tidelog.service.kafka.errors import Code, Kind, message_of
from tidelog.service.kafka.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from tidelog.service.security.caller import ALL_RIGHTS, forbidden
from tidelog.storage.core.acls import TOPIC, WRITE
from tidelog.storage.core.errors import CommitUnknown, LogError, Throttled, UnknownTopic
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.kafka import native
from tidelog.storage.kafka.batch import Batch, KeptBatch, check, check_natively, decode
from tidelog.storage.kafka.layout import HEADER_SIZE, InvalidBatch
from tidelog.storage.state.cluster_state import Topic

API = "Produce"
FIRST_BY_ID = 13
"""The first version of Produce that names topics by id."""
INLINE_COST = 1024 * 1024
"""Highest cost of the requests that the event loop checks in a turn: about 3 ms. A thread checks a
request that costs more."""
BYTE_COSTS = (0.06 if native.IS_BUILT else 1, 256, 21, 8, 32, 32, 32, 32)
"""Cost of a byte by codec (none, gzip, snappy, lz4, zstd), because packed bytes take more time."""
RECORD_COST, PART_COST = 5 if native.IS_BUILT else 80, 2_000
PARTS_MAX = 256
"""Batches that are appended in one turn of the event loop, about 20 us each."""
ROOM_S, ROOM_S_MAX = 0.02, 0.4
"""Time between two attempts to append while the write buffer is full. It doubles."""
REFUSED = "a batch with acks=0 was refused"
BUG = "internal error: the broker's log has the details"
RECORD_ERRORS_MAX = 1_000
_CODEC_AT = 22
_COUNT = struct.Struct(">57xi")


class _Part(NamedTuple):
    """The batch of one partition, and its answer."""

    topic_data: TopicProduceData
    records: memoryview | None
    answer: PartitionProduceResponse


class Append(Later):
    """One Produce request, until it is answered."""

    __slots__ = (
        "_at",
        "_context",
        "_left",
        "_variables",
        "batches",
        "client",
        "cost",
        "deadline_s",
        "is_answered",
        "is_begun",
        "parts",
        "response",
    )

    def __init__(
        self, context: Context, request: ProduceRequest, client: Client, deadline_s: float
    ) -> None:
        """At `deadline_s` of the event loop, the request does not wait for room any more."""
        super().__init__()
        self._context = context
        self._variables = contextvars.copy_context()
        self._at = self._left = 0
        self.client = client
        self.deadline_s = deadline_s
        self.is_answered = request.acks != 0
        self.parts: list[_Part] = []
        self.batches: list[Batch | LogError] | None = None
        """The checked batch of each part; None before the check."""
        self.is_begun = False
        """Whether each batch was appended or refused."""
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
        self.cost = sum([_cost(part.records) for part in self.parts])
        """The cost of the check."""

    def check(self) -> None:
        """Check all batches. A thread may do this."""
        self.batches = check([part.records for part in self.parts])

    def check_inline(self) -> bool:
        """Check all batches, unless this takes long: then return False, and a thread has to do it.
        Without code in C, the queue checks the batches."""
        if self.cost > INLINE_COST:
            return False
        if native.IS_BUILT:
            self.batches = check_natively([part.records for part in self.parts])
            return self.batches is not None
        return True

    def run(self, parts_max: int) -> int:
        """Append the next batches, at most `parts_max`; return how many. Raises Throttled if the
        write buffer of the log is full. The caller calls again, until `is_begun`."""
        return self._variables.run(self._run, parts_max)

    def _run(self, parts_max: int) -> int:
        parts, batches, first = self.parts, self.batches, self._at
        assert batches is not None, "the batches are checked"
        end = min(first + parts_max, len(parts))
        while self._at < end:
            part, checked = parts[self._at], batches[self._at]
            try:
                self._append(part, checked)
            except Throttled:
                raise
            except LogError as error:
                self._fail(part, error, checked)
            self._at += 1
        self._begin(is_over=end == len(parts))
        return end - first

    def _append(self, part: _Part, checked: Batch | LogError) -> None:
        topic = self.topic(part.topic_data)
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

    def topic(self, data: TopicProduceData) -> Topic | None:
        """Return a topic of the request, or None if the view has no such topic."""
        topic_id = data.topic_id if self.client.version >= FIRST_BY_ID else None
        return self._context.topic(data.name, topic_id)

    def refuse(self, error: LogError) -> None:
        """Give this error to each batch that is not appended."""
        for part in self.parts[self._at :]:
            self._fail(part, error, None)
        self._at = len(self.parts)
        self._begin(is_over=True)

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
        if self.is_begun and not self._left:
            self._answer()

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

    def _begin(self, *, is_over: bool) -> None:
        """Note whether each batch was appended or refused. Then answer, if no batch waits for its
        commit, or if the client waits for none (acks=0)."""
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
    """The Produce requests of all connections whose batches are not appended. Owned by the event
    loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Append] = deque()
        self._is_planned = False
        self._pause_s = ROOM_S

    def add(self, append: Append) -> None:
        """Append the batches of a request behind those of all earlier requests."""
        self._waiting.append(append)
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Check the requests that came, once, and append up to PARTS_MAX batches."""
        waiting, left, has_checked = self._waiting, PARTS_MAX, False
        pause_s: float | None = None
        while waiting and left > 0 and pause_s is None:
            first = waiting[0]
            if first.batches is None:
                if has_checked:
                    break
                has_checked = True
                self._check()
            try:
                left -= max(first.run(left), 1)
            except Throttled as full:
                if self._loop.time() < first.deadline_s and not self._context.is_draining:
                    pause_s = self._pause_s
                    self._pause_s = min(2 * pause_s, ROOM_S_MAX)
                else:
                    first.refuse(full)
            except Exception as error:  # noqa: BLE001 no caller handles it
                self._failed([first], error)
            else:
                self._pause_s = ROOM_S
            if first.is_begun:
                waiting.popleft()
        self._is_planned = bool(waiting)
        if pause_s is not None:
            self._loop.call_later(pause_s, self._turn)
        elif waiting:
            self._loop.call_soon(self._turn)

    def _check(self) -> None:
        """Check the first requests that are not checked, within INLINE_COST."""
        group: list[Append] = []
        cost = 0
        for each in self._waiting:
            if each.batches is None:
                cost += each.cost
                if group and (cost > INLINE_COST or len(group) == PARTS_MAX):
                    break
                group.append(each)
        try:
            found = iter(check([part.records for each in group for part in each.parts]))
        except Exception as error:  # noqa: BLE001 no caller handles it
            self._failed(group, error)
            return
        for each in group:
            each.batches = list(islice(found, len(each.parts)))

    def _failed(self, group: list[Append], error: Exception) -> None:
        self._context.failed(API, error)
        for each in group:
            each.batches = []
            each.refuse(LogError(BUG))


def _cost(records: memoryview | None) -> int:
    """Return the cost of the check of a batch, in units of about 3 ns."""
    if records is None or records.nbytes < HEADER_SIZE:
        return PART_COST
    (count,) = _COUNT.unpack_from(records)
    unpacking = int(records.nbytes * BYTE_COSTS[records[_CODEC_AT] & 7])
    return PART_COST + unpacking + max(count, 0) * RECORD_COST


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
