"""The parsed options of a load, from Spark's strings."""

from collections.abc import Mapping
from typing import NamedTuple

from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read import spark_kafka_options
from tidelog.storage.read.spark_kafka_options import OffsetSpan, TopicSelection
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.s3_options import S3Options

BATCH_ROWS_MIN = 8192
"""Smaller batches are joined, because a batch costs the JVM as much as a thousand rows."""

COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Types by column name, in the order of Spark's Kafka source."""

_OPTIONS = (
    "store",
    "endpoint",
    "region",
    "pathStyle",
    "topic",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "includeHeaders",
    "minPartitions",
    "maxOffsetsPerTrigger",
)
_PUSHDOWN = "filterpushdown"
_KAFKAS_OWN = ("kafka.", "fetchoffset.", "kafkaconsumer.", "groupidprefix")
"""Options for connections to a Kafka broker. They are accepted and ignored, because no broker is
involved."""


def schema_of(*, has_headers: bool) -> str:
    """Return the columns of a read as Spark's DDL."""
    return ", ".join(f"{name} {COLUMNS[name]}" for name in _columns(has_headers=has_headers))


def _columns(*, has_headers: bool) -> list[str]:
    return [name for name in COLUMNS if name != "headers" or has_headers]


class ReadRequest(NamedTuple):
    """The parsed options of one load."""

    url: str
    s3: S3Options
    selection: TopicSelection
    span: OffsetSpan
    has_headers: bool
    splits_min: int
    rows_max: int | None

    @property
    def columns(self) -> list[str]:
        return _columns(has_headers=self.has_headers)

    @property
    def schema(self) -> str:
        return schema_of(has_headers=self.has_headers)

    def open(self) -> OpenedStore:
        return OpenedStore(self.url, self.s3)


def request_of(options: Mapping[str, str], *, is_streaming: bool) -> ReadRequest:
    """Parse the options. Raises InvalidRequest for an invalid, missing or unknown option."""
    values = {name.lower(): value for name, value in options.items()}
    if _PUSHDOWN in values:
        raise InvalidRequest(
            "option filterPushdown is not served, because a DataFrame lost the records that its "
            "first query filtered out: remove it, and prune by startingOffsets, endingOffsets, "
            "startingTimestamp or assign, or by where of tidelog.spark.read_topic"
        )
    names = {name.lower() for name in _OPTIONS}
    unknown = [name for name in values if name not in names and not name.startswith(_KAFKAS_OWN)]
    if unknown:
        raise InvalidRequest(f"unknown option {unknown[0]!r}: options are {', '.join(_OPTIONS)}")
    if "store" not in values:
        raise InvalidRequest(
            "option store is missing: give file:///folder, a path, or s3://bucket/prefix"
        )
    style = (
        spark_kafka_options.flag(values, "pathStyle", default=False)
        if "pathstyle" in values
        else None
    )
    return ReadRequest(
        values["store"],
        S3Options(
            endpoint_url=values.get("endpoint"), region=values.get("region"), path_style=style
        ),
        spark_kafka_options.selection_of(values),
        spark_kafka_options.span_of(values, is_streaming=is_streaming),
        spark_kafka_options.flag(values, "includeHeaders", default=False),
        spark_kafka_options.number(values, "minPartitions") or 1,
        spark_kafka_options.number(values, "maxOffsetsPerTrigger"),
    )
