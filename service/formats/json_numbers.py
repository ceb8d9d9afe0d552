"""JSON numbers beyond the range of a double, which most readers refuse.

`1e999999` and a number of 5,000 digits are valid JSON. orjson refuses both, and Python's json
refuses the second. One record with such a number would stop every reader of its page.
`check_numbers` costs 0.2 us for a small text and 0.2 ns a byte for a large text, because each
number is parsed only if a search finds something. The search looks for a number with an exponent of
three or more digits, and for 200 digits in a row. Each number beyond the range has one of these.
The search and the parser go block by block. Pure.
"""

import re
from collections.abc import Sequence
from math import isinf

import numpy as np

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

BLOCK = 1 << 20
OVERLAP = 256
"""A large text is searched in blocks. Each begins with these last bytes of the block before it."""

_LARGE = re.compile(
    rb"""
    (?<![0-9.]) (?: [0-9]{200,}+ (?:\.[0-9]++)?+ (?:[eE][+-]?[0-9]++)?+
                  | [0-9]++ (?:\.[0-9]++)?+ [eE]\+?[0-9]{3,}+ )
    """,
    re.VERBOSE,
)
"""A number that may be beyond the range."""
_CUT = re.compile(rb"[^0-9.eE+\-\\]")
"""A byte behind which a text may be cut: neither of a number nor the first of an escape."""
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENT_ALIKE = re.compile(rb"0e[0+]00")
"""A large exponent, or its first digits, in a text that _ALIKE has translated."""
_IN_NUMBER = b"0123456789.-"
_BEFORE_NUMBER = b" \t\r\n,:["
_IS_MANTISSA = np.zeros(256, np.bool_)
_IS_MANTISSA[list(_IN_NUMBER + _BEFORE_NUMBER)] = True


class NumberTooLarge(ValueError):
    """A number of a JSON text is beyond the range of a double."""

    def __init__(self) -> None:
        super().__init__("a number is beyond the range of a double, which JSON's readers refuse")


def check_numbers(text: bytes) -> None:
    """Raise NumberTooLarge for a JSON text with a number beyond the range of a double."""
    if _may_overflow(text) and _overflows(text):
        raise NumberTooLarge


def check_all_numbers(texts: Sequence[bytes]) -> None:
    """Check each text as `check_numbers` does, but with one search in all texts first."""
    if _may_overflow(b"\n".join(texts)):
        for text in texts:
            check_numbers(text)


def _may_overflow(text: bytes) -> bool:
    """Return whether the text has the digits or the exponent of a number beyond the range. A string
    in the text may have them, too."""
    if len(text) > BLOCK + OVERLAP:
        blocks = (text[at : at + BLOCK + OVERLAP] for at in range(0, len(text), BLOCK))
        return any(_may_overflow(block) for block in blocks)
    if len(text) <= SMALL:
        alike = text.translate(_ALIKE)
        if len(text) >= DIGITS_MIN and DIGITS in alike:
            return True
        if b"0e" not in alike:
            return False
        places = [match.start() + 1 for match in _EXPONENT_ALIKE.finditer(alike)]
    else:
        octets = np.frombuffer(text, np.uint8)
        like_digits = (octets & 0xF0) == 0x30  # also true for `:` to `?`, but a fast test
        if DIGITS_PACKED in np.packbits(like_digits).tobytes():
            return True
        exponents = (octets[1:-3] | 0x20) == ord("e")
        for digits in (like_digits[:-4], like_digits[3:-1], like_digits[4:]):
            exponents &= digits
        found = np.flatnonzero(exponents) + 1
        # Hexadecimal digits have many such places, most of them after a letter.
        places = found[_IS_MANTISSA[octets[np.maximum(found - 2, 0)]]].tolist()
    return any(_is_large_exponent(text, at) for at in places)


def _is_large_exponent(text: bytes, at: int) -> bool:
    """Return whether the `e` at this place begins a large exponent of a number. The number must
    stand where JSON allows a number, so hexadecimal digits in a string do not count."""
    mantissa = text[max(at - MANTISSA_MAX - 1, 0) : at]
    before = mantissa.rstrip(_IN_NUMBER)
    if len(before) == len(mantissa) or (before and before[-1] not in _BEFORE_NUMBER):
        return False
    first = at + 2 if text[at + 1] == ord("+") else at + 1
    digits = text[first : first + 3]
    return len(digits) == 3 and digits.isdigit()


def _overflows(text: bytes) -> bool:
    """Return whether a number outside the strings of a JSON text overflows. A search of the whole
    text would hold the interpreter's lock for seconds, so blocks are searched."""
    at, is_inside = 0, False
    while at < len(text):
        cut = _CUT.search(text, at + BLOCK)
        end = len(text) if cut is None else cut.end()
        block = text[at:end].replace(rb"\\", b"").replace(rb"\"", b"")
        parts = block.split(b'"')
        outside = b'"'.join(parts[is_inside::2])
        if any(isinf(float(number[0])) for number in _LARGE.finditer(outside)):
            return True
        is_inside ^= len(parts) % 2 == 0
        at = end
    return False
