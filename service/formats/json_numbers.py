"""JSON numbers beyond the range of a double, which most readers refuse.

`1e999999` and a number of 5,000 digits are valid JSON. orjson refuses both, and Python's json
refuses the second. One record with such a number would stop every reader of its page.
`check_numbers` costs 0.2 us for a small text and 0.2 ns a byte for a large text, because a real
parser runs only if a search finds something. The search looks for a number with an exponent of
three or more digits, and for 200 digits in a row. Each number beyond the range has one of these.
Pure.
"""

import re
from collections.abc import Sequence
from math import isinf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

Octets: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]

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
POSITIONS_AT_ONCE = 4096

_EXPONENT = re.compile(rb"(?:[\s,:\[]|\A)-?[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{3}")
"""A number with a large exponent, where JSON allows a number. `3e812` in a UUID does not match."""
_NUMBER = re.compile(rb"(?:[\s,:\[]|\A)-?([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)(?=[\s,\]}]|\Z)")
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_OTHER, _IN_NUMBER, _BEFORE_NUMBER = range(3)
_KINDS = np.full(256, _OTHER, np.uint8)
_KINDS[list(b"0123456789.-")] = _IN_NUMBER
_KINDS[list(b" \t\r\n,:[")] = _BEFORE_NUMBER
_BACKWARDS = np.arange(1, MANTISSA_MAX + 2)


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
    if len(text) <= SMALL:
        alike = text.translate(_ALIKE)
        if len(text) >= DIGITS_MIN and DIGITS in alike:
            return True
        return b"0e" in alike and _EXPONENT.search(text) is not None
    octets = np.frombuffer(text, np.uint8)
    like_digits = (octets & 0xF0) == 0x30  # also true for `:` to `?`, but a fast test
    if DIGITS_PACKED in np.packbits(like_digits).tobytes():
        return True
    exponents = (octets[1:] | 0x20) == ord("e")
    exponents &= like_digits[:-1]
    if not exponents.any():
        return False
    positions = np.flatnonzero(exponents[:-3]) + 1
    return any(
        _has_large_exponent(octets, positions[start : start + POSITIONS_AT_ONCE])
        for start in range(0, len(positions), POSITIONS_AT_ONCE)
    )


def _has_large_exponent(octets: Octets, positions: Positions) -> bool:
    """Return whether `e` at one of these positions begins a large exponent of a number. The number
    must stand where JSON allows a number, so hexadecimal digits in a string do not count."""
    are_digits = [octets[positions + distance] - ord("0") < 10 for distance in (-1, 1, 2, 3)]
    fourth = octets[np.minimum(positions + 4, len(octets) - 1)]
    is_signed = (octets[positions + 1] == ord("+")) & (fourth - ord("0") < 10)
    is_large = are_digits[0] & (are_digits[1] | is_signed) & are_digits[2] & are_digits[3]
    before = positions[is_large][:, None] - _BACKWARDS
    kinds = _KINDS[octets[np.maximum(before, 0)]]
    kinds[before < 0] = _BEFORE_NUMBER
    first_other = (kinds != _IN_NUMBER).argmax(axis=1)
    return bool((kinds[np.arange(len(kinds)), first_other] != _OTHER).any())


def _overflows(text: bytes) -> bool:
    """Return whether a number overflows. If the text seems to have such a number, a parser
    decides."""
    if not any(isinf(float(found[1])) for found in _NUMBER.finditer(text)):
        return False
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return "infinity" in str(error)
    return False
