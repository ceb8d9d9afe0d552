"""Frames of Kafka's protocol against a whole broker, on a connection as long as it lasts.

Whatever comes, the broker answers each request, or ends the connection for a reason that is the
client's: no bug, no UNKNOWN_SERVER_ERROR, and no request that is lost. The next connection is
served. Requests change the broker's topics and groups, which are thrown away now and then.
"""

import asyncio
import contextlib
import struct

from tests.service.kafka.conftest import Client, Kafka, batch, broker
from tests.service.kafka.wire import framed
from tests.tools.fuzz import kafka_target
from tests.tools.fuzz.target import Target
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import (
    fetch,
    group_offsets,
    groups,
    handshake,
    metadata,
    produce,
)
from tidelog.service.kafka.messages.schema import Message

FRAMES_MAX = 2_000
"""Frames for one broker; then comes the next."""
ANSWER_S = 60.0
CLOSE_TURNS = 100_000
WAIT_S = 0.005
"""Time after which the client of a long poll or of a rebalance leaves."""
BUSY_TURNS = 30
"""Turns of the loop before the client sleeps between two looks."""
LOOK_S = 0.0005


class _Served:
    """A broker in memory with topic t, and a connection to it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.frames = 0
        self._kafka: Kafka = self._runner.run(self._open())
        self._client: Client | None = None

    async def _open(self) -> Kafka:
        kafka = await self._stack.enter_async_context(broker())
        await kafka.log.topics.create("t", 2, {})
        return kafka

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        if self._client is not None:
            self._kafka.leave(self._client)
        memory, turns = self._kafka.server.listener.server.memory, 0
        while memory.used and turns < CLOSE_TURNS:  # of requests that reached the log
            await asyncio.sleep(LOOK_S)
            turns += 1
        await self._stack.aclose()

    def send(self, data: bytes) -> None:
        self.frames += 1
        self._runner.run(self._send(struct.pack(">i", len(data)) + data))
        counters = self._kafka.counters.kafka
        assert not counters.closed["bug"], "a bug closed the connection"
        wrong = [api for api, code in counters.errors if code == Code.UNKNOWN_SERVER_ERROR.name]
        assert not wrong, f"UNKNOWN_SERVER_ERROR of {wrong}"

    async def _send(self, frame: bytes) -> None:
        if self._client is None:
            self._client = await self._connected()
        connection, loop = self._client.connection, asyncio.get_running_loop()
        ended = self._ended()
        connection.frames.push(frame)
        loop.call_soon(connection.advance)
        begun_s = loop.time()
        turns = 0
        await asyncio.sleep(0)
        while self._ended() == ended and not connection.is_quiet:
            if loop.time() - begun_s > (WAIT_S if _may_wait(frame) else ANSWER_S):
                assert _may_wait(frame), "no answer"
                break
            await asyncio.sleep(0 if turns < BUSY_TURNS else LOOK_S)
            turns += 1
        self._client.transport.written.clear()
        if self._ended() != ended or not connection.is_quiet or connection.frames.is_inside:
            self._kafka.leave(self._client)
            self._client = None

    async def _connected(self) -> Client:
        """Connect, and see that the broker answers. It keeps nothing of the connections before."""
        client = self._kafka.client()
        request, kind = handshake.ApiVersionsRequest(), handshake.ApiVersionsResponse
        answer = await client.ask(request, kind, 0)
        assert answer.error_code == Code.NONE
        client.transport.on_write = lambda: None
        return client

    def _ended(self) -> int:
        return sum(self._kafka.counters.kafka.closed.values())


def _may_wait(frame: bytes) -> bool:
    (key,) = struct.unpack_from(">h", frame, 4) if len(frame) >= 6 else (-1,)
    return key in WAITING


WAITING = {
    kind.api_key for kind in (fetch.FetchRequest, groups.JoinGroupRequest, groups.SyncGroupRequest)
}
"""APIs that wait for records, or for other members."""

_served: list[_Served] = []


def check_frame(data: bytes) -> None:
    if _served and _served[0].frames >= FRAMES_MAX:
        close()
    if not _served:
        _served.append(_Served())
    _served[0].send(data)


def close() -> None:
    """Stop the broker."""
    while _served:
        _served.pop().close()


def _requests() -> list[tuple[Message, int]]:
    parts = [produce.PartitionProduceData(index=0, records=memoryview(batch(b"v", b"w")))]
    data = [produce.TopicProduceData(name="t", partition_data=parts)]
    fetch_partitions = [fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1000)]
    offset = group_offsets.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=1, committed_metadata="m"
    )
    return [
        (produce.ProduceRequest(acks=-1, timeout_ms=1000, topic_data=data), 9),
        (produce.ProduceRequest(acks=0, timeout_ms=1000, topic_data=data), 7),
        (
            fetch.FetchRequest(
                max_wait_ms=0,
                min_bytes=0,
                topics=[fetch.FetchTopic(topic="t", partitions=fetch_partitions)],
            ),
            12,
        ),
        (metadata.MetadataRequest(topics=[metadata.MetadataRequestTopic(name="t")]), 9),
        (
            group_offsets.OffsetCommitRequest(
                group_id="g",
                member_id="",
                topics=[group_offsets.OffsetCommitRequestTopic(name="t", partitions=[offset])],
            ),
            8,
        ),
        (
            groups.JoinGroupRequest(
                group_id="g",
                session_timeout_ms=6000,
                rebalance_timeout_ms=100,
                member_id="",
                protocol_type="consumer",
                protocols=[groups.JoinGroupRequestProtocol(name="range", metadata=b"m")],
            ),
            3,
        ),
    ]


def usual_frames() -> list[tuple[Message, bytes]]:
    """Return requests that a broker does not refuse, and their frames."""
    return [(request, framed(request, version)[4:]) for request, version in _requests()]


def _frames() -> list[bytes]:
    return [*[frame for _, frame in usual_frames()] * 10, *kafka_target.frames()]


TARGETS = [Target("kafka_frame", _frames, check_frame, 150)]
