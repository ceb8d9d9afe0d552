"""Requests whose clients leave: the bytes are freed when their memory is given back.

Else the memory of the process is more than its budgets. All tests run without garbage collections,
because the broker's are rare (service.server.serve): what is in a cycle stays for long.
"""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import pytest

from tests.service.conftest import until
from tests.service.kafka.conftest import Client, Kafka
from tests.tools.attack.kafka_arrays import WIDE, long_arrays
from tests.tools.attack.measure import VICTIM
from tests.tools.attack.probes import NEIGHBOUR
from tidelog.service.codec_threads import THREADS, UNPROVED_CALLER
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.connections.connection import DECODE_INLINE_BYTES, KafkaConnection
from tidelog.service.kafka.connections.frame import FrameReader
from tidelog.service.kafka.connections.pending_requests import Pending
from tidelog.service.kafka.messages.schema import Structure

LARGE = [
    name
    for name, make in long_arrays(0.03).items()
    if not name.startswith("Produce") and len(make()) > DECODE_INLINE_BYTES
]
"""The requests that a thread decodes."""


class _Frame(bytearray):
    """The bytes of a request, which can have a weak reference."""

    __slots__ = ("__weakref__",)


class Gate:
    """A point that threads do not pass until `is_open` is set, or the context ends."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()

    def pass_through(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> "list[weakref.ref[_Frame]]":
    """References to the frames that connections have read."""
    references: list[weakref.ref[_Frame]] = []
    pull = FrameReader.pull

    def pulled(self: FrameReader) -> bytes | bytearray | None:
        frame = pull(self)
        if frame is None:
            return None
        copied = _Frame(frame)
        references.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(FrameReader, "pull", pulled)
    return references


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before each request is decoded."""
    decode = Api.decode
    with Gate() as gate:

        def decoded(self: Api, *arguments: Any) -> Any:
            gate.pass_through()
            return decode(self, *arguments)

        monkeypatch.setattr(Api, "decode", decoded)
        yield gate


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before each answer is encoded in a thread."""
    encoded = Context.encoded
    with Gate() as gate:

        def gated(
            self: Context, rights: Any, encode: Callable[[], Iterable[bytes | memoryview]]
        ) -> Awaitable[EncodedAnswer]:
            def encode_late() -> Iterable[bytes | memoryview]:
                gate.pass_through()
                return encode()

            return encoded(self, rights, encode_late)

        monkeypatch.setattr(Context, "encoded", gated)
        yield gate


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Disable garbage collections; leave what earlier tests kept out of `_in_cycles`."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
async def wide(kafka: Kafka) -> Kafka:
    """A broker with the topics that the requests name."""
    for name, partitions in ((WIDE, 500), (VICTIM, 1), (NEIGHBOUR, 1)):
        if name not in kafka.log.state.topics:
            await kafka.log.topics.create(name, partitions, {})
    return kafka


def _sender(kafka: Kafka, data: bytes) -> Client:
    client = kafka.client()
    client.transport.on_write = lambda: None
    client.connection.frames.push(data)
    client.connection.advance()
    return client


async def _some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _is_kept(frames: "list[weakref.ref[_Frame]]") -> bool:
    return any(reference() is not None for reference in frames)


async def _ended(kafka: Kafka, frames: "list[weakref.ref[_Frame]]") -> None:
    """Wait until the requests hold no memory. Then nothing has their bytes."""
    memory = kafka.server.listener.server.memory
    await until(lambda: not (memory.used or memory.decoded.used), 60)
    await _some_turns()
    await until(lambda: not _is_kept(frames), 1)  # a thread forgets its last work a little later


def _in_cycles() -> list[object]:
    """Return the parts of requests that only a garbage collection frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = (Pending, Structure, TracebackType, asyncio.Task)
        return [part for part in gc.garbage if isinstance(part, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("name", LARGE)
async def test_request_that_waits_for_a_thread(
    wide: Kafka, frames: "list[weakref.ref[_Frame]]", name: str
) -> None:
    """A read ends at once with its client. A change is made, and holds its memory until then."""
    memory, threads = wide.server.listener.server.memory, wide.context.threads
    with Gate() as gate:
        slices = [threads.run(UNPROVED_CALLER, 0, gate.pass_through) for _ in range(THREADS)]
        busy = asyncio.gather(*slices)
        await _some_turns()
        client = _sender(wide, long_arrays(0.03)[name]())
        is_change = not client.connection._begun[0].api.is_waiting
        wide.leave(client)
        await _some_turns()
        assert (memory.used > 0) is (memory.decoded.used > 0) is is_change
        assert _is_kept(frames) is is_change
    await busy
    await _ended(wide, frames)
    assert not _in_cycles()


@pytest.mark.parametrize("name", LARGE)
async def test_request_that_a_thread_decodes(
    wide: Kafka, frames: "list[weakref.ref[_Frame]]", decoding: Gate, name: str
) -> None:
    client = _sender(wide, long_arrays(0.03)[name]())
    await until(decoding.is_reached.is_set)
    wide.leave(client)
    await _some_turns()
    assert wide.server.listener.server.memory.decoded.used, "the thread has the request"
    decoding.is_open.set()
    await _ended(wide, frames)
    assert not _in_cycles()


@pytest.mark.parametrize("name", LARGE)
async def test_request_whose_answer_a_thread_encodes(
    wide: Kafka, frames: "list[weakref.ref[_Frame]]", encoding: Gate, name: str
) -> None:
    client = _sender(wide, long_arrays(0.03)[name]())
    connection: KafkaConnection = client.connection
    await until(lambda: encoding.is_reached.is_set() or connection.is_quiet, 60)
    is_encoding = encoding.is_reached.is_set()
    wide.leave(client)
    await _some_turns()
    used_bytes = wide.server.listener.server.memory.decoded.used
    assert (used_bytes > 0) is is_encoding, "the thread has the answer"
    encoding.is_open.set()
    await _ended(wide, frames)
    assert not _in_cycles()


async def test_answer_that_nobody_takes_is_not_encoded(
    wide: Kafka, frames: "list[weakref.ref[_Frame]]", decoding: Gate, encoding: Gate
) -> None:
    encoding.is_open.set()
    client = _sender(wide, long_arrays(0.03)["DeleteTopics"]())
    await until(decoding.is_reached.is_set)
    wide.leave(client)
    decoding.is_open.set()
    await _ended(wide, frames)
    assert not encoding.is_reached.is_set()


@pytest.mark.parametrize("turns", [0, 1, 20])
@pytest.mark.parametrize("name", ["Produce of partitions", "Produce of unknown topics"])
async def test_batches(
    wide: Kafka, frames: "list[weakref.ref[_Frame]]", name: str, turns: int
) -> None:
    """The log goes on with batches, and refusals have an end, too."""
    client = _sender(wide, long_arrays(0.03)[name]())
    for _ in range(turns):
        await asyncio.sleep(0)
    wide.leave(client)
    await _ended(wide, frames)
    assert not _in_cycles()
