"""The files of a plan: which files can have a row that matches an expression of Iceberg. Pure.

An expression is JSON of Iceberg's REST catalog. A file is left out only if its bounds exclude each
row. An expression of an unknown form excludes no file: readers filter the rows themselves.
"""

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tidelog.storage.codec.record_columns import US_PER_MS
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.tables.manifest import SegmentColumns

DEPTH_MAX = 100
"""Levels of an expression. Python's recursion ends at ten times as many."""
_INT64_MAX = 2**63 - 1
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


class ColumnBounds(NamedTuple):
    """The least and the greatest value of a column in each file, both inclusive."""

    low: np.ndarray
    high: np.ndarray


Expression = Any
_Test = Callable[[ColumnBounds, int], np.ndarray]

_TESTS: Mapping[str, _Test] = {
    "eq": lambda bounds, value: (bounds.low <= value) & (bounds.high >= value),
    "lt": lambda bounds, value: bounds.low < value,
    "lt-eq": lambda bounds, value: bounds.low <= value,
    "gt": lambda bounds, value: bounds.high > value,
    "gt-eq": lambda bounds, value: bounds.high >= value,
}


def matching(expression: Expression, files: SegmentColumns) -> np.ndarray:
    """Return which files can have a row that matches. None matches every row.

    Raises InvalidRequest for an expression of too many levels.
    """
    bounds = {
        "offset": ColumnBounds(files.base_offset, files.end_offset - 1),
        "timestamp": _microseconds(files),
        "partition": ColumnBounds(files.partition, files.partition),
    }
    return _matching(expression, bounds, len(files.path), 0)


def _microseconds(files: SegmentColumns) -> ColumnBounds:
    most = _INT64_MAX // US_PER_MS - 1
    low, high = (
        np.clip(column, -most, most) * US_PER_MS
        for column in (files.timestamp_min, files.timestamp_max)
    )
    return ColumnBounds(low, high + US_PER_MS - 1)


def _matching(
    expression: Expression, bounds: Mapping[str, ColumnBounds], count: int, depth: int
) -> np.ndarray:
    if depth > DEPTH_MAX:
        raise InvalidRequest(f"the filter has more than {DEPTH_MAX} levels: write it flatter")
    every = np.ones(count, bool)
    if expression is False:
        return ~every
    if not isinstance(expression, dict):
        return every
    kind = expression.get("type")
    if kind == "false":
        return ~every
    if kind in ("and", "or"):
        left, right = (
            _matching(expression.get(side), bounds, count, depth + 1) for side in ("left", "right")
        )
        return left & right if kind == "and" else left | right
    term = expression.get("term")
    column = bounds.get(term) if isinstance(term, str) else None
    if column is None or not isinstance(kind, str):
        return every
    if kind == "in":
        return _in(column, term, expression.get("values"), every)
    value = _number(term, expression.get("value"))
    test = _TESTS.get(kind)
    return every if test is None or value is None else test(column, value)


def _in(bounds: ColumnBounds, term: Any, values: Any, every: np.ndarray) -> np.ndarray:
    """Return which files can have one of the values."""
    if not isinstance(values, list):
        return every
    numbers = [_number(term, value) for value in values]
    if None in numbers:
        return every
    ordered = np.sort(np.array(numbers, dtype=np.int64))
    first = np.searchsorted(ordered, bounds.low, side="left")
    end = np.searchsorted(ordered, bounds.high, side="right")
    return first < end


def _number(term: Any, value: Any) -> int | None:
    """Return a literal as the column's number: microseconds for a timestamp."""
    if type(value) is int:
        return value if abs(value) <= _INT64_MAX else None
    if term != "timestamp" or not isinstance(value, str):
        return None
    try:
        moment = dt.datetime.fromisoformat(value)
        return (moment - _EPOCH) // _MICROSECOND
    except (ValueError, TypeError, OverflowError):  # also a timestamp without a zone
        return None
