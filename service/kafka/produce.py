"""Produce and InitProducerId.

A request is checked on the event loop if that is quick, else in slices by the threads of `checks`.
The next request of the connection waits for them, so that batches keep their order. Then `appends`
has the request.
"""

import asyncio
import math
from collections.abc import Iterable
from functools import partial

from tidelog.service.kafka.answer_forms import CloseConnection, Later
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.appends import (
    API,
    BUG,
    PARTS_MAX,
    REFUSED,
    AppendQueue,
    KafkaAppend,
)
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages.produce import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.service.operations.rights import PRODUCE
from tidelog.service.security.caller import ALL_RIGHTS, CallerRights, Forbidden, Unauthenticated
from tidelog.service.slices import sliced
from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.state.access import PRODUCER_BYTE_RATE

ACKS = (0, 1, -1)
WAIT_S_MAX = 30.0
INIT_API = "InitProducerId"


class KafkaProduce:
    """The APIs of producers. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        self._loop = asyncio.get_running_loop()
        self._queue = AppendQueue(context)

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(ProduceRequest, ProduceResponse, self.produce, is_pipelined=True),
            Api(InitProducerIdRequest, InitProducerIdResponse, self.init_producer_id),
        )

    def produce(self, request: ProduceRequest, client: ApiClient) -> ProduceResponse | Later:
        """Append the batches of a request.

        Raises CloseConnection for a refused request without an answer (acks=0).
        """
        wait_s = min(max(request.timeout_ms / 1000, 0.0), WAIT_S_MAX)
        append = KafkaAppend(self._context, request, client, self._loop.time() + wait_s)
        if request.acks not in ACKS:
            why = f"acks {request.acks} is not valid: use 0, 1 or -1 (all)"
            return append.refuse_with(Code.INVALID_REQUIRED_ACKS, why)
        if self._context.is_draining:
            response = append.refuse_with(Code.NOT_LEADER_OR_FOLLOWER, "the broker stops")
            if request.acks:
                return response
            raise CloseConnection(REFUSED)
        if client.rights is not ALL_RIGHTS:
            self._charge(append, client.rights)
        topics = self._admitted(request, append)
        if topics == len(request.topic_data) and append.check_inline():
            self._queue.add(append)
            return append
        append.begun = self._loop.create_future()
        task = self._loop.create_task(self._prepare(append, request, topics))
        task.add_done_callback(partial(self._prepared, append))
        return append

    def _charge(self, append: KafkaAppend, rights: CallerRights) -> None:
        size = sum(part.records.nbytes for part in append.parts if part.records is not None)
        rights.record(PRODUCER_BYTE_RATE, size)
        throttle_s = rights.throttle_s(PRODUCER_BYTE_RATE)
        append.response.throttle_time_ms = min(math.ceil(throttle_s * 1000), 0x7FFF_FFFF)

    def _admitted(self, request: ProduceRequest, append: KafkaAppend) -> int:
        """Admit the topics up to the first that needs a refreshed view, and return how many.

        A request with many parts is admitted in slices.
        """
        topics = 0
        if len(append.parts) <= PARTS_MAX:
            for data in request.topic_data:
                if not append.admit(data):
                    break
                topics += 1
        return topics

    async def _prepare(self, append: KafkaAppend, request: ProduceRequest, topics: int) -> None:
        """Admit the topics behind the first `topics`, and check in threads what takes long.

        If all are admitted, the caller knows that the check takes long.
        """
        if topics < len(request.topic_data):
            await self._admit(request.topic_data[topics:], append)
            if append.check_inline():
                return
        rights, threads = append.client.rights, self._context.threads
        while not append.is_checked:
            await threads.run(rights, append.unpacked_bytes, append.check_slice)

    async def _admit(self, topic_data: list[TopicProduceData], append: KafkaAppend) -> None:
        """Admit these topics with a refreshed view.

        Another broker may have created a topic, or given a permission. Only a client that may write
        to a topic causes a refresh for it; refreshes for permissions are bounded
        (`Security.refresh`).
        """
        is_refreshed = False
        rights = append.client.rights
        async for data in sliced(topic_data):
            if append.admit(data):
                continue
            topic = append.topic(data)
            name = data.name if topic is None else topic.name
            is_allowed = True
            if name:
                try:
                    await rights.check(PRODUCE, name)
                except Forbidden:
                    is_allowed = False
            if is_allowed and not is_refreshed:
                if append.admit(data):
                    continue
                await self._broker.refresh()  # one refresh is for all topics of the request
                is_refreshed = True
            append.admit_known(data)

    def _prepared(self, append: KafkaAppend, task: "asyncio.Task[None]") -> None:
        """Queue a request, or refuse it after an error.

        Then the next request of its connection may begin.
        """
        error = Unavailable("the broker stops") if task.cancelled() else task.exception()
        if error is None:
            self._queue.add(append)
        elif isinstance(error, LogError):
            append.refuse(error)
        else:
            self._context.failed(API, error)
            append.refuse(LogError(BUG))
        assert append.begun is not None
        append.begun.set_result(None)

    # -- InitProducerId

    async def init_producer_id(
        self, request: InitProducerIdRequest, client: ApiClient
    ) -> InitProducerIdResponse:
        """Answer InitProducerId: always a new id."""
        context, producer_id = self._context, -1
        if request.transactional_id == "":
            code = context.refusal(INIT_API, Code.INVALID_REQUEST)
        elif request.transactional_id is not None:
            code = context.no_transactions(
                INIT_API,
                client,
                Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                request.transactional_id,
            )
        else:
            code = Code.NONE
            try:
                producer_id = await context.operations.records.reserve_producer_id(client.rights)
            except Unauthenticated:
                raise
            except Forbidden as error:
                code = context.denial(INIT_API, client, error, RequestKind.ADMIN)
            except LogError as error:
                code = context.code(INIT_API, error, RequestKind.GROUP)
        return InitProducerIdResponse(
            throttle_time_ms=0,
            error_code=code,
            producer_id=producer_id,
            producer_epoch=-1 if code else 0,
        )
