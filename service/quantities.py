"""Durations and sizes as text: `90s`, `7d`, `10MB`, `1GiB`.

Settings, options of commands and configs of topics have the same units.

For each type, the text of a value parses to the same value: `milliseconds(duration(ms)) == ms` and
`octets(size(count)) == count`. Only the text of `rounded` cannot be parsed.
"""

import re
from collections.abc import Callable, Mapping

MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
"""Milliseconds of each unit of time."""
BYTES = {"B": 1} | {
    f"{letter}{middle}B": base**power
    for power, letter in enumerate("KMGTP", 1)
    for middle, base in (("i", 1024), ("", 1000))
}
"""Bytes of each unit of size: 1 KiB is 1024 bytes, 1 KB is 1000 bytes."""
DURATIONS = "a number of ms, or a number and ms, s, m, h, d or w, for example 90s or 7d"
SIZES = "a number of bytes, or a number and a unit, for example 10MB or 1GiB"

_NUMBER = re.compile(r"([0-9]{1,18})([A-Za-z]*)")
_UNITS_OF_SIZE = {name.upper(): count for name, count in BYTES.items()}


def milliseconds(text: str) -> int:
    """Parse a duration. A number without a unit is in milliseconds. Raises ValueError."""
    return _parsed(text, MS, f"duration: give {DURATIONS}")


def octets(text: str) -> int:
    """Parse a size in bytes. The case of the unit does not matter. Raises ValueError."""
    number = _NUMBER.fullmatch(text)
    upper = text if number is None else number[1] + number[2].upper()
    try:
        return _parsed(upper, _UNITS_OF_SIZE, "")
    except ValueError:
        raise ValueError(f"{text!r} is not a size: give {SIZES}") from None


def duration(ms: int) -> str:
    """Return a duration as text, in the largest unit that needs no fraction."""
    return _shown(ms, MS)


def size(count: int) -> str:
    """Return a number of bytes as text, in the unit with the smallest number and no fraction."""
    return _shown(count, BYTES)


def rounded(seconds: float) -> str:
    """Return a duration for people: its two largest units, rounded down.

    For example `3 d 4 h`, `12 min`, `8 s`.
    """
    whole = int(seconds)
    for length, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= length:
            remainder = whole % length // below
            return f"{whole // length} {unit}" + (f" {remainder} {smaller}" if remainder else "")
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"


def with_unit(name: str, text: str) -> str:
    """Return the text of a duration (ms) or a size (bytes) as a number, others unchanged.

    The value's name says what it is, as `retention.ms` and `segment.bytes` do. Numbers are
    unchanged, too. Raises ValueError.
    """
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return text
    parse = parser_of(name)
    return text if parse is None else str(parse(text))


def parser_of(name: str) -> Callable[[str], int] | None:
    """Return the parser of a value by the words of its name, None if it has no unit."""
    words = re.split(r"[._-]", name)
    if "ms" in words:
        return milliseconds
    return octets if "bytes" in words else None


def _parsed(text: str, units: Mapping[str, int], kind: str) -> int:
    number = _NUMBER.fullmatch(text)
    if number is not None:
        factor = units.get(number[2]) if number[2] else 1
        if factor is not None:
            return int(number[1]) * factor
    raise ValueError(f"{text!r} is not a {kind}")


def _shown(value: int, units: Mapping[str, int]) -> str:
    name = max(
        (unit for unit in units if value % units[unit] == 0 and value),
        key=units.__getitem__,
        default="",
    )
    return f"{value // units[name]}{name}" if name else f"0{next(iter(units))}"
