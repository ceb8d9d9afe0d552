"""Unpack the records of a batch: gzip, snappy, lz4 and zstd, with a bound of the memory. Pure.

A client may send few bytes that unpack to gigabytes. Each codec here stops at the bound. A size in
the packed bytes is compared with the bound before memory of this size is allocated. Every error is
InvalidBatch. A broker serves a compressed batch as it came, so this module is as strict as the
clients that read the batch. For example, Java's consumer reads only the first frame of lz4.
"""

import zlib
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa

from tidelog.storage.kafka.layout import InvalidBatch

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
NAMES = ("none", "gzip", "snappy", "lz4", "zstd")

RATIO_MAX = 64
UNPACKED_MIN = 16 << 20
UNPACKED_MAX = 256 << 20
"""The bound of unpacked bytes is RATIO_MAX times the packed bytes, but at least UNPACKED_MIN and at
most UNPACKED_MAX. Records of equal bytes have a ratio of 1,000 and more, but a client's batch has
at most 1 MiB of unpacked bytes by default, so UNPACKED_MIN is enough."""
WINDOW_MAX = 8 << 20
"""The largest window of zstd in bytes: RFC 8878 recommends that each decoder supports it. Levels up
to 19 need no more."""
BLOCKS_MAX = 10_000
"""Bound of the blocks or members in a batch: an empty block costs CPU time, but has only 3 bytes.
Clients make blocks of 32 KiB and more."""

_STEP = 64 << 10
_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER = 16
_LZ4_MAGIC, _ZSTD_MAGIC = b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"
_SNAPPY: Any = pa.Codec("snappy")


def unpack(codec: int, packed: bytes) -> bytes:
    """Return the unpacked bytes; raises InvalidBatch if they exceed the bound or do not unpack.

    While the bytes are collected, this takes at most twice the bound.
    """
    bound = min(max(RATIO_MAX * len(packed), UNPACKED_MIN), UNPACKED_MAX)
    try:
        return _UNPACK[codec](packed, bound)
    except (pa.ArrowInvalid, OSError, zlib.error, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InvalidBatch(f"records do not unpack with {NAMES[codec]}: {reason}") from error


def _plain(packed: bytes, bound: int) -> bytes:
    return packed


def _gzip(packed: bytes, bound: int) -> bytes:
    pieces, size = [], 0
    while packed:  # a member each round
        member = zlib.decompressobj(wbits=31)
        piece = member.decompress(packed, bound + 1 - size)
        pieces.append(piece)
        size += len(piece)
        _check_bound(size, bound)
        _check_blocks(len(pieces))
        if not member.eof:
            raise zlib.error("the last member is cut off")
        packed = member.unused_data
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _snappy(packed: bytes, bound: int) -> bytes:
    """Unpack one raw block, or the blocks of the xerial framing, which Java writes."""
    if not packed.startswith(_XERIAL):
        return _snappy_block(packed, bound)
    pieces, at, size = [], _XERIAL_HEADER, 0
    while at < len(packed):
        block = int.from_bytes(packed[at : at + 4])
        at += 4
        if not 0 < block <= len(packed) - at:
            raise OSError(f"a block of {block} bytes does not fit")
        pieces.append(_snappy_block(packed[at : at + block], bound - size))
        _check_blocks(len(pieces))
        size += len(pieces[-1])
        at += block
    if not pieces:
        raise OSError("there is no block")
    return b"".join(pieces)


def _snappy_block(block: bytes, bound: int) -> bytes:
    size = shift = at = 0
    while True:  # the unpacked size, an unsigned varint
        size |= (block[at] & 127) << shift
        if block[at] < 128:
            break
        at, shift = at + 1, shift + 7
        if shift > 28:
            raise OSError("a block has no size")
    _check_bound(size, bound)
    unpacked: bytes = _SNAPPY.decompress(block, decompressed_size=size, asbytes=True)
    return unpacked


def _lz4(packed: bytes, bound: int) -> bytes:
    _check_lz4_frame(packed)
    return _stream(packed, "lz4", bound)


def _check_lz4_frame(packed: bytes) -> None:
    """Check that the bytes are one whole frame, so that a client that reads one frame gets all
    records."""
    if packed[:4] != _LZ4_MAGIC:
        raise OSError("there is no frame")
    flags = packed[4]
    if flags & 1:
        raise OSError("a dictionary is needed")
    block_checksum, content_checksum = flags >> 4 & 1, flags >> 2 & 1
    at = 15 if flags & 8 else 7  # behind the content's size
    blocks = 0
    while size := int.from_bytes(packed[at : at + 4], "little") & 0x7FFF_FFFF:
        at += 4 + size + 4 * block_checksum
        blocks += 1
        _check_blocks(blocks)
    if at + 4 + 4 * content_checksum != len(packed):
        raise OSError("the bytes are not one whole frame")


def _zstd(packed: bytes, bound: int) -> bytes:
    at = blocks = 0
    while at < len(packed):
        at, checksum_size = _zstd_frame(packed, at, bound)
        last = 0
        while not last:
            header = int.from_bytes(packed[at : at + 3], "little")
            last = header & 1 if at + 3 <= len(packed) else 1
            at += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)  # a run has one byte
            blocks += 1
            _check_blocks(blocks)
        at += checksum_size
    return _stream(packed, "zstd", bound)


def _zstd_frame(packed: bytes, at: int, bound: int) -> tuple[int, int]:
    """Check the window of the frame at `at` (RFC 8878, 3.1.1). Return where its blocks begin, and
    the bytes of the checksum behind them."""
    if packed[at : at + 4] != _ZSTD_MAGIC:
        raise OSError("there is no frame")
    descriptor = packed[at + 4]
    single_segment, dictionary = descriptor >> 5 & 1, descriptor & 3
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    if dictionary:
        raise OSError("a dictionary is needed")
    at += 5
    if single_segment:  # the window is the whole content
        _check_bound(int.from_bytes(packed[at : at + size_bytes], "little"), bound)
    else:
        exponent, mantissa = packed[at] >> 3, packed[at] & 7
        window = (8 + mantissa) << (7 + exponent)
        if window > WINDOW_MAX:
            raise OSError(
                f"its window of {window} bytes is over {WINDOW_MAX}: use a level up to 19"
            )
        at += 1
    return at + size_bytes, descriptor & 4


def _stream(packed: bytes, name: Literal["lz4", "zstd"], bound: int) -> bytes:
    """Unpack in steps. Arrow's `Codec.decompress` does this in one call, but needs the exact size.
    Its buffer has the given size, and the bytes behind the content are memory that was not
    written."""
    stream = pa.CompressedInputStream(pa.BufferReader(packed), name)
    pieces, size, step = [], 0, max(_STEP, 8 * len(packed))
    while piece := stream.read(min(step, bound + 1 - size)):
        pieces.append(piece)
        size += len(piece)
        _check_bound(size, bound)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_bound(size: int, bound: int) -> None:
    if size > bound:
        raise InvalidBatch(
            f"records unpack to more than {bound} bytes: send smaller or less compressed batches"
        )


def _check_blocks(blocks: int) -> None:
    if blocks > BLOCKS_MAX:
        raise InvalidBatch(f"records are in more than {BLOCKS_MAX} blocks: use larger blocks")


_UNPACK: tuple[Callable[[bytes, int], bytes], ...] = (_plain, _gzip, _snappy, _lz4, _zstd)
