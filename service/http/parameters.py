"""Parameters of a request (path, query, names in a body): parsers, checks and their error."""

import re
from collections.abc import Mapping

from tidelog.storage.core.errors import InvalidRequest, UnknownPartition
from tidelog.storage.core.model import OFFSET_MAX
from tidelog.storage.state.topic import Topic

SHOWN_MAX = 100
"""Characters of an invalid parameter that the error's message quotes."""
PARTITION_DIGITS_MAX = 9
_INTEGER = re.compile(r"-?[0-9]{1,19}")
"""`int` accepts more (`1_0`, blanks, digits of other scripts), which clients do not mean."""


class InvalidParameter(InvalidRequest):
    """A query parameter or header that cannot be used."""

    status = 400
    code = 40002


def integer(name: str, text: str, low: int, high: int) -> int:
    """Parse a query parameter's whole number. Raises InvalidParameter with the valid range."""
    if not _INTEGER.fullmatch(text):
        raise InvalidParameter(f"parameter {name}={text[:SHOWN_MAX]!r} is not a whole number")
    value = int(text)
    if not low <= value <= high:
        raise InvalidParameter(f"parameter {name}={value} must be {low} to {high}")
    return value


def partition_number(topic: Topic, text: str) -> int:
    """Parse the number of a partition in a path. Raises UnknownPartition."""
    count = len(topic.partitions)
    if not (text.isascii() and text.isdigit() and len(text) <= PARTITION_DIGITS_MAX):
        raise UnknownPartition(topic.name, text, count)
    number = int(text)
    if number >= count:
        raise UnknownPartition(topic.name, number, count)
    return number


def check_printable(parameter: str, text: str) -> None:
    """Raise InvalidParameter for control characters in a path parameter, as Redpanda does."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Invalid parameter '{parameter}' got '{shown}'")


def check_printable_field(text: str) -> None:
    """Raise InvalidParameter for control characters in a name in a body."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Parameter contained invalid control characters: {shown}")


def _visible(text: str) -> str:
    """Replace control characters by their symbols: U+2400 + n, and U+2421 for delete."""
    if text.isprintable():
        return text
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 0x20 else "\u2421" if c == "\x7f" else c for c in text
    )


def integer_or_default(query: Mapping[str, str], name: str, default: int, low: int) -> int:
    """Parse a number of the query. Confluent's clients send -1 for the default."""
    text = query.get(name, "-1")
    return default if text in ("", "-1") else integer(name, text, low, OFFSET_MAX)
