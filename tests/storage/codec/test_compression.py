"""The codecs: every framing that clients use, no byte beyond the bound, one error."""

import contextlib
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
from tidelog.storage.codec import compression
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
    "none": (compression.NONE, bytes),
    "gzip": (compression.GZIP, gzip),
    "gzip in two members": (compression.GZIP, lambda raw: gzip(raw[:99]) + gzip(raw[99:])),
    "snappy": (compression.SNAPPY, packed("snappy")),
    "snappy in xerial's blocks": (compression.SNAPPY, xerial),
    "lz4": (compression.LZ4, packed("lz4")),
    "zstd": (compression.ZSTD, packed("zstd")),
    "zstd in two frames": (
        compression.ZSTD,
        lambda raw: packed("zstd")(raw[:99]) + packed("zstd")(raw[99:]),
    ),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("raw", [b"x", TEXT, bytes(3 << 20)], ids=["byte", "text", "zeros"])
def test_each_framing_unpacks(framing: str, raw: bytes) -> None:
    codec, pack = FRAMINGS[framing]
    assert compression.unpack(codec, pack(raw)) == raw


def test_streams_of_zstd_and_lz4_unpack() -> None:
    """A client that compresses a stream writes no size."""
    assert compression.unpack(compression.ZSTD, stored_zstd(b"stored")) == b"stored"
    for name in ("zstd", "lz4"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as stream:
            for start in range(0, len(TEXT), 1000):
                stream.write(TEXT[start : start + 1000])
        assert (
            compression.unpack(compression.NAMES.index(name), sink.getvalue().to_pybytes()) == TEXT
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
        (compression.LZ4, packed("lz4")(TEXT) * 2),  # Java's consumer reads the first frame
        (compression.ZSTD, stored_zstd(b"x", window=0x69)),  # 9 MiB
        (compression.ZSTD, stored_zstd(b"x", window=0xFF)),
        (compression.ZSTD, stored_zstd(b"x") + stored_zstd(b"y", window=0x80)),
        (compression.ZSTD, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60) + b"\x01\0\0"),
        (compression.ZSTD, b"\x50\x2a\x4d\x18\x00\x00\x00\x00"),  # a frame without content
        (compression.SNAPPY, b"\xff\xff\xff\xff\x0f"),
        (compression.SNAPPY, b"\xff\xff\xff\xff\xff\xff\x0f"),
        (compression.SNAPPY, b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, -1)),
    ],
)
def test_what_another_client_could_not_read_is_refused(codec: int, body: bytes) -> None:
    refuses(codec, body)


def refuses(codec: int, body: bytes) -> None:
    with pytest.raises(InvalidBatch) as raised:
        compression.unpack(codec, body)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("framing", [name for name in FRAMINGS if name != "none"])
def test_a_bomb_is_refused_within_its_bound(framing: str) -> None:
    codec, pack = FRAMINGS[framing]
    size = compression.UNPACKED_MIN + 1
    bomb = pack(bytes(size))
    if len(bomb) * compression.RATIO_MAX > size:  # snappy packs 1 : 21
        assert len(compression.unpack(codec, bomb)) == size
        return
    assert compression.unpack(codec, pack(bytes(size - 1))) == bytes(size - 1)
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
    assert peak < 2.1 * compression.UNPACKED_MIN
    assert (pool.max_memory() or 0) < 4 << 20


def test_the_bound_holds_over_all_blocks_and_members() -> None:
    zeros = bytes(1 << 20)
    with pytest.raises(InvalidBatch, match="unpack to more than 16777216 bytes"):
        compression.unpack(compression.GZIP, gzip(zeros) * 17)
    with pytest.raises(InvalidBatch, match="unpack to more than 16777216 bytes"):
        compression.unpack(compression.ZSTD, packed("zstd")(zeros) * 17)
    # A forged size in front of each block: it is compared with the bound, and then with the block.
    forged = struct.pack(">i", 5) + b"\x80\x80\x80\x08\0"
    refuses(compression.SNAPPY, b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + forged * 9)


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (compression.GZIP, gzip(b"") * 10_001),
        (compression.SNAPPY, xerial(bytes(10_001), block=1)),
        (compression.LZ4, packed("lz4")(b"")[:7] + b"\1\0\0\x80x" * 10_001 + bytes(4)),
        (compression.ZSTD, stored_zstd(b"")[:6] + bytes(3) * 10_000 + b"\1\0\0"),
        (compression.ZSTD, stored_zstd(b"") * 10_001),
    ],
)
def test_empty_blocks_are_bounded(codec: int, body: bytes) -> None:
    with pytest.raises(InvalidBatch, match="more than 10000 blocks"):
        compression.unpack(codec, body)


WORST: dict[str, Callable[[int], tuple[int, bytes]]] = {
    "members of gzip": lambda n: (compression.GZIP, gzip(b"") * n + b"x" * (100 * n)),
    "bytes of gzip": lambda n: (compression.GZIP, gzip(TEXT * (n // 40))),
    "blocks of xerial": lambda n: (compression.SNAPPY, xerial(bytes(n), block=1)),
    "blocks of zstd": lambda n: (
        compression.ZSTD,
        stored_zstd(b"")[:6] + bytes(3) * (n - 1) + b"\1\0\0",
    ),
    "frames of zstd": lambda n: (compression.ZSTD, stored_zstd(b"") * n),
    "blocks of lz4": lambda n: (
        compression.LZ4,
        packed("lz4")(b"")[:7] + b"\1\0\0\x80x" * n + bytes(4),
    ),
}
"""By name: the codec and packed bytes that cost much, in a number of parts."""


@pytest.mark.parametrize("name", WORST)
def test_four_times_the_bytes_take_about_four_times_the_cpu(name: str) -> None:
    """A quadratic loop takes sixteen times as much."""

    def cpu_s(parts: int) -> float:
        codec, body = WORST[name](parts)
        times = []
        for _ in range(5):
            began_s = time.thread_time()
            with contextlib.suppress(InvalidBatch):
                compression.unpack(codec, body)
            times.append(time.thread_time() - began_s)
        return min(times)

    assert cpu_s(8_000) < 8 * cpu_s(2_000)


def test_a_forged_size_of_snappy_allocates_nothing() -> None:
    """9,999 blocks that claim a size of 16 MiB each."""
    claim = b"\x80\x80\x80\x08\0"
    body = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + struct.pack(">i", len(claim)) + claim
    with pytest.raises(InvalidBatch, match="cannot have 16777216"):
        compression.unpack(compression.SNAPPY, body)


def test_runs_of_zstd_are_refused_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = struct.pack("<I", (128 << 10) << 3 | 2)[:3] + b"\0"
    body = stored_zstd(b"")[:6] + run * 130 + b"\1\0\0"
    monkeypatch.delattr(compression, "_stream")
    with pytest.raises(compression.TooMuch):
        compression.unpack(compression.ZSTD, body)


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
    assert grown < compression._STEP


@given(st.sampled_from(sorted(FRAMINGS)), st.data())
@examples(400)
def test_damaged_bytes_unpack_or_are_refused(framing: str, data: st.DataObject) -> None:
    codec, pack = FRAMINGS[framing]
    body = bytearray(pack(TEXT[:300]))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidBatch):
        assert len(compression.unpack(codec, bytes(body))) <= compression.UNPACKED_MIN


@pytest.mark.parametrize("seed", range(30))
def test_members_of_gzip_of_any_size_are_unpacked_in_steps(seed: int) -> None:
    """A member ends anywhere in a step, and its last bytes come with and without packed bytes."""
    draw = random.Random(seed)
    size = draw.choice((0, 1, 65_536, 1 << 20, (1 << 20) + 1, 3 << 20))
    raw = draw.choice((bytes, draw.randbytes))(size) + draw.randbytes(100_000)
    cuts = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(3)))
    members = [gzip(raw[start:end]) for start, end in pairwise([0, *cuts, len(raw)])]
    whole = b"".join(members)
    assert compression.unpack(compression.GZIP, whole) == raw
    for damaged in (whole[:-1], whole[:-9], whole + b"x"):
        refuses(compression.GZIP, damaged)
