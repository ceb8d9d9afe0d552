"""Positions and times, as the options of all commands take them.

beginning, end    the first offset that is kept; the offset that the next record gets
17                an offset
-10               the last ten records of each partition
@TIME             an ISO 8601 time, for example @2026-01-31 or @2026-01-31T12:00:00+01:00. A time
                  without a zone is UTC
@-1h, -1h         the time one hour before now; units as in service/quantities.py
0:17,1:end        a position for each of some partitions

`position(text_of(place)) == place` for each position. Each command takes some of these forms. Its
help and its errors name them (`forms_in_words`).
"""

import datetime as dt
import re
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from tidelog.service import quantities
from tidelog.service.cli.errors import BadUsage
from tidelog.storage.runtime.clock import SystemClock

BEGINNING: Literal["beginning"] = "beginning"
END: Literal["end"] = "end"
OFFSET_MAX = 2**63 - 1


class Last(NamedTuple):
    """The last records of each partition."""

    records: int


class Ago(NamedTuple):
    """A time before now."""

    ms: int


class PartitionOffsets(NamedTuple):
    """A position for each of some partitions: pairs (partition, offset, or beginning or end)."""

    of: tuple[tuple[int, int | str], ...]


Position: TypeAlias = str | int | dt.datetime | Last | Ago | PartitionOffsets


class Form(Enum):
    """Forms of a position, in words."""

    EDGES = "beginning, end"
    OFFSET = "an offset (17)"
    LAST = "the last N records of each partition (-10)"
    TIME = "a time (@2026-01-31T12:00:00Z, or -1h for one hour before now)"
    PARTITIONS = "PARTITION:OFFSET for each partition (0:17,1:end)"


EVERY = tuple(Form)


def position(text: str, forms: tuple[Form, ...] = EVERY) -> Position:
    """Parse a position in one of the forms. Raises BadUsage."""
    form, place = _parsed(text)
    if form in forms and place is not None:
        return place
    if form is Form.TIME and Form.TIME in forms:
        raise _no_time(text)
    raise BadUsage(f"position {text!r}: expected {forms_in_words(forms)}")


def forms_in_words(forms: tuple[Form, ...]) -> str:
    """Return the forms that a command takes, for its help and its errors."""
    words = [form.value for form in forms]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def text_of(place: Position) -> str:
    match place:
        case dt.datetime():
            return f"@{place.isoformat()}"
        case Last():
            return f"-{place.records}"
        case Ago():
            return f"-{quantities.duration(place.ms)}"
        case PartitionOffsets():
            return ",".join(f"{number}:{offset}" for number, offset in place.of)
        case _:
            return str(place)


def in_words(place: Position, now: dt.datetime) -> str:
    """Return a position in words, as commands repeat it."""
    match place:
        case int():
            return f"offset {place}"
        case dt.datetime():
            return _utc(place)
        case Last():
            return f"the last {place.records} of each partition"
        case Ago():
            moment = at_time(place, now)
            assert isinstance(moment, dt.datetime)
            return f"{_utc(moment)} ({quantities.duration(place.ms)} before now)"
        case PartitionOffsets():
            return ", ".join(
                f"partition {number} at {offset if isinstance(offset, int) else f'its {offset}'}"
                for number, offset in place.of
            )
        case _:
            return f"the {place}"


def now() -> dt.datetime:
    """Return the time of this machine's clock."""
    return dt.datetime.fromtimestamp(SystemClock().now_ms() / 1000, dt.UTC)


def at_time(place: Position, now: dt.datetime) -> str | int | dt.datetime | Last | PartitionOffsets:
    """Return the position, as a datetime if it is a time before now.

    Raises BadUsage.
    """
    if not isinstance(place, Ago):
        return place
    try:
        return now - dt.timedelta(milliseconds=place.ms)
    except OverflowError:
        raise BadUsage(f"{text_of(place)} is before the year 1") from None


def moment(text: str, now: dt.datetime) -> dt.datetime:
    """Parse a time: an ISO 8601 time with or without @, or a time before now (-1h).

    Raises BadUsage.
    """
    form, place = _parsed(text if text.startswith(("@", "-")) else f"@{text}")
    if form is not Form.TIME or place is None:
        raise _no_time(text)
    parsed_time = at_time(place, now)
    assert isinstance(parsed_time, dt.datetime)
    return parsed_time


def _parsed(text: str) -> tuple[Form | None, Position | None]:
    """Return the form of the text and its position.

    The position is None if the text begins like this form but is not valid in it.
    """
    if text in {BEGINNING, END}:
        return Form.EDGES, text
    if (number := _offset(text)) is not None:
        return Form.OFFSET, number
    if text.startswith("@") and not text.startswith("@-"):
        return Form.TIME, _iso(text[1:])
    if text.startswith(("-", "@-")):
        back = text.removeprefix("@")[1:]
        if not text.startswith("@") and (number := _offset(back)) is not None:
            return Form.LAST, Last(number)
        try:
            return Form.TIME, None if _offset(back) is not None else Ago(
                quantities.milliseconds(back)
            )
        except ValueError:
            return Form.TIME, None
    if ":" in text:
        return Form.PARTITIONS, _partitions(text)
    return None, None


def _offset(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if is_number and int(text) <= OFFSET_MAX else None


def _iso(text: str) -> dt.datetime | None:
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)


def _partitions(text: str) -> PartitionOffsets | None:
    offset_by_number: dict[int, int | str] = {}
    for part in text.split(","):
        number, _, place = part.partition(":")
        offset = place if place in {BEGINNING, END} else _offset(place)
        if offset is None or not re.fullmatch("[0-9]{1,9}", number):
            return None
        if int(number) in offset_by_number:
            raise BadUsage(f"partition {int(number)} is given twice")
        offset_by_number[int(number)] = offset
    return PartitionOffsets(tuple(offset_by_number.items()))


def _no_time(text: str) -> BadUsage:
    return BadUsage(
        f"{text!r} is not a time: give @ and an ISO 8601 time, for example @2026-01-31T12:00:00Z, "
        "or a time before now, for example -90s, -6h or -2d"
    )


def _utc(when: dt.datetime) -> str:
    shown = when.astimezone(dt.UTC).replace(tzinfo=None).isoformat(" ", timespec="seconds")
    return f"{shown} UTC"


# -- quantities
