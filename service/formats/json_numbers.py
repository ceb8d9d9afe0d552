"""JSON numbers beyond the range of a double, which most readers refuse.

`1e999999` and a number of 5,000 digits are valid JSON. orjson refuses both, and Python's json
refuses the second. One record with such a number would stop every reader of its page.
`check_numbers` costs 0.2 us for a small text and 0.2 ns a byte for a large text, because numbers
are parsed only if a search finds something. The search looks for a number with an exponent of three
or more digits, and for 200 digits in a row. Each number beyond the range has one of these. If it
finds one, the text is searched again without its strings (json_scan), and Arrow parses the
numbers of each block in which the search finds one again. All of it takes at most ~20 ns a byte.
Pure.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.service.formats import json_scan
from tidelog.service.formats.json_scan import Octets, block_of

SMALL = 2048
"""Up to SMALL bytes, methods of `bytes` are faster than numpy."""
DIGITS_MIN = 200
"""A number with an exponent below 100 and fewer than DIGITS_MIN digits before its point fits a
double."""
DIGITS = b"0" * DIGITS_MIN
DIGITS_PACKED = b"\xff" * (DIGITS_MIN // 8 - 1)
"""If a text is packed to one bit for each byte (1 for a digit), DIGITS_MIN digits in a row contain
these bytes."""
MANTISSA_MAX = 24
"""The search reads about this number of bytes before an exponent. If all of them are digits, `.` or
`-`, they count as a number."""
FEW = 64
"""Up to this number of places are searched one by one."""

BLOCK = 1 << 20
OVERLAP = 256
"""A large text is searched in blocks. Each ends with these first bytes of the block behind it."""

_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENT_ALIKE = re.compile(rb"0e[0+]00")
"""A large exponent, or its first digits, in a text that _ALIKE has translated."""
_IN_NUMBER = b"0123456789.-"
_BEFORE_NUMBER = b" \t\r\n,:["
_TAIL = b"0123456789.eE+-"


def _is_in(octets: bytes) -> npt.NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(octets)] = True
    return table


_IS_MANTISSA = _is_in(_IN_NUMBER + _BEFORE_NUMBER)
_IS_EXPONENT = _is_in(b"0123456789+")
_IS_NUMBER = _is_in(b"0123456789.+-")


class NumberTooLarge(ValueError):
    """A number of a JSON text is beyond the range of a double."""

    def __init__(self) -> None:
        super().__init__("a number is beyond the range of a double, which JSON's readers refuse")


def check_numbers(text: bytes) -> None:
    """Raise NumberTooLarge for a JSON text with a number beyond the range of a double.

    The text may also be several JSON texts with white space between them.
    """
    if _may_overflow(text) and _overflows(text):
        raise NumberTooLarge


def _may_overflow(text: bytes) -> bool:
    """Return whether the text has the digits or the exponent of a number beyond the range.

    A string in the text may have them, too.
    """
    if len(text) <= SMALL:
        alike = text.translate(_ALIKE)
        if len(text) >= DIGITS_MIN and DIGITS in alike:
            return True
        if b"0e" not in alike:
            return False
        places = [match.start() + 1 for match in _EXPONENT_ALIKE.finditer(alike)]
        return len(places) > FEW or any(_is_large_exponent(text, place) for place in places)
    return any(
        _may_block_overflow(text[start : start + BLOCK + OVERLAP])
        for start in range(0, len(text), BLOCK)
    )


def _may_block_overflow(text: bytes) -> bool:
    octets = np.frombuffer(text, np.uint8)
    if octets.size < 5:
        return False
    like_digits = (octets & 0xF0) == 0x30  # also true for `:` to `?`, but a fast test
    if DIGITS_PACKED in np.packbits(like_digits).tobytes():
        return True
    exponents = (octets[1:-3] | 0x20) == ord("e")
    for digits in (like_digits[:-4], like_digits[3:-1], like_digits[4:]):
        exponents &= digits
    places = np.flatnonzero(exponents) + 1
    if places.size:
        places = places[_IS_EXPONENT[octets[places + 1]]]
        # Hexadecimal digits have many such places, most of them after a letter.
        places = places[_IS_MANTISSA[octets[np.maximum(places - 2, 0)]]]
    return places.size > FEW or any(_is_large_exponent(text, place) for place in places.tolist())


def _is_large_exponent(text: bytes, position: int) -> bool:
    """Return whether the `e` at this place begins a large exponent of a number.

    The number must stand where JSON allows a number, so hexadecimal digits in a string do not
    count.
    """
    mantissa = text[max(position - MANTISSA_MAX - 1, 0) : position]
    prefix = mantissa.rstrip(_IN_NUMBER)
    if len(prefix) == len(mantissa) or (prefix and prefix[-1] not in _BEFORE_NUMBER):
        return False
    first = position + 2 if text[position + 1] == ord("+") else position + 1
    digits = text[first : first + 3]
    return len(digits) == 3 and digits.isdigit()


def _overflows(text: bytes) -> bool:
    """Return whether a number outside the strings of a JSON text overflows."""
    start, is_inside = 0, False
    while start < len(text):
        if not is_inside and (end := _end_of_number(text, start)) - start > json_scan.BLOCK // 2:
            if _has_infinite(np.frombuffer(text, np.uint8), np.array([start, end])):
                return True
            start = end
            continue
        block = block_of(text, start, is_inside)
        outside = block.outside
        if block.end < len(text) and not block.is_inside:  # the last number may go on
            tail = len(outside) - len(outside.tobytes().rstrip(_TAIL))
            block, outside = block._replace(end=block.end - tail), outside[: len(outside) - tail]
        if _may_block_overflow(outside.tobytes()) and _has_infinite(outside, _edges(outside)):
            return True
        start, is_inside = block.end, block.is_inside
    return False


def _end_of_number(text: bytes, position: int) -> int:
    """Return the end of the number at this position, or the position if there is none."""
    while piece := text[position : position + json_scan.BLOCK]:
        tail = piece.lstrip(_TAIL)
        position += len(piece) - len(tail)
        if tail:
            break
    return position


def _edges(outside: Octets) -> npt.NDArray[np.int64]:
    """Return the start of each number and its end, one after the other. The text has no strings."""
    padded = np.zeros(len(outside) + 2, np.bool_)
    is_number = padded[1:-1]
    is_number[:] = _IS_NUMBER[outside]
    is_exponent = (outside[1:] | 0x20) == ord("e")
    is_exponent &= is_number[:-1]  # not that of `true`
    is_number[1:] |= is_exponent
    return np.flatnonzero(padded[1:] != padded[:-1])


def _has_infinite(octets: Octets, edges: npt.NDArray[np.int64]) -> bool:
    """Return whether a number is infinite as a double. `edges` are the starts and the ends."""
    # Between two numbers is a text that is marked as null, so Arrow does not parse it.
    is_valid = np.full(len(edges) // 8 + 1, 0b01010101, np.uint8)
    buffers = [pa.py_buffer(data) for data in (is_valid.data, edges.data, octets.data)]
    numbers: Any = pa.Array.from_buffers(pa.large_string(), len(edges) - 1, [*buffers])
    doubles = np.frombuffer(memoryview(numbers.cast(pa.float64()).buffers()[1]))
    return bool(np.isinf(doubles[: len(edges) - 1 : 2]).any())
