"""JSON numbers beyond the range of a double, which most readers refuse.

`1e999999` and a number of 5,000 digits are valid JSON. orjson refuses both, and Python's json
refuses the second. One record with such a number would stop every reader of its page.
`check_numbers` costs 0.2 us for a small text and 0.1 ns a byte for a large one, because a search
comes before a real parser. The search finds an exponent of three or more digits, or hundreds of
digits, because each number beyond the range has one of these. Pure.
"""

import re
from math import isinf

import numpy as np
import orjson

SMALL = 2048
"""Up to SMALL bytes, a regular expression is the fastest search."""
DIGITS_MIN = 200
"""A number with an exponent below 100 and fewer digits before its point fits a double."""
SAMPLE = 24
DIGITS_SAMPLED = b"0" * (DIGITS_MIN // SAMPLE)
"""Every 24th byte of 200 digits, with 0 for each digit: at least eight in a row."""

_LIKE_EXPONENT = re.compile(rb"[0-9][eE]\+?[0-9]{3}")
_EXPONENT = re.compile(rb"(?:[\s,:\[]|\A)-?[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{3}")
"""A number with a large exponent, where JSON allows a number. `3e812` in a UUID does not match."""
_NUMBER = re.compile(rb"(?:[\s,:\[]|\A)-?([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)(?=[\s,\]}]|\Z)")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_NUMBER_CHARS = b"0123456789.-"


class NumberTooLarge(ValueError):
    """A number of a JSON text is beyond the range of a double."""

    def __init__(self) -> None:
        super().__init__("a number is beyond the range of a double, which JSON's readers refuse")


def check_numbers(text: bytes) -> None:
    """Raise NumberTooLarge for a JSON text with a number beyond the range of a double. In several
    texts, one after the other, only a number of the first text is sure to be found."""
    if _may_overflow(text) and _overflows(text):
        raise NumberTooLarge


def _may_overflow(text: bytes) -> bool:
    """Return whether the text has the digits or exponent of such a number, if only in a string."""
    if len(text) >= DIGITS_MIN and DIGITS_SAMPLED in text[::SAMPLE].translate(_ZEROS):
        return True
    if len(text) <= SMALL:
        return _LIKE_EXPONENT.search(text) is not None and _EXPONENT.search(text) is not None
    return any(_is_number(text, at) for at in _exponents(text))


def _exponents(text: bytes) -> list[int]:
    """Return the positions of each `e` with a digit before it and digits 2 and 3 bytes after it."""
    octets = np.frombuffer(text, np.uint8)
    is_digit = octets - ord("0") < 10
    is_exponent = (octets[1:-3] | 0x20) == ord("e")
    is_exponent &= is_digit[:-4]
    is_exponent &= is_digit[3:-1]
    is_exponent &= is_digit[4:]
    found: list[int] = (np.flatnonzero(is_exponent) + 1).tolist()
    return found


def _is_number(text: bytes, at: int) -> bool:
    """Return whether the `e` at this position may begin the exponent of a JSON number."""
    start = at
    while start and text[start - 1] in _NUMBER_CHARS and at - start < DIGITS_MIN:
        start -= 1
    return at - start == DIGITS_MIN or _EXPONENT.match(text, max(start - 1, 0)) is not None


def _overflows(text: bytes) -> bool:
    """Return whether a number overflows. A string may look like a number, so a parser decides."""
    if not any(isinf(float(found[1])) for found in _NUMBER.finditer(text)):
        return False
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return "infinity" in str(error)
    return False
