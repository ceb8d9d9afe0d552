"""Frames, cut from bytes in any pieces within bounds; headers of requests and responses."""

import random
import struct

import pytest

from tests.service.kafka.every_message import every_message
from tidelog.service.kafka.connections.frame import (
    FRAME_BYTES_MIN,
    KEPT_BYTES_MAX,
    PRODUCE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    UNPROVED_BYTES_MAX,
    FrameReader,
    FrameRefused,
)
from tidelog.service.kafka.connections.outbox import AnswerShares
from tidelog.service.kafka.connections.request_memory import SHARED_BYTES, RequestMemory
from tidelog.service.kafka.messages.header import (
    API_VERSIONS,
    FIRST_FLEXIBLE,
    RequestHeader,
    decode_header,
    frame_response,
)
from tidelog.service.kafka.messages.primitives import MalformedMessage
from tidelog.service.memory_pool import EVERYONE


def _framed(key: int, size: int) -> bytes:
    body = struct.pack(">h", key) + bytes(index % 251 for index in range(size - 2))
    return struct.pack(">i", size) + body


def _pulled(reader: FrameReader) -> list[bytes]:
    frames = []
    while (frame := reader.pull()) is not None:
        frames.append(bytes(frame))
    reader.settle()
    return frames


@pytest.mark.parametrize("seed", range(30))
def test_frames_come_out_as_they_went_in(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((10, 11, 100, 5_000, 70_000, 300_000)) for _ in range(20)]
    frames = [_framed(0, size) for size in sizes]
    data, shared = b"".join(frames), memoryview(bytearray(SHARED_BYTES))
    reader = FrameReader(lambda _: True, is_proved=True)
    pulled_frames: list[bytes] = []
    position = 0
    while position < len(data):
        if draw.random() < 0.5:  # as from a socket
            room = reader.buffer(shared)
            count = min(len(room), len(data) - position, draw.choice((1, 3, 1000, 1 << 20)))
            room[:count] = data[position : position + count]
            del room
            reader.received(shared, count)
        else:  # as from TLS
            count = min(len(data) - position, draw.choice((1, 5, 16_384, 1 << 18)))
            reader.push(data[position : position + count])
        position += count
        pulled_frames += _pulled(reader)
        shared[:] = bytes(SHARED_BYTES)  # a frame must not be a view of it
    assert pulled_frames == [frame[4:] for frame in frames]
    assert not reader.is_inside


@pytest.mark.parametrize(
    ("key", "size", "is_proved"),
    [
        (0, PRODUCE_BYTES_MAX + 1, True),
        (3, REQUEST_BYTES_MAX + 1, True),
        (0, UNPROVED_BYTES_MAX + 1, False),
        (3, FRAME_BYTES_MIN - 1, True),
        (3, -1, True),
        (3, 2**31 - 1, True),
        (18245, 0x47455420, True),  # GET
    ],
)
def test_wrong_size_is_refused_without_memory(key: int, size: int, is_proved: bool) -> None:
    sizes: list[int] = []
    reader = FrameReader(lambda size: not sizes.append(size), is_proved=is_proved)  # type: ignore[func-returns-value]
    reader.push(struct.pack(">ih", size, key))
    with pytest.raises(FrameRefused):
        reader.pull()
    assert not sizes


def test_a_buffer_grows_with_the_bytes_that_arrive() -> None:
    shared = memoryview(bytearray(SHARED_BYTES))
    reader = FrameReader(lambda _: True, is_proved=True)
    reader.push(struct.pack(">ih", PRODUCE_BYTES_MAX, 0))
    assert _pulled(reader) == []
    assert reader.frame_bytes == PRODUCE_BYTES_MAX
    received = 2
    for _ in range(8):
        room = reader.buffer(shared)
        assert len(room) <= max(received, 1)
        received += len(room)
        count = len(room)
        del room
        reader.received(shared, count)
        assert _pulled(reader) == []


def test_a_frame_waits_for_memory() -> None:
    room = False
    reader = FrameReader(lambda _: room, is_proved=True)
    reader.push(_framed(0, 1000))
    assert _pulled(reader) == []
    assert reader.is_blocked
    room = True
    assert [len(frame) for frame in _pulled(reader)] == [1000]
    assert not reader.is_blocked


def test_shares_of_answers_are_released_when_the_socket_has_taken_them() -> None:
    shares, released = AnswerShares(), list[str]()
    shares.add(10, lambda: released.append("a"))
    shares.add(20, lambda: released.append("b"))
    shares.taken(9)
    assert released == []
    shares.taken(10)
    assert released == ["a"]
    shares.release_all()
    assert released == ["a", "b"]


@pytest.mark.parametrize("is_proved", [False, True])
def test_few_bytes_are_kept_behind_the_requests_of_an_unproved_client(is_proved: bool) -> None:
    reader = FrameReader(lambda _: True, is_proved=is_proved)
    frame = _framed(17, 100)
    reader.push(frame * (1 + KEPT_BYTES_MAX // len(frame)))
    assert reader.pull() == frame[4:]
    reader.settle()
    assert reader.pull() == frame[4:], "what fits is kept"
    reader.push(frame * (1 + KEPT_BYTES_MAX // len(frame)))
    assert reader.pull() == frame[4:]
    reader.settle()
    if is_proved:
        assert len(_pulled(reader)) == 2 * (KEPT_BYTES_MAX // len(frame)) - 1
        return
    assert not reader.is_inside
    reader.push(frame)
    with pytest.raises(FrameRefused, match="before the answer to a login"):
        reader.pull()


def test_frames_that_stop_in_the_middle_delay_no_small_frame() -> None:
    memory = RequestMemory(1 << 20)
    stopped = [
        FrameReader(lambda size: memory.take(_Idle(), size), is_proved=True) for _ in range(9)
    ]
    for number, reader in enumerate(stopped):
        size = 300_000 if number % 2 else SHARED_BYTES
        reader.push(_framed(0, size)[:-1])
        assert _pulled(reader) == []
    assert [number for number, reader in enumerate(stopped) if reader.is_blocked] == [5, 7]
    assert memory.take(_Idle(), SHARED_BYTES)


class _Idle:
    owner = EVERYONE

    def on_memory(self) -> None:
        return


METADATA = 3
SASL_HANDSHAKE = 17
OFFSET_DELETE = 47


def test_request_and_response_of_api_have_same_first_flexible_version() -> None:
    messages = [message for message in every_message() if message.api_key is not None]
    flexible = {(message.api_key, *message.flexible[:1]) for message in messages}
    assert flexible == {*FIRST_FLEXIBLE.items(), (SASL_HANDSHAKE,), (OFFSET_DELETE,)}
    assert FIRST_FLEXIBLE[METADATA] == 9


def request(api_key: int, version: int, after: str, client_id: str = "0001 63") -> bytes:
    head = f"{api_key:04x} {version:04x} 00000007 {client_id} {after}"
    return bytes.fromhex(head)


def test_a_header_has_tags_where_its_api_is_flexible() -> None:
    assert decode_header(request(METADATA, 8, "ff")) == RequestHeader(METADATA, 8, 7, "c", 11)
    assert decode_header(request(METADATA, 9, "00 ff")) == RequestHeader(METADATA, 9, 7, "c", 12)
    tagged = decode_header(request(METADATA, 9, "02 00 02 aabb 05 00 ff"))
    assert tagged == RequestHeader(METADATA, 9, 7, "c", 18)
    assert decode_header(request(SASL_HANDSHAKE, 1, "")).position == 11


def test_a_client_id_may_be_null_or_empty() -> None:
    assert decode_header(request(METADATA, 8, "", "ffff")) == RequestHeader(
        METADATA, 8, 7, None, 10
    )
    assert decode_header(request(METADATA, 9, "00", "0000")) == RequestHeader(
        METADATA, 9, 7, "", 11
    )


def test_a_header_of_an_unknown_api_or_version_is_read() -> None:
    assert decode_header(request(0x7FFF, 0, "")) == RequestHeader(0x7FFF, 0, 7, "c", 11)
    assert decode_header(request(API_VERSIONS, 99, "00")) == RequestHeader(18, 99, 7, "c", 12)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        request(METADATA, 8, "", "00")[:9],
        request(METADATA, 8, "", "fffe"),
        request(METADATA, 8, "", "0002 63"),
        request(METADATA, 8, "", "7fff"),
        request(METADATA, 8, "", "0001 ff"),
        request(METADATA, 9, ""),
        request(METADATA, 9, "01 00"),
        request(METADATA, 9, "01 00 05 aa"),
        request(METADATA, 9, "ffffffffff"),
    ],
    ids=bytes.hex,
)
def test_a_broken_header_is_refused(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_header(frame)


def test_a_response_is_framed_with_tags_where_it_is_flexible() -> None:
    records = memoryview(b"cd")
    pieces = frame_response(METADATA, 8, 7, [b"ab", records])
    assert pieces == [bytes.fromhex("00000008 00000007"), b"ab", records]
    assert pieces[2] is records
    flexible = b"".join(frame_response(METADATA, 9, 7, [b"ab"]))
    assert flexible == bytes.fromhex("00000007 00000007 00") + b"ab"


def test_the_response_of_api_versions_never_has_tags() -> None:
    for version in (0, 3, 4):
        frame = b"".join(frame_response(API_VERSIONS, version, 7, [b"ab"]))
        assert frame == bytes.fromhex("00000006 00000007") + b"ab"
