"""Unpacking of the records of a batch, or a body of HTTP, with a bound of the memory. Pure.

The codecs are gzip, snappy, lz4 and zstd.

A client may send few bytes that unpack to gigabytes. Each codec here stops at the bound. A size in
the packed bytes is compared with the bound, and with the most that its format can unpack, before
memory of this size is allocated. All codecs are linear in the packed and the unpacked bytes. Every
error is InvalidBatch. A broker serves a compressed batch as it came, so this module is as strict as
the clients that read the batch. For example, Java's consumer reads only the first frame of lz4.
"""

import io
import zlib
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa

from tidelog.storage.codec.batch_header import InvalidBatch

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
SNAPPY_RATIO_MAX = 22
"""The most bytes that snappy unpacks from one: an element of 3 bytes copies at most 64."""

_STEP = 64 << 10
_STEP_MAX = 1 << 20
_MEMBER_STEP = 4 << 10
"""The packed bytes that a member of gzip is first given. zlib copies those behind the member's end,
so with all bytes, many small members would take time that is quadratic in their number."""
_XERIAL = b"\x82SNAPPY\0"
_XERIAL_HEADER = 16
_LZ4_MAGIC, _ZSTD_MAGIC = b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"
_ZSTD_RUN = 1
_SNAPPY: Any = pa.Codec("snappy")


def bound_of(packed_size: int, bytes_max: int = UNPACKED_MAX) -> int:
    """Return the most bytes that `unpack` makes of so many packed bytes."""
    return min(max(RATIO_MAX * packed_size, UNPACKED_MIN), UNPACKED_MAX, bytes_max)


def unpack(codec: int, packed: bytes | memoryview, bytes_max: int = UNPACKED_MAX) -> bytes:
    """Return the unpacked bytes.

    Raises InvalidBatch if they do not unpack, and TooMuch if they exceed `bytes_max` or the bound
    of the packed bytes.

    This takes at most a little more than the unpacked bytes.
    """
    bound = bound_of(len(packed), bytes_max)
    try:
        return _UNPACK[codec](bytes(packed), bound)
    except (pa.ArrowInvalid, OSError, zlib.error, IndexError) as error:
        reason = " ".join(str(error).split())
        why = f"records do not unpack with {NAMES[codec]}: {reason}"
    raise InvalidBatch(why)


class TooMuch(InvalidBatch):
    """Records unpack to more bytes than the caller allows."""

    def __init__(self, bound: int) -> None:
        super().__init__(
            f"records unpack to more than {bound} bytes: send smaller or less compressed batches"
        )
        self.bound = bound


class _Pieces:
    """The unpacked bytes of a batch, piece by piece, within a bound.

    Memory that grows step by step would leave freed blocks of all sizes behind, which malloc keeps.
    So it has the expected size, if one is known, from the second piece on.
    """

    __slots__ = ("_bound", "_content", "_count", "_expected", "_first", "_size")

    def __init__(self, bound: int, expected: int) -> None:
        self._bound = bound
        self._expected = min(expected, bound)
        self._first = b""
        self._content: io.BytesIO | None = None
        self._size = 0
        self._count = 0

    @property
    def left(self) -> int:
        return self._bound - self._size

    def add(self, piece: bytes) -> None:
        """Take a piece. Raises TooMuch."""
        if len(piece) > self.left:
            raise TooMuch(self._bound)
        if not self._size:
            self._first = piece
        else:
            self._behind_first().write(piece)
        self._size += len(piece)

    def _behind_first(self) -> io.BytesIO:
        if self._content is None:
            self._content = io.BytesIO()
            if self._expected > self._size:
                self._content.seek(self._expected - 1)
                self._content.write(b"\0")
                self._content.seek(0)
            self._content.write(self._first)
            self._first = b""
        return self._content

    def end_block(self) -> None:
        """Count a block or a member, also if it is empty. Raises InvalidBatch."""
        self._count += 1
        _check_blocks(self._count)

    def joined(self) -> bytes:
        """Return all bytes, without another copy of them."""
        if self._content is None:
            return self._first
        self._content.truncate(self._size)
        return self._content.getvalue()


def _plain(packed: bytes, bound: int) -> bytes:
    return packed


def _gzip(packed: bytes, bound: int) -> bytes:
    if len(packed) <= _STEP:
        member = zlib.decompressobj(wbits=31)
        unpacked = member.decompress(packed, bound + 1)
        if len(unpacked) > bound:
            raise TooMuch(bound)
        if member.eof and not member.unused_data:
            return unpacked  # the usual form
        del unpacked
    pieces, position = _Pieces(bound, int.from_bytes(packed[-4:], "little")), 0
    while position < len(packed):  # a member each round
        member = zlib.decompressobj(wbits=31)
        step, is_full = _MEMBER_STEP, False
        while not member.eof:
            part = packed[position : position + step]
            if not part and not is_full:
                raise zlib.error("the last member is cut off")
            most = min(pieces.left + 1, _STEP_MAX)
            piece = member.decompress(part, most)
            is_full = len(piece) == most  # there may be more without more packed bytes
            pieces.add(piece)
            position += len(part) - len(member.unused_data or member.unconsumed_tail)
            step = min(4 * step, _STEP_MAX)
        pieces.end_block()
    return pieces.joined()


def _snappy(packed: bytes, bound: int) -> bytes:
    """Unpack one raw block, or the blocks of the xerial framing, which Java writes."""
    if not packed.startswith(_XERIAL):
        return _snappy_block(packed, bound)
    pieces, position = _Pieces(bound, 0), _XERIAL_HEADER
    while position < len(packed):
        block = int.from_bytes(packed[position : position + 4])
        position += 4
        if not 0 < block <= len(packed) - position:
            raise OSError(f"a block of {block} bytes does not fit")
        pieces.add(_snappy_block(packed[position : position + block], pieces.left))
        pieces.end_block()
        position += block
    if position <= _XERIAL_HEADER:
        raise OSError("there is no block")
    return pieces.joined()


def _snappy_block(block: bytes, bound: int) -> bytes:
    size = shift = position = 0
    while True:  # the unpacked size, an unsigned varint
        size |= (block[position] & 127) << shift
        if block[position] < 128:
            break
        position, shift = position + 1, shift + 7
        if shift > 28:
            raise OSError("a block has no size")
    if size > bound:
        raise TooMuch(bound)
    if size > SNAPPY_RATIO_MAX * len(block):
        raise OSError(f"a block of {len(block)} bytes cannot have {size}")
    unpacked: bytes = _SNAPPY.decompress(block, decompressed_size=size, asbytes=True)
    return unpacked


def _lz4(packed: bytes, bound: int) -> bytes:
    _check_lz4_frame(packed, bound)
    return _stream(packed, "lz4", bound, 0)


def _check_lz4_frame(packed: bytes, bound: int) -> None:
    """Check that the bytes are one whole frame: some clients read only the first."""
    if packed[:4] != _LZ4_MAGIC:
        raise OSError("there is no frame")
    flags = packed[4]
    if flags & 1:
        raise OSError("a dictionary is needed")
    block_checksum, content_checksum = flags >> 4 & 1, flags >> 2 & 1
    position = 7
    if flags & 8:
        position = 15
        if int.from_bytes(packed[6:14], "little") > bound:
            raise TooMuch(bound)
    blocks = 0
    while size := int.from_bytes(packed[position : position + 4], "little") & 0x7FFF_FFFF:
        position += 4 + size + 4 * block_checksum
        blocks += 1
        _check_blocks(blocks)
    if position + 4 + 4 * content_checksum != len(packed):
        raise OSError("the bytes are not one whole frame")


def _zstd(packed: bytes, bound: int) -> bytes:
    position = blocks = size = 0
    while position < len(packed):
        position, checksum_size, content_size = _zstd_frame(packed, position, bound)
        last = run_size = 0
        while not last:
            header = int.from_bytes(packed[position : position + 3], "little")
            last = header & 1 if position + 3 <= len(packed) else 1
            kind, block_size = header >> 1 & 3, header >> 3
            if kind <= _ZSTD_RUN:  # the size of a block of another kind is not known
                run_size += block_size
            position += 3 + (1 if kind == _ZSTD_RUN else block_size)  # a run has one byte
            blocks += 1
            _check_blocks(blocks)
        position += checksum_size
        size += max(content_size, run_size)
        if size > bound:
            raise TooMuch(bound)
    return _stream(packed, "zstd", bound, size)


def _zstd_frame(packed: bytes, position: int, bound: int) -> tuple[int, int, int]:
    """Check the window of the frame at `position` (RFC 8878, 3.1.1).

    Return where its blocks begin, the bytes of the checksum behind them, and those of the content,
    or 0 if this is not known.
    """
    if packed[position : position + 4] != _ZSTD_MAGIC:
        raise OSError("there is no frame")
    descriptor = packed[position + 4]
    single_segment, dictionary = descriptor >> 5 & 1, descriptor & 3
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    if dictionary:
        raise OSError("a dictionary is needed")
    position += 5
    if not single_segment:  # else the window is the whole content
        exponent, mantissa = packed[position] >> 3, packed[position] & 7
        window = (8 + mantissa) << (7 + exponent)
        if window > WINDOW_MAX:
            raise OSError(
                f"its window of {window} bytes is over {WINDOW_MAX}: use a level up to 19"
            )
        position += 1
    content_size = int.from_bytes(packed[position : position + size_bytes], "little")
    if content_size > bound:
        raise TooMuch(bound)
    return position + size_bytes, descriptor & 4, content_size


def _stream(packed: bytes, name: Literal["lz4", "zstd"], bound: int, expected: int) -> bytes:
    """Unpack in steps: Arrow's `Codec.decompress` needs the exact size.

    Its buffer has the given size, and the bytes behind the content are memory that was not written.
    `read` of the stream never frees its bytes if it raises (pyarrow 26).
    """
    stream = pa.CompressedInputStream(pa.BufferReader(packed), name)
    step = min(max(_STEP, 8 * len(packed)), _STEP_MAX)
    pieces = _Pieces(bound, expected)
    while piece := stream.read_buffer(min(step, pieces.left + 1)).to_pybytes():
        pieces.add(piece)
    return pieces.joined()


def _check_blocks(blocks: int) -> None:
    if blocks > BLOCKS_MAX:
        raise InvalidBatch(f"records are in more than {BLOCKS_MAX} blocks: use larger blocks")


_UNPACK: tuple[Callable[[bytes, int], bytes], ...] = (_plain, _gzip, _snappy, _lz4, _zstd)
