"""The bounds of offsets, times and partitions in the text of a filter, by Spark's own parser.

Spark parses, resolves and simplifies the text, and translates it as for a data source. A part that
has no bound, or that this module does not know, may match each record: the bounds only leave out
objects, and Spark applies the whole text to the records.
"""

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import SparkSession

from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read.plan import NO_FILTER, AnyOf, ReadFilter
from tidelog.storage.spark import versions

log = logging.getLogger("tidelog.spark")

ALTERNATIVES_MAX = 64
"""Bounds that a text may have. A text with more has none, because each costs a pass of the plan."""

_Bounds = Sequence[ReadFilter]
_ANY: _Bounds = [NO_FILTER]


def bounds_of(spark: SparkSession, where: str, schema: str) -> AnyOf:
    """Return bounds of the records that match a text: of rows with the columns `schema`.

    Spark Connect shows no plan, so the text has no bounds there. Raises InvalidRequest if Spark
    does not understand the text.
    """
    if versions.is_connect(spark):
        return AnyOf(_ANY)
    try:
        rows = spark.createDataFrame(spark.sparkContext.emptyRDD(), schema).where(where)
    except (AnalysisException, ParseException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidRequest(f"where: {where!r}: {lines[0]}") from error
    try:
        return AnyOf(_bounds(_pushed_down(rows)))
    except (Py4JError, TypeError, AttributeError) as error:
        log.warning("this Spark version shows no bounds, so all files are opened: %s", error)
        return AnyOf(_ANY)


def _pushed_down(rows: Any) -> list[Any]:
    """Return the parts of a filter that Spark would push into a data source, all of which hold."""
    jvm = rows.sparkSession._jvm  # noqa: SLF001
    package = jvm.org.apache.spark.sql.execution.datasources
    strategy = getattr(getattr(package, "DataSourceStrategy$"), "MODULE$")
    plan = rows._jdf.queryExecution().optimizedPlan()  # noqa: SLF001
    filters = []
    conditions = [plan.condition()] if _kind(plan) == "Filter" else []
    while conditions:
        condition = conditions.pop()
        if _kind(condition) == "And":
            conditions += [condition.left(), condition.right()]
        elif (translated := strategy.translateFilter(condition, False)).isDefined():
            filters.append(translated.get())
    return filters


def _bounds(filters: Sequence[Any]) -> _Bounds:
    return reduce(_both, map(_bounds_of_filter, filters), _ANY)


def _bounds_of_filter(pushed: Any) -> _Bounds:
    match _kind(pushed):
        case "And":
            return _both(_bounds_of_filter(pushed.left()), _bounds_of_filter(pushed.right()))
        case "Or":
            left, right = _bounds_of_filter(pushed.left()), _bounds_of_filter(pushed.right())
            return _limited([*left, *right])
        case "In":
            values = pushed.values()
            if len(values) > ALTERNATIVES_MAX:
                return _ANY
            return [_compared("EqualTo", pushed.attribute(), value) for value in values]
        case kind if kind in _RANGES:
            return [_compared(kind, pushed.attribute(), pushed.value())]
        case _:
            return _ANY


def _both(left: _Bounds, right: _Bounds) -> _Bounds:
    return _limited([first.both(second) for first in left for second in right])


def _limited(bounds: _Bounds) -> _Bounds:
    return bounds if len(bounds) <= ALTERNATIVES_MAX else _ANY


_Range = tuple[int | None, int | None]
_RANGES: dict[str, Callable[[int], _Range]] = {
    "EqualTo": lambda value: (value, value),
    "EqualNullSafe": lambda value: (value, value),
    "GreaterThan": lambda value: (value, None),
    "GreaterThanOrEqual": lambda value: (value, None),
    "LessThan": lambda value: (None, value),
    "LessThanOrEqual": lambda value: (None, value),
}
"""Inclusive bounds by Spark's name of the comparison: a bound may be one too wide."""


def _compared(kind: str, column: str, value: Any) -> ReadFilter:
    name = column.lower()  # Spark gives it as the text has it
    if value is None or name not in _FILTERS:
        return NO_FILTER
    low, high = _RANGES[kind](_milliseconds(value) if name == "timestamp" else int(value))
    return _FILTERS[name](low, high)


def _of_offsets(low: int | None, high: int | None) -> ReadFilter:
    return ReadFilter(
        NO_FILTER.offset_min if low is None else low,
        NO_FILTER.offset_max if high is None else high,
    )


def _of_times(low: int | None, high: int | None) -> ReadFilter:
    # A time between two milliseconds is rounded down.
    return ReadFilter(timestamp_min=low, timestamp_max=None if high is None else high + 1)


def _of_partition(low: int | None, high: int | None) -> ReadFilter:
    return ReadFilter(partitions=frozenset({low})) if low is not None and low == high else NO_FILTER


_FILTERS: dict[str, Callable[[int | None, int | None], ReadFilter]] = {
    "offset": _of_offsets,
    "partition": _of_partition,
    "timestamp": _of_times,
}


def _milliseconds(value: Any) -> int:
    """Return the time of a java.sql.Timestamp or, with the session's new time API, an Instant."""
    return value.getTime() if _kind(value) == "Timestamp" else value.toEpochMilli()


def _kind(value: Any) -> str:
    return value.getClass().getSimpleName()
