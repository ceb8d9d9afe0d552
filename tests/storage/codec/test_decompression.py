"""The codecs: every framing that clients use, no byte beyond the bound, one error."""

import contextlib
import math
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.codec import decompression
from tidelog.storage.codec.batch_header import InvalidBatch

TEXT = b"".join(b"key-%05d and its value; " % i for i in range(9000))
"""More than one block of each format."""


def gzip(raw: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(raw) + packer.flush()


def packed(name: str) -> Callable[[bytes], bytes]:
    return lambda raw: pa.Codec(name).compress(raw, asbytes=True)


def xerial(raw: bytes, block: int = 32 << 10) -> bytes:
    blocks = [packed("snappy")(raw[start : start + block]) for start in range(0, len(raw), block)]
    framed = [struct.pack(">i", len(item)) + item for item in blocks]
    return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"".join(framed)


def stored_zstd(raw: bytes, window: int = 0x58) -> bytes:
    """A frame without a content size, of one block without compression; 0x58 is 2 MiB."""
    return b"\x28\xb5\x2f\xfd" + bytes([0, window]) + struct.pack("<I", len(raw) << 3 | 1)[:3] + raw


FRAMINGS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (decompression.NONE, bytes),
    "gzip": (decompression.GZIP, gzip),
    "gzip in two members": (decompression.GZIP, lambda raw: gzip(raw[:99]) + gzip(raw[99:])),
    "snappy": (decompression.SNAPPY, packed("snappy")),
    "snappy in xerial's blocks": (decompression.SNAPPY, xerial),
    "lz4": (decompression.LZ4, packed("lz4")),
    "zstd": (decompression.ZSTD, packed("zstd")),
    "zstd in two frames": (
        decompression.ZSTD,
        lambda raw: packed("zstd")(raw[:99]) + packed("zstd")(raw[99:]),
    ),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("raw", [b"x", TEXT, bytes(3 << 20)], ids=["byte", "text", "zeros"])
def test_each_framing_unpacks(framing: str, raw: bytes) -> None:
    codec, pack = FRAMINGS[framing]
    assert decompression.unpack(codec, pack(raw)) == raw


def test_streams_of_zstd_and_lz4_unpack() -> None:
    """A client that compresses a stream writes no size."""
    assert decompression.unpack(decompression.ZSTD, stored_zstd(b"stored")) == b"stored"
    for name in ("zstd", "lz4"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as stream:
            for start in range(0, len(TEXT), 1000):
                stream.write(TEXT[start : start + 1000])
        assert (
            decompression.unpack(decompression.NAMES.index(name), sink.getvalue().to_pybytes())
            == TEXT
        )


@pytest.mark.parametrize("framing", [name for name in FRAMINGS if name != "none"])
def test_packed_bytes_that_are_cut_off_or_too_long_are_refused(framing: str) -> None:
    codec, pack = FRAMINGS[framing]
    whole = pack(TEXT[:2000])
    for size in (*range(1, 30), len(whole) // 2, *range(len(whole) - 9, len(whole))):
        refuses(codec, whole[:size])
    refuses(codec, whole + b"\0")
    refuses(codec, whole + b"a few bytes")


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (decompression.LZ4, packed("lz4")(TEXT) * 2),  # Java's consumer reads the first frame
        (decompression.ZSTD, stored_zstd(b"x", window=0x69)),  # 9 MiB
        (decompression.ZSTD, stored_zstd(b"x", window=0xFF)),
        (decompression.ZSTD, stored_zstd(b"x") + stored_zstd(b"y", window=0x80)),
        (decompression.ZSTD, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60) + b"\x01\0\0"),
        (decompression.ZSTD, b"\x50\x2a\x4d\x18\x00\x00\x00\x00"),  # a frame without content
        (decompression.SNAPPY, b"\xff\xff\xff\xff\x0f"),
        (decompression.SNAPPY, b"\xff\xff\xff\xff\xff\xff\x0f"),
        (decompression.SNAPPY, b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, -1)),
    ],
)
def test_what_another_client_could_not_read_is_refused(codec: int, body: bytes) -> None:
    refuses(codec, body)


def refuses(codec: int, body: bytes) -> None:
    with pytest.raises(InvalidBatch) as raised:
        decompression.unpack(codec, body)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("framing", [name for name in FRAMINGS if name != "none"])
def test_a_bomb_is_refused_within_its_bound(framing: str) -> None:
    codec, pack = FRAMINGS[framing]
    size = decompression.UNPACKED_MIN + 1
    bomb = pack(bytes(size))
    if len(bomb) * decompression.RATIO_MAX > size:  # snappy packs 1 : 21
        assert len(decompression.unpack(codec, bomb)) == size
        return
    assert decompression.unpack(codec, pack(bytes(size - 1))) == bytes(size - 1)
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        refuses(codec, bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)
    assert peak < 2.1 * decompression.UNPACKED_MIN
    assert (pool.max_memory() or 0) < 4 << 20


def test_the_bound_holds_over_all_blocks_and_members() -> None:
    zeros = bytes(1 << 20)
    with pytest.raises(InvalidBatch, match="unpack to more than 16777216 bytes"):
        decompression.unpack(decompression.GZIP, gzip(zeros) * 17)
    with pytest.raises(InvalidBatch, match="unpack to more than 16777216 bytes"):
        decompression.unpack(decompression.ZSTD, packed("zstd")(zeros) * 17)
    # A forged size in front of each block: it is compared with the bound, and then with the block.
    forged = struct.pack(">i", 5) + b"\x80\x80\x80\x08\0"
    refuses(decompression.SNAPPY, b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + forged * 9)


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (decompression.GZIP, gzip(b"") * 10_001),
        (decompression.SNAPPY, xerial(bytes(10_001), block=1)),
        (decompression.LZ4, packed("lz4")(b"")[:7] + b"\1\0\0\x80x" * 10_001 + bytes(4)),
        (decompression.ZSTD, stored_zstd(b"")[:6] + bytes(3) * 10_000 + b"\1\0\0"),
        (decompression.ZSTD, stored_zstd(b"") * 10_001),
    ],
)
def test_empty_blocks_are_bounded(codec: int, body: bytes) -> None:
    with pytest.raises(InvalidBatch, match="more than 10000 blocks"):
        decompression.unpack(codec, body)


WORST: dict[str, Callable[[int], tuple[int, bytes]]] = {
    "members of gzip": lambda n: (decompression.GZIP, gzip(b"") * n + b"x" * (100 * n)),
    "bytes of gzip": lambda n: (decompression.GZIP, gzip(TEXT * (n // 40))),
    "blocks of xerial": lambda n: (decompression.SNAPPY, xerial(bytes(n), block=1)),
    "blocks of zstd": lambda n: (
        decompression.ZSTD,
        stored_zstd(b"")[:6] + bytes(3) * (n - 1) + b"\1\0\0",
    ),
    "frames of zstd": lambda n: (decompression.ZSTD, stored_zstd(b"") * n),
    "blocks of lz4": lambda n: (
        decompression.LZ4,
        packed("lz4")(b"")[:7] + b"\1\0\0\x80x" * n + bytes(4),
    ),
}
"""By name: the codec and packed bytes that cost much, in a number of parts."""


PAIRS_MAX = 40


@pytest.mark.parametrize("name", WORST)
def test_four_times_the_bytes_take_about_four_times_the_cpu(name: str) -> None:
    """A quadratic loop takes sixteen times as much."""

    def cpu_s(codec: int, body: bytes) -> float:
        began_s = time.thread_time()
        with contextlib.suppress(InvalidBatch):
            decompression.unpack(codec, body)
        return time.thread_time() - began_s

    few, many = WORST[name](2_000), WORST[name](8_000)
    few_s = many_s = math.inf
    for _ in range(PAIRS_MAX):  # other work on the machine only adds to a measurement
        few_s, many_s = min(few_s, cpu_s(*few)), min(many_s, cpu_s(*many))
        if many_s < 8 * few_s:
            return
    pytest.fail(f"{many_s:.4f} s for four times what takes {few_s:.4f} s")


def test_a_forged_size_of_snappy_allocates_nothing() -> None:
    """9,999 blocks that claim a size of 16 MiB each."""
    claim = b"\x80\x80\x80\x08\0"
    body = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + struct.pack(">i", len(claim)) + claim
    with pytest.raises(InvalidBatch, match="cannot have 16777216"):
        decompression.unpack(decompression.SNAPPY, body)


def test_runs_of_zstd_are_refused_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = struct.pack("<I", (128 << 10) << 3 | 2)[:3] + b"\0"
    body = stored_zstd(b"")[:6] + run * 130 + b"\1\0\0"
    monkeypatch.delattr(decompression, "_stream")
    with pytest.raises(decompression.TooMuch):
        decompression.unpack(decompression.ZSTD, body)


@pytest.mark.parametrize("framing", [name for name in FRAMINGS if name != "none"])
def test_bytes_that_do_not_unpack_leave_no_memory(framing: str) -> None:
    """Python's memory: that of pyarrow's streams is not always freed after an error."""
    codec, pack = FRAMINGS[framing]
    whole = pack(TEXT)
    damaged = whole[:30] + b"\xff" * 20 + whole[50:]
    refuses(codec, damaged)
    tracemalloc.start()
    try:
        old_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            refuses(codec, damaged)
        grown = tracemalloc.get_traced_memory()[0] - old_bytes
    finally:
        tracemalloc.stop()
    assert grown < decompression._STEP


@given(st.sampled_from(sorted(FRAMINGS)), st.data())
@examples(400)
def test_damaged_bytes_unpack_or_are_refused(framing: str, data: st.DataObject) -> None:
    codec, pack = FRAMINGS[framing]
    body = bytearray(pack(TEXT[:300]))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidBatch):
        assert len(decompression.unpack(codec, bytes(body))) <= decompression.UNPACKED_MIN


@pytest.mark.parametrize("seed", range(30))
def test_members_of_gzip_of_any_size_are_unpacked_in_steps(seed: int) -> None:
    """A member ends anywhere in a step, and its last bytes come with and without packed bytes."""
    draw = random.Random(seed)
    size = draw.choice((0, 1, 65_536, 1 << 20, (1 << 20) + 1, 3 << 20))
    raw = draw.choice((bytes, draw.randbytes))(size) + draw.randbytes(100_000)
    cuts = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(3)))
    members = [gzip(raw[start:end]) for start, end in pairwise([0, *cuts, len(raw)])]
    whole = b"".join(members)
    assert decompression.unpack(decompression.GZIP, whole) == raw
    for damaged in (whole[:-1], whole[:-9], whole + b"x"):
        refuses(decompression.GZIP, damaged)
