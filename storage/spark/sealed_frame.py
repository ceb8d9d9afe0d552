"""The sealed records as DataFrames: Spark's own Parquet reader on the segments of the manifest.

A read of 10,000 paths asks for the size of each file, and one py4j call a file takes seconds, too.
So the driver writes paths and sizes as the log of a file sink of Spark (`_spark_metadata`), in a
temporary folder. A batch read of a folder with such a log takes all files from it, in one call and
without a request to the store. Spark reads the log when the DataFrame is made; then it is deleted.
A server of Spark Connect may be another machine: it gets the paths, and looks up each file.

file:// needs no jar; s3:// is read as s3a:// and needs hadoop-aws in the version of Spark's Hadoop.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tidelog.storage.core import object_keys
from tidelog.storage.core.model import OFFSET_MAX
from tidelog.storage.read.log_snapshot import TopicSnapshot
from tidelog.storage.read.plan import SegmentRange
from tidelog.storage.spark import versions
from tidelog.storage.spark.request import ReadRequest
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.read_only import ReadOnlyFolder

_PARQUET_COLUMNS = (
    "offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>, partition int"
)
_PARQUET_OPTIONS = {
    "ignoreMissingFiles": "false",  # if true, a missing file would lose records silently
    "ignoreCorruptFiles": "false",
    "datetimeRebaseMode": "CORRECTED",  # Spark 2 did not write the files
    "parquet.page.verify-checksum.enabled": "true",  # Parquet's default is false
    "__globPaths__": "false",  # no globs: a folder's name may be a[b]
}
_BLOCK_BYTES = 64 * 1024 * 1024  # has a meaning on HDFS only


class _SinkFile(msgspec.Struct, rename="camel"):
    """A line in the log of a file sink (Spark's SinkFileStatus)."""

    path: str
    size: int
    is_dir: bool = False
    modification_time: int = 0
    block_replication: int = 1
    block_size: int = _BLOCK_BYTES
    action: str = "add"


def sealed_frames(
    spark: SparkSession,
    request: ReadRequest,
    root: str,
    topic: TopicSnapshot,
    slices: Sequence[SegmentRange],
) -> list[DataFrame]:
    """Return a frame of whole segments and a frame of segments that an offset filter cuts."""
    whole = [segment_range for segment_range in slices if _is_whole(topic, segment_range)]
    cut = [segment_range for segment_range in slices if not _is_whole(topic, segment_range)]
    options = {**_PARQUET_OPTIONS, **_s3a_options(request)}
    frames = []
    for part in (whole, cut):
        if part:
            files = [(f"{root}/{piece.key}", piece.size) for piece in part]
            frames.append(parquet_frame(spark, files, options))
    if cut:
        frames[-1] = _between(frames[-1], cut)
    name = topic.name.replace("'", "\\'")
    columns = [
        "key",
        "value",
        f"'{name}' topic",
        "partition",
        "offset",
        "timestamp",
        f"{int(topic.is_log_append_time)} timestampType",
        *(["headers"] if request.has_headers else []),
    ]
    return [frame.selectExpr(*columns) for frame in frames]


def parquet_frame(
    spark: SparkSession, files: Sequence[tuple[str, int]], options: Mapping[str, str]
) -> DataFrame:
    """Read these files, given as (path, bytes), in one topic's folder."""
    reader = spark.read.schema(_PARQUET_COLUMNS).options(**options)
    if versions.is_connect(spark):
        return reader.parquet(*(path for path, _ in files))
    with tempfile.TemporaryDirectory(prefix="tidelog-") as folder:
        log = Path(folder) / "_spark_metadata" / "0"
        log.parent.mkdir()
        lines = [msgspec.json.encode(_SinkFile(_escaped(path), size)) for path, size in files]
        log.write_bytes(b"\n".join([b"v1", *lines]))
        return reader.parquet(Path(folder).as_uri())


def store_root(store: ObjectStore) -> str:
    """Return the store's URL for Hadoop's file systems; Hadoop takes paths without escapes."""
    if isinstance(store, ReadOnlyFolder):
        return f"file://{store.table_uri('')}".removesuffix("/")
    return store.url.replace("s3://", "s3a://", 1)


def _escaped(path: str) -> str:
    scheme, _, place = path.partition("://")
    return f"{scheme}://{quote(place, safe='/=')}"


def _is_whole(topic: TopicSnapshot, segment_range: SegmentRange) -> bool:
    name = object_keys.parse_segment(segment_range.key.removeprefix(f"{topic.prefix}/"))
    assert name is not None, "the manifest names segments only"
    return (name.base_offset, name.end_offset) == (segment_range.start, segment_range.end)


def _between(frame: DataFrame, slices: Sequence[SegmentRange]) -> DataFrame:
    """Filter the frame to the slices' records.

    The first filter has the bounds over all partitions. Spark compares these bounds with Parquet's
    statistics and omits row groups.
    """
    count = max(segment_range.partition for segment_range in slices) + 1
    starts, ends = [OFFSET_MAX] * count, [0] * count
    for segment_range in slices:
        starts[segment_range.partition] = min(starts[segment_range.partition], segment_range.start)
        ends[segment_range.partition] = max(ends[segment_range.partition], segment_range.end)
    frame = frame.where(f"offset >= {min(starts)} and offset < {max(ends)}")
    if len({segment_range.partition for segment_range in slices}) == 1:
        return frame
    return frame.where(
        f"offset >= {_array(starts)}[partition] and offset < {_array(ends)}[partition]"
    )


def _array(numbers: Sequence[int]) -> str:
    return f"array({', '.join(f'{number}L' for number in numbers)})"


def _s3a_options(request: ReadRequest) -> dict[str, str]:
    """Return options of s3a. Credentials come from Spark's configuration or the AWS chain."""
    s3 = request.s3
    options = {"fs.s3a.path.style.access": str(s3.is_path_style).lower()}
    if s3.endpoint_url:
        options["fs.s3a.endpoint"] = s3.endpoint_url
        options["fs.s3a.connection.ssl.enabled"] = str(s3.endpoint_url.startswith("https")).lower()
    if s3.region:
        options["fs.s3a.endpoint.region"] = s3.region
    return options
