"""Frames are cut from bytes in any pieces, within the bounds of sizes and of memory."""

import random
import struct

import pytest

from tidelog.service.kafka.connections.frame import (
    FRAME_BYTES_MIN,
    KEPT_BYTES_MAX,
    PRODUCE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    SHARED_BYTES,
    UNPROVED_BYTES_MAX,
    FrameReader,
    FrameRefused,
    RequestMemory,
)
from tidelog.service.kafka.connections.outbox import AnswerShares
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
def test_a_size_out_of_bounds_is_refused_before_memory_is_taken(
    key: int, size: int, is_proved: bool
) -> None:
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
