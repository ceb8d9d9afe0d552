"""Requests of one connection: order, bounds, refusals. Virtual time, transports in memory."""

import asyncio
import gc
import logging
import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.kafka.wire import MemoryTransport, answer, framed
from tests.support.vloop import VIRTUAL_TIME
from tidelog.service.codec_threads import THREADS, UnpackThreads
from tidelog.service.http.connection_admission import Admission, Limits, Phase
from tidelog.service.http.loop_turns import TURN_S, Turns
from tidelog.service.kafka.answer_forms import CloseConnection, EncodedAnswer, Later
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.connections import connection as connections
from tidelog.service.kafka.connections.connection import (
    CLOSE_DELAY_S,
    UNANSWERED_MAX,
    KafkaConnection,
)
from tidelog.service.kafka.connections.listener_parts import ListenerParts
from tidelog.service.kafka.connections.outbox import (
    SLICE_BYTES,
    UNSENT_BYTES_MAX,
    Outbox,
    UnsentAnswers,
)
from tidelog.service.kafka.connections.request_memory import SMALL_BYTES_MAX, RequestMemory
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from tidelog.service.kafka.messages.groups import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from tidelog.service.kafka.messages.handshake import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.service.kafka.messages.header import CLIENT_ID_CHARS_MAX
from tidelog.service.kafka.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from tidelog.service.kafka.messages.produce import ProduceRequest, ProduceResponse
from tidelog.service.kafka.refusal_lines import RefusalLines
from tidelog.service.memory_pool import EVERYONE, UNPROVED, UNPROVED_PART
from tidelog.service.telemetry.kafka_counters import KafkaCounters

PRODUCE = ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[])
METADATA = MetadataRequest(topics=None)
NAMED = ApiVersionsRequest(client_software_name="a", client_software_version="1")
FETCH = FetchRequest(max_wait_ms=0, min_bytes=0, topics=[])
CLOUD = MetadataResponse(brokers=[], topics=[], cluster_id="c", controller_id=1)


class Peer:
    """A client and its connection. Handlers note their calls; Produce answers when `due` is set."""

    def __init__(self, memory: int = 1 << 30, fetch: Callable[..., Any] | None = None) -> None:
        self.begun: list[str] = []
        self.clients: list[ApiClient] = []
        self.laters: list[Later] = []
        self.counters = KafkaCounters()
        self.threads = UnpackThreads()
        self.memory = RequestMemory(memory)
        self.admission: Admission[Any] = Admission(Limits())
        apis = [
            Api(ProduceRequest, ProduceResponse, self._produce, is_pipelined=True),
            Api(MetadataRequest, MetadataResponse, self._metadata),
            Api(FetchRequest, FetchResponse, fetch or self._metadata, is_waiting=True),
            Api(ApiVersionsRequest, ApiVersionsResponse, None),
            Api(SaslHandshakeRequest, SaslHandshakeResponse, None),
        ]
        context: Any = SimpleNamespace(
            counters=self.counters,
            audit_refusal=lambda *_: None,
            threads=self.threads,
            refusal_lines=RefusalLines(self.admission),
        )
        context.encoded = partial(Context.encoded, context)
        table = {api.key: api for api in apis}
        loop = asyncio.get_running_loop()
        self.step_s = 0.0
        """The time of each request. Without it, a test sees all that one call does."""
        self.now_s = 0.0
        self.turns = Turns(self._clock_s)
        unsent = UnsentAnswers(1 << 20)
        self.server = ListenerParts(
            loop, context, table, self.admission, self.memory, None, unsent, self.turns
        )
        self.transport, self.connection = self.connect()

    def _clock_s(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def connect(self, address: str = "192.0.2.1") -> tuple[MemoryTransport, KafkaConnection]:
        transport, connection = MemoryTransport(), KafkaConnection(self.server)
        connection.opened(transport, address)
        self.admission.arrive(connection, address)
        return transport, connection

    def send(self, *frames: bytes) -> None:
        self.connection.frames.push(b"".join(frames))
        self.connection.advance()

    def _produce(self, request: ProduceRequest, client: ApiClient) -> Later | None:
        self.begun.append("produce")
        self.clients.append(client)
        if request.acks == 0:
            if request.timeout_ms == 0:
                raise CloseConnection("refused")
            return None
        later = Later()
        if request.timeout_ms == 7:
            later.begun = asyncio.get_running_loop().create_future()
        self.laters.append(later)
        return later

    async def _metadata(self, request: Any, client: ApiClient) -> MetadataResponse:
        self.begun.append("metadata")
        await asyncio.sleep(1)
        return CLOUD

    def finish(self, number: int) -> None:
        on_answer = self.laters[number].on_answer
        assert on_answer is not None
        on_answer(ProduceResponse(responses=[]))

    def numbers(self) -> list[int]:
        return [int.from_bytes(frame[:4], "big") for frame in self.transport.frames()]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return VIRTUAL_TIME


async def test_produce_requests_begin_at_once_and_are_answered_in_order() -> None:
    peer = Peer()
    peer.send(*(framed(PRODUCE, 9, number) for number in (1, 2, 3)))
    assert peer.begun == ["produce"] * 3
    peer.finish(2)
    peer.finish(1)
    assert peer.numbers() == []
    peer.finish(0)
    assert peer.numbers() == [1, 2, 3]
    assert peer.memory.used == 0


async def test_another_request_waits_for_the_answers_before_it() -> None:
    peer = Peer()
    peer.send(framed(PRODUCE, 9, 1), framed(METADATA, 9, 2), framed(PRODUCE, 9, 3))
    assert peer.begun == ["produce"]
    peer.finish(0)
    await asyncio.sleep(0.5)
    assert peer.begun == ["produce", "metadata"]
    await asyncio.sleep(1)
    assert peer.begun == ["produce", "metadata", "produce"]
    peer.finish(1)
    assert peer.numbers() == [1, 2, 3]


async def test_a_client_with_too_many_unanswered_requests_is_not_read() -> None:
    peer = Peer()
    peer.send(*(framed(PRODUCE, 9, number) for number in range(40)))
    assert len(peer.begun) == UNANSWERED_MAX
    assert peer.transport.is_paused
    for number in range(UNANSWERED_MAX // 2):
        peer.finish(number)
    assert peer.transport.is_paused
    peer.finish(UNANSWERED_MAX // 2)
    for _ in range(100):
        for number, later in enumerate(peer.laters):
            if later.on_answer is not None:
                peer.finish(number)
                later.on_answer = None
    assert peer.numbers() == list(range(40))
    assert not peer.transport.is_paused
    assert peer.memory.used == 0


async def test_a_connection_lets_other_callbacks_run_between_its_requests() -> None:
    peer = Peer()
    peer.step_s = TURN_S
    peer.send(*(framed(PRODUCE, 9, number) for number in range(5)))
    for count in range(5):
        assert len(peer.begun) == count
        assert peer.transport.is_paused
        await asyncio.sleep(0)
    assert len(peer.begun) == 5
    await asyncio.sleep(0)
    assert not peer.transport.is_paused


async def test_connections_of_a_client_have_one_turn_in_an_iteration_of_the_loop() -> None:
    """Another client waits for one request, and not for one of each connection."""
    peer = Peer()
    peer.step_s = TURN_S
    crowd = [peer.connect()[1] for _ in range(50)]
    for connection in crowd:
        connection.frames.push(framed(PRODUCE, 9, 1) * 3)
        connection.advance()
    assert not peer.begun
    await asyncio.sleep(0)
    assert len(peer.begun) == 1
    other = peer.connect("192.0.2.2")[1]
    other.frames.push(framed(METADATA, 9, 1))
    other.advance()
    for _ in range(3):
        await asyncio.sleep(0)
    assert "metadata" in peer.begun
    assert len(peer.begun) <= 4
    for _ in range(160):
        await asyncio.sleep(0)
    assert len(peer.begun) == 151


async def test_bytes_of_unanswered_requests_are_bounded() -> None:
    peer = Peer()
    large = ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[], transactional_id="x" * 30_000)
    frame = framed(large, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "UNANSWERED_BYTES_MAX", 2 * (len(frame) - 4))
        peer.send(frame * 5)
        assert len(peer.begun) == 2
        assert peer.transport.is_paused


async def test_memory_is_shared_by_connections() -> None:
    frame = framed(PRODUCE, 9)
    peer = Peer(memory=4 * len(frame))
    other_transport, other = peer.connect()
    peer.send(frame)
    other.frames.push(frame)
    other.advance()
    assert len(peer.begun) == 1
    assert other_transport.is_paused
    peer.finish(0)
    assert len(peer.begun) == 2
    assert not other_transport.is_paused
    other.closed()
    assert peer.memory.used == len(frame) - 4, "the log still has the batches of the request"
    peer.finish(1)
    assert peer.memory.used == 0


async def test_a_connection_that_ends_gives_back_what_it_held() -> None:
    peer = Peer()
    peer.send(framed(PRODUCE, 9, 1), framed(METADATA, 9, 2), framed(PRODUCE, 9, 3)[:-1])
    assert peer.memory.used > 0
    peer.connection.closed()
    assert peer.admission.connections == 0
    peer.finish(0)
    assert peer.memory.used == 0
    assert peer.numbers() == []


async def test_acks_0_has_no_answer_and_a_refusal_closes() -> None:
    peer = Peer()
    silent = ProduceRequest(acks=0, timeout_ms=1000, topic_data=[])
    peer.send(framed(silent, 9, 1), framed(PRODUCE, 9, 2))
    peer.finish(0)
    assert peer.numbers() == [2]
    peer.send(framed(ProduceRequest(acks=0, timeout_ms=0, topic_data=[]), 9, 3))
    await asyncio.sleep(CLOSE_DELAY_S * 1.5)
    assert peer.transport.is_aborted
    assert peer.counters.closed["acks=0"] == 1


async def test_a_request_under_check_holds_back_the_next() -> None:
    peer = Peer()
    checked = ProduceRequest(acks=-1, timeout_ms=7, topic_data=[])
    peer.send(framed(checked, 9, 1), framed(PRODUCE, 9, 2))
    assert peer.begun == ["produce"]
    begun = peer.laters[0].begun
    assert begun is not None
    begun.set_result(None)
    await asyncio.sleep(0)
    assert peer.begun == ["produce"] * 2


async def test_an_unknown_version_of_api_versions_gets_version_0() -> None:
    peer = Peer()
    said = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    frame = framed(said, 4, 5)
    peer.send(frame[:6] + b"\0\x09" + frame[8:])
    ((number, response),) = [
        answer(answer_frame, ApiVersionsResponse, 0) for answer_frame in peer.transport.frames()
    ]
    assert number == 5
    assert response.error_code == Code.UNSUPPORTED_VERSION
    assert [(api.api_key, api.max_version) for api in response.api_keys] == [(18, 4)]


async def test_api_versions_names_what_is_served_and_takes_the_name_of_the_library() -> None:
    peer = Peer()
    said = ApiVersionsRequest(client_software_name="lib", client_software_version="1.2-x")
    peer.send(framed(said, 4), framed(PRODUCE, 9, client_id=None))
    (frame,) = peer.transport.frames()
    _, response = answer(frame, ApiVersionsResponse, 4)
    served = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
    assert served == {0: (0, 13), 1: (4, 18), 3: (0, 13), 17: (0, 1), 18: (0, 4)}
    for _ in range(3):  # if the first request took long, the second begins in the next turn
        await asyncio.sleep(0)
    (client,) = peer.clients
    assert client.software == "lib 1.2-x"
    assert (client.version, client.client_id, client.host) == (9, "", "192.0.2.1")
    wrong = ApiVersionsRequest(client_software_name="a b!", client_software_version="1")
    peer.finish(0)
    peer.transport.frames()
    peer.send(framed(wrong, 3))
    (frame,) = peer.transport.frames()
    assert answer(frame, ApiVersionsResponse, 3)[1].error_code == Code.INVALID_REQUEST


@pytest.mark.parametrize(
    "bad",
    [
        b"\0\0\0\x0b\0\0\0\x02\0\0\0\1\0\1c",  # Produce version 2
        b"\0\0\0\x0b\x03\xe7\0\0\0\0\0\1\0\1c",  # API 999
        b"\0\0\0\x0c\0\x03\0\x09\0\0\0\1\0\1c\0",  # Metadata without its fields
        b"\0\0\0\x0b\0\x03\0\x09\0\0\0\1\x7f\xffc",  # a client id over the end
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_bad_request_is_logged_once(bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tidelog.kafka"):
        peer = Peer()
        peer.send(framed(PRODUCE, 9, 1), bad)
        peer.finish(0)
        assert peer.numbers() == [1], "requests before it are answered"
        assert peer.transport.is_paused
        assert not peer.transport.is_aborted
        await asyncio.sleep(CLOSE_DELAY_S * 1.5)
        assert peer.transport.is_aborted
        peer.connection.closed()
        peer.transport, peer.connection = peer.connect()
        peer.send(bad)
    assert len(caplog.messages) == 1


async def test_a_bug_in_a_handler_closes_the_connection() -> None:
    async def broken(request: Any, client: ApiClient) -> None:
        raise ZeroDivisionError

    peer = Peer(fetch=broken)
    peer.send(framed(FETCH, 12))
    await asyncio.sleep(CLOSE_DELAY_S * 1.5)
    assert peer.transport.is_aborted
    assert peer.counters.closed["bug"] == 1


async def test_no_answer_is_made_while_the_client_takes_none() -> None:
    peer = Peer()
    peer.connection.set_writable(False)
    peer.send(framed(METADATA, 9, 1))
    await asyncio.sleep(2)
    assert peer.begun == []
    peer.connection.set_writable(True)
    await asyncio.sleep(2)
    assert peer.numbers() == [1]


async def test_a_wait_ends_with_its_connection() -> None:
    ended = asyncio.Event()

    async def wait(request: Any, client: ApiClient) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    peer = Peer(fetch=wait)
    peer.send(framed(FETCH, 12))
    await asyncio.sleep(1)
    peer.connection.closed()
    assert peer.memory.used, "the request is not at its end"
    await ended.wait()
    await asyncio.sleep(0.1)
    assert peer.memory.used == 0


async def test_the_memory_of_an_answer_is_held_until_the_socket_has_taken_it() -> None:
    released: list[int] = []

    async def fetched(request: Any, client: ApiClient) -> EncodedAnswer:
        return EncodedAnswer([b"records"], partial(released.append, 1))

    peer = Peer(fetch=fetched)
    peer.transport.unsent = 5
    peer.send(framed(FETCH, 12))
    await asyncio.sleep(0.1)
    assert peer.transport.frames()
    assert released == []
    peer.transport.unsent = 0
    assert peer.connection.observed() == (Phase.IDLE, 1)
    assert released == [1]


@pytest.mark.parametrize("iterations", range(6))
async def test_answer_of_client_that_leaves_frees_memory(iterations: int) -> None:
    released: list[int] = []
    gate = asyncio.Event()

    async def fetched(request: Any, client: ApiClient) -> EncodedAnswer:
        await gate.wait()
        return EncodedAnswer([b"records"], partial(released.append, 1))

    peer = Peer(fetch=fetched)
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
    topics = [FetchTopic(topic="t" * 200, partitions=[partition])] * 50
    peer.send(framed(FetchRequest(max_wait_ms=0, min_bytes=0, topics=topics), 11))
    await asyncio.sleep(0.1)
    gate.set()
    for _ in range(iterations):
        await asyncio.sleep(0)
    peer.connection.closed()
    await asyncio.sleep(0.1)
    assert len(released) == (iterations > 0)
    assert peer.memory.used == 0


async def test_the_phases_of_a_connection() -> None:
    peer = Peer()
    observed = peer.connection.observed
    assert observed() == (Phase.IDLE, 0)
    frame = framed(PRODUCE, 9)
    peer.send(frame[:7])
    assert observed() == (Phase.HEAD, 0)
    peer.send(frame[7:])
    assert observed() == (Phase.SERVED, 0)
    peer.finish(0)
    assert observed() == (Phase.IDLE, 1)
    peer.transport.unsent = 3
    assert observed()[0] is Phase.ANSWER


async def test_sasl_where_no_key_is_needed() -> None:
    peer = Peer()
    peer.send(framed(SaslHandshakeRequest(mechanism="PLAIN"), 1))
    (frame,) = peer.transport.frames()
    response = answer(frame, SaslHandshakeResponse, 1)[1]
    assert response.error_code == Code.ILLEGAL_SASL_STATE


async def test_a_long_client_id_is_cut() -> None:
    peer = Peer()
    for number in range(20):
        peer.send(framed(PRODUCE, 9, number, f"{number:03}{chr(0x1F600)}" + "x" * 32_000))
        peer.finish(number)
    assert {len(client.client_id) for client in peer.clients} == {CLIENT_ID_CHARS_MAX}
    assert {client.client_id[:3] for client in peer.clients} == {f"{n:03}" for n in range(20)}


async def test_a_change_holds_its_memory_to_its_end_after_the_connection() -> None:
    peer = Peer()
    peer.send(framed(METADATA, 9))
    used_bytes = peer.memory.used
    peer.connection.closed()
    assert peer.memory.used == used_bytes > 0
    await asyncio.sleep(2)
    assert peer.memory.used == 0


async def test_a_connection_that_ends_frees_the_part_of_a_frame() -> None:
    peer = Peer()
    peer.send(struct.pack(">ih", 1 << 20, 0) + bytes(1 << 19))
    assert peer.connection.frames.is_inside
    peer.connection.closed()
    assert not peer.connection.frames.is_inside
    assert peer.memory.used == 0


class _Security:
    """Admits all clients as one principal, when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def admit(self, scope: dict[str, Any], *_: object) -> None:
        await self.gate.wait()
        scope["rights"] = SimpleNamespace(
            principal="User:a",
            proof=("", "", 0),
            check_valid=lambda: None,
            has_quota=lambda _: False,
            record=lambda *_: None,
            throttle_s=lambda _: 0.0,
        )


class _Other:
    """Another connection, which holds memory."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def on_memory(self) -> None:
        """It waits for none."""


async def test_a_client_that_logs_in_while_it_waits_for_memory_delays_no_other_login() -> None:
    peer, security = Peer(memory=1 << 20), _Security()
    peer.server.apis[36] = Api(SaslAuthenticateRequest, SaslAuthenticateResponse, None)
    peer.server = peer.server._replace(security=security)  # type: ignore[arg-type]
    login = framed(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    _, first = peer.connect()
    first.frames.push(login + framed(SaslAuthenticateRequest(auth_bytes=b"\0u\0p"), 2))
    first.advance()
    others_bytes = (1 << 20) // 4 // UNPROVED_PART - peer.memory.used
    assert peer.memory.take(_Other(UNPROVED), others_bytes)
    first.frames.push(framed(METADATA, 1))
    first.advance()
    transport, second = peer.connect()
    second.frames.push(login)
    second.advance()
    assert first.frames.is_blocked
    assert second.frames.is_blocked
    security.gate.set()
    await asyncio.sleep(0.5)
    assert peer.begun == ["metadata"], "it has its own memory now"
    assert transport.frames(), "the memory of its login is free"
    peer.memory.give(UNPROVED, others_bytes)
    await asyncio.sleep(1)
    assert peer.memory.used == 0


async def test_connections_whose_turn_has_not_come_take_the_memory_that_they_waited_for() -> None:
    """Else those behind them would wait until memory is given back once more."""
    peer, small_bytes = Peer(memory=1 << 20), (1 << 20) // 4
    assert peer.memory.take(_Other(EVERYONE), SMALL_BYTES_MAX)
    for _ in range(small_bytes // SMALL_BYTES_MAX - 1):
        assert peer.memory.take(_Other(EVERYONE), SMALL_BYTES_MAX)
    frame, later = framed(METADATA, 9), [peer.connect()[1] for _ in range(20)]
    for connection in later:
        connection.frames.push(frame)
        connection.advance()
    assert all(connection.frames.is_blocked for connection in later)
    await asyncio.sleep(0.1)
    peer.turns.begin(asyncio.get_running_loop())
    peer.now_s += TURN_S
    peer.memory.give(EVERYONE, SMALL_BYTES_MAX)
    assert peer.memory.used == small_bytes - SMALL_BYTES_MAX + 20 * (len(frame) - 4)
    assert peer.begun == []
    await asyncio.sleep(0.1)
    assert peer.begun == ["metadata"] * 20
    for connection in later:
        connection.closed()
    await asyncio.sleep(2)
    assert peer.memory.used == small_bytes - SMALL_BYTES_MAX


async def test_a_request_whose_turn_has_not_come_takes_the_memory_to_be_decoded() -> None:
    peer = Peer(memory=1 << 20)
    others_bytes = peer.memory.decoded.limit // 2
    assert peer.memory.decoded.take(_Other(EVERYONE), others_bytes)
    topics = [MetadataRequestTopic(name=f"{number:05}") for number in range(300)]
    frame, later = framed(MetadataRequest(topics=topics), 9), [peer.connect()[1] for _ in range(3)]
    for connection in later:
        connection.frames.push(frame)
        connection.advance()
    await asyncio.sleep(0.1)
    peer.turns.begin(asyncio.get_running_loop())
    peer.now_s += TURN_S
    peer.memory.decoded.give(EVERYONE, others_bytes)
    assert peer.memory.decoded.used == 3 * (len(frame) - 4)
    assert peer.begun == []
    later[0].closed()
    assert peer.memory.decoded.used == 2 * (len(frame) - 4)
    await asyncio.sleep(2)
    assert peer.begun == ["metadata"] * 2
    assert peer.memory.decoded.used == peer.memory.used == 0


async def test_a_request_that_its_group_keeps_gives_its_memory_back_then() -> None:
    callbacks = asyncio.Queue[Callable[[], object]]()
    ends = asyncio.Event()

    async def join(
        request: Any, client: ApiClient, on_kept: Callable[[], object]
    ) -> JoinGroupResponse:
        callbacks.put_nowait(on_kept)
        await ends.wait()
        return JoinGroupResponse(
            error_code=0, leader="", protocol_name="", member_id="", members=[]
        )

    peer = Peer()
    peer.server.apis[11] = Api(
        JoinGroupRequest, JoinGroupResponse, join, is_waiting=True, is_kept_by_group=True
    )
    sizes = 10, 5_000, 20_000, 100_000
    for size in sizes:
        _, connection = peer.connect()
        protocols = [JoinGroupRequestProtocol(name="range", metadata=bytes(size))]
        asked = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=10_000,
            member_id="",
            protocol_type="consumer",
            protocols=protocols,
        )
        connection.frames.push(framed(asked, 5))
        connection.advance()
        on_kept = await callbacks.get()  # a thread decodes the large ones
        assert peer.memory.used > size, "no other part counts the bytes"
        assert peer.memory.decoded.used == (0 if size == 10 else peer.memory.used)
        on_kept()
        assert peer.memory.used == peer.memory.decoded.used == 0
    ends.set()
    await asyncio.sleep(0.1)
    assert peer.memory.used == peer.memory.decoded.used == 0


async def test_a_connection_that_has_ended_is_freed() -> None:
    """A cache of its handlers kept it, and so each connection, for good."""
    peer = Peer()
    transport, connection = peer.connect()
    connection.frames.push(framed(NAMED, 3))
    connection.advance()
    assert transport.frames()
    connection.closed()
    ended = weakref.ref(connection)
    del connection
    await asyncio.sleep(1)
    gc.collect()
    assert ended() is None


async def test_large_requests_share_the_memory_of_decoded_requests() -> None:
    peer = Peer(memory=64 * 10_000)
    topics = [MetadataRequestTopic(name=f"{number:05}") for number in range(2_000)]
    large = framed(MetadataRequest(topics=topics), 9)
    _, second = peer.connect()
    peer.send(large)
    second.frames.push(large)
    second.advance()
    await asyncio.sleep(0.5)
    assert peer.begun == ["metadata"], "the second request waits for memory"
    assert peer.memory.decoded.used == len(large) - 4
    peer.connection.closed()
    await asyncio.sleep(5)
    assert peer.begun == ["metadata"] * 2
    assert peer.memory.decoded.used == peer.memory.used == 0


class _SlowApi(Api):
    """An API whose requests are not decoded before `gate` is set."""

    def __init__(self, request: Any, response: Any, serve: Any) -> None:
        super().__init__(request, response, serve, is_waiting=True)
        self.gate, self.is_decoding = threading.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def decode(self, frame: bytes | bytearray, position: int, version: int) -> Any:
        self._loop.call_soon_threadsafe(self.is_decoding.set)
        assert self.gate.wait(60)
        return super().decode(frame, position, version)


async def test_a_request_that_a_thread_decodes_holds_its_memory_after_its_connection() -> None:
    peer = Peer()
    api = peer.server.apis[1] = _SlowApi(FetchRequest, FetchResponse, peer._metadata)
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
    topics = [FetchTopic(topic="t" * 200, partitions=[partition])] * 50
    peer.send(framed(FetchRequest(max_wait_ms=0, min_bytes=0, topics=topics), 11))
    await api.is_decoding.wait()
    used_bytes = peer.memory.used
    peer.connection.closed()
    for _ in range(10):
        await asyncio.sleep(0)
    assert peer.memory.used == peer.memory.decoded.used == used_bytes > 0
    api.gate.set()
    await asyncio.sleep(0.1)
    assert peer.memory.used == peer.memory.decoded.used == 0
    assert peer.begun == []


async def test_wide_answers_take_turns_by_principal() -> None:
    context, gate, order = Peer().server.context, threading.Event(), list[str]()

    async def encoded(principal: str) -> None:
        rights: Any = SimpleNamespace(principal=principal, record=lambda *_: None)
        await context.encoded(rights, lambda: [b"" if gate.wait(60) else b"late"])
        order.append(principal)

    async with asyncio.TaskGroup() as tasks:
        for principal in ("a",) * 20 + ("b",):
            tasks.create_task(encoded(principal))
        await asyncio.sleep(0)
        gate.set()
    assert order.index("b") <= 2 * THREADS


class _Unread:
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.is_ended = False

    def end_unread(self) -> None:
        self.is_ended = True


def test_the_client_that_takes_nothing_for_the_longest_time_is_closed() -> None:
    first, second, third = (_Unread("User:a") for _ in range(3))
    unsent = UnsentAnswers(100)
    unsent.note(first, 50)
    unsent.note(second, 50)
    unsent.note(first, 40)  # it takes some
    unsent.note(third, 60)
    assert [client.is_ended for client in (first, second, third)] == [False, True, False]
    assert unsent.used == 100
    unsent.note(first, 0)
    unsent.note(third, 0)
    unsent.note(second, 0)
    assert unsent.used == 0
    unsent.note(first, 101)
    assert first.is_ended, "one answer alone is bounded, too"


def test_answers_that_one_principal_does_not_read_close_no_connection_of_another() -> None:
    slow = _Unread("User:slow")
    unsent = UnsentAnswers(100)
    unsent.note(slow, 30)
    greedy = [_Unread("User:greedy") for _ in range(5)]
    for receiver in greedy:
        unsent.note(receiver, 20)
    assert not slow.is_ended
    assert [receiver.is_ended for receiver in greedy] == [True, True, False, False, False]
    assert unsent.used == 90
    slow.owner = "User:other"  # it has logged in again
    unsent.note(slow, 0)
    assert unsent.used == 60


class _Socket(MemoryTransport):
    """A transport whose client reads nothing until `read`. It keeps a copy of what it gets."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        super().writelines(pieces)
        self.unsent += sum(map(len, pieces))
        if self.unsent > UNSENT_BYTES_MAX:
            self._outbox.set_writable(False)

    def read(self) -> None:
        self.unsent = 0
        self._outbox.set_writable(True)


def _opened_outbox() -> tuple[Outbox, _Socket]:
    outbox = Outbox(_Unread(""), UnsentAnswers(1 << 30))
    socket = _Socket(outbox)
    outbox.opened(socket)
    return outbox, socket


def test_an_answer_without_records_goes_to_its_transport_in_slices() -> None:
    outbox, socket = _opened_outbox()
    answer = [bytes([number]) * (SLICE_BYTES * 3 // 4) for number in range(20)]
    released: list[int] = []
    outbox.write([*answer], is_counted=False)
    outbox.write([b"records"], is_counted=True)
    outbox.release_when_taken(partial(released.append, 1))
    assert socket.unsent == UNSENT_BYTES_MAX + SLICE_BYTES
    assert outbox.unsent == SLICE_BYTES * 15 + 7
    assert not outbox.has_room
    for _ in range(3):
        outbox.settle()
        assert not released
        socket.read()
    assert outbox.has_room
    socket.read()
    outbox.settle()
    assert released == [1]
    assert bytes(socket.written) == b"".join(answer) + b"records"


def test_records_are_written_at_once() -> None:
    outbox, socket = _opened_outbox()
    outbox.write([bytes(UNSENT_BYTES_MAX * 2)], is_counted=True)
    assert socket.unsent == UNSENT_BYTES_MAX * 2
    assert not outbox.has_room


def test_a_connection_that_ends_writes_what_waits() -> None:
    outbox, socket = _opened_outbox()
    outbox.write([bytes(SLICE_BYTES * 9)], is_counted=False)
    outbox.end()
    assert len(socket.written) == SLICE_BYTES * 9
    assert socket.is_closed
