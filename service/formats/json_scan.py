"""A large JSON text in blocks, without the contents of its strings.

A step takes ~1 ms, whatever the text is, and makes no Python object for a place in the text. So a
text of any size holds neither the interpreter's lock nor much memory. The text is valid JSON, or
several such texts with white space between them. Pure.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK = 256 * 1024
"""Bytes of a block."""

FEW_OBJECTS = 100_000
FEW_BYTES = 1 << 20
"""The objects of a text with at most so many braces or bytes may be built before they are counted:
they take ~20 MB."""

Octets = npt.NDArray[np.uint8]

_ESCAPED = (rb"\\", rb"\"")
_OPENING, _CLOSING, _IS_BRACE = ord("{"), ord("}"), ord("{") ^ ord("[")


class Block(NamedTuple):
    """The bytes of a text from a position to `end`.

    In `outside`, the bytes of strings are zero, except for their closing quotes. `is_inside` means
    that a string goes on after the block.
    """

    outside: Octets
    end: int
    is_inside: bool


def block_of(text: bytes, start: int, is_inside: bool) -> Block:
    """Return the block at this position, which is inside of a string or not.

    A block does not end in the middle of an escape, so it may be a byte shorter than BLOCK.
    """
    piece = text[start : start + BLOCK]
    if b"\\" in piece:
        for escaped in _ESCAPED:
            piece = piece.replace(escaped, b"  ")
        if piece.endswith(b"\\") and len(piece) > 1:
            piece = piece[:-1]
    octets = np.frombuffer(piece, np.uint8)
    in_string = _parities(octets == ord('"'), is_inside)
    return Block(octets * (in_string ^ 1), start + len(piece), bool(in_string[-1]))


def _parities(bits: npt.NDArray[np.bool_], is_odd: bool) -> Octets:
    """Return for each bit whether it and the bits before it have an odd sum (0 or 1).

    `is_odd` is the sum of the bits of the blocks before.
    """
    packed = np.zeros(-(-len(bits) // 64) * 8, np.uint8)
    packed[: -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
    words = packed.view("<u8")
    for shift in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(shift)
    odd = np.logical_xor.accumulate(np.concatenate(([is_odd], words[:-1] >> np.uint64(63))))
    words[odd] ^= np.uint64(0xFFFFFFFFFFFFFFFF)
    return np.unpackbits(packed, count=len(bits), bitorder="little")


def has_many_objects(text: bytes) -> bool:
    """Whether the text may have more than FEW_OBJECTS objects, whose memory would be large."""
    if len(text) <= FEW_BYTES:
        return False
    octets, braces = np.frombuffer(text, np.uint8), 0
    for start in range(0, len(text), BLOCK):
        braces += int(np.count_nonzero(octets[start : start + BLOCK] == _OPENING))
    return braces > FEW_OBJECTS


def excess_objects(text: bytes, depth: int, most: int) -> int:
    """Return the number of JSON objects at `depth` if it is over `most`, else 0.

    `depth` counts arrays and objects: in `{"a": [{}, {}]}` there are two at depth 2. This takes ~5
    ns a byte. A text without many objects is not counted.
    """
    if not has_many_objects(text):
        return 0
    (count,) = objects_at(text, (depth,))
    return count if count > most else 0


def objects_at(text: bytes, depths: Iterable[int]) -> list[int]:
    """Return the number of JSON objects at each of these depths (`excess_objects`)."""
    counts = dict.fromkeys(depths, 0)
    level, position, is_inside = 0, 0, False
    while position < len(text):
        outside, position, is_inside = block_of(text, position, is_inside)
        lower = outside | _IS_BRACE  # brackets become braces
        is_opening = lower == _OPENING
        places = np.flatnonzero(is_opening | (lower == _CLOSING))
        if places.size:
            levels = level + np.cumsum(np.where(is_opening[places], 1, -1))  # behind each bracket
            is_object = outside[places] == _OPENING
            for depth in counts:
                counts[depth] += int(np.count_nonzero(is_object & (levels == depth + 1)))
            level = int(levels[-1])
    return list(counts.values())
