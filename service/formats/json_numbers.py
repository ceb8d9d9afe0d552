"""Numbers of JSON that most readers refuse: those beyond the range of a double.

`1e999999` and a number of 5,000 digits are JSON, but orjson refuses them, and so does Python's json
the second. One such record would stop every reader of its page. `check_numbers` costs 0.2 us for a
small text and 0.1 ns a byte for a large one: a search for what such a number must contain, ten
digits of an exponent or hundreds of digits, comes before a real parser. Pure.
"""

import re
from math import isinf

import numpy as np
import orjson

SMALL = 2048
"""Up to so many bytes, a regular expression is the fastest search."""
DIGITS_MIN = 200
"""A number with an exponent below 100 and fewer digits before its point fits a double."""
SAMPLE = 24
DIGITS_SAMPLED = b"0" * (DIGITS_MIN // SAMPLE)
"""Every 24th byte of 200 digits: so many digits, one after the other."""

_LIKE_EXPONENT = re.compile(rb"[0-9][eE]\+?[0-9]{3}")
_EXPONENT = re.compile(rb"(?:[\s,:\[]|\A)-?[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{3}")
"""A number with a large exponent, where JSON has numbers: UUIDs have `3e812` in strings."""
_NUMBER = re.compile(rb"(?:[\s,:\[]|\A)-?([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)(?=[\s,\]}]|\Z)")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_NUMBER_CHARS = b"0123456789.-"


class NumberTooLarge(ValueError):
    """A number of a JSON text is beyond the range of a double."""

    def __init__(self) -> None:
        super().__init__("a number is beyond the range of a double, which JSON's readers refuse")


def check_numbers(text: bytes) -> None:
    """Raise NumberTooLarge for a JSON text, or several, one after the other, with such a number."""
    if _may_overflow(text) and _overflows(text):
        raise NumberTooLarge


def _may_overflow(text: bytes) -> bool:
    """Whether the text has what such a number must contain; strings may have it, too."""
    if len(text) >= DIGITS_MIN and DIGITS_SAMPLED in text[::SAMPLE].translate(_ZEROS):
        return True
    if len(text) <= SMALL:
        return _LIKE_EXPONENT.search(text) is not None and _EXPONENT.search(text) is not None
    return any(_is_number(text, at) for at in _exponents(text))


def _exponents(text: bytes) -> list[int]:
    """Return where `e` follows a digit, and digits follow at a distance of 2 and 3."""
    octets = np.frombuffer(text, np.uint8)
    is_digit = octets - ord("0") < 10
    is_exponent = (octets[1:-3] | 0x20) == ord("e")
    is_exponent &= is_digit[:-4]
    is_exponent &= is_digit[3:-1]
    is_exponent &= is_digit[4:]
    found: list[int] = (np.flatnonzero(is_exponent) + 1).tolist()
    return found


def _is_number(text: bytes, at: int) -> bool:
    """Whether a JSON number has its exponent here."""
    start = at
    while start and text[start - 1] in _NUMBER_CHARS and at - start < DIGITS_MIN:
        start -= 1
    return at - start == DIGITS_MIN or _EXPONENT.match(text, max(start - 1, 0)) is not None


def _overflows(text: bytes) -> bool:
    """Whether a number overflows. A string may look like one: then a parser decides."""
    if not any(isinf(float(found[1])) for found in _NUMBER.finditer(text)):
        return False
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return "infinity" in str(error)
    return False
