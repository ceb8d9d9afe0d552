"""The fast way into Spark: sealed records through the JVM's own Parquet reader, the rest as it is.

A full scan through Python's Arrow batches costs 1.8 times what the JVM needs alone (NUMBERS 4). So
the segments that the manifest names, and no others, are given to `spark.read.parquet`, and only
the unsealed tail comes through `format("tidelog")`, with fixed offsets: whoever seals it meanwhile
moves its records, and the source finds the same ones in the table. Spark pushes filters and columns
into Parquet by itself.

file:// needs no jar; s3:// is read as s3a:// and needs hadoop-aws in the version of Spark's Hadoop.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from storage import keys
from storage.clock import SystemClock
from storage.errors import InvalidRequest
from storage.objectstore import ObjectStore
from storage.readonly import ReadOnlyFolder
from storage.scan import OFFSET_MAX, Range, SegmentSlice, Snapshot, TopicView, segment_slices
from storage.snapshot import LogView
from storage.spark_source import NAME, ReadRequest, register, request_of

log = logging.getLogger("tidelog.spark")

_PARQUET_COLUMNS = (
    "offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>"
)
_PARQUET_PARTITION = "partition int"
_PARQUET_OPTIONS = {
    "ignoreMissingFiles": "false",  # a session that says otherwise would lose records unseen
    "ignoreCorruptFiles": "false",
    "datetimeRebaseMode": "CORRECTED",  # no Spark 2 wrote these
    "parquet.page.verify-checksum.enabled": "true",  # its own default is not to look
    "__globPaths__": "false",  # a folder may be called a[b]
}
_LISTING_THRESHOLD = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_BLOCK_BYTES = 64 * 1024 * 1024  # only HDFS would mean something by it
_POSITION_OPTIONS = ("starting", "ending", "topic", "subscribe", "assign")


def read_topic(
    spark: SparkSession, store: str, topic: str, **options: str | int | bool
) -> DataFrame:
    """The records of one topic as of this call, as `format("tidelog")` gives them, in no order.

    `options` are those of a batch read through the source, by the same names. What reading raises
    is raised at once: InvalidRequest, UnknownTopic, OffsetOutOfRange, StoreUnfit, Unavailable.
    """
    given = {name: _text(value) for name, value in options.items()}
    given |= {"store": store, "topic": topic}
    request = request_of(given, is_streaming=False)
    if list(request.selection.names) != [topic]:
        raise InvalidRequest(f"read_topic reads one topic, not {topic!r}")
    register(spark)
    with request.open() as opened:
        view = opened.run(LogView.open(opened.store, SystemClock()))
        snapshot, ranges = opened.run(view.resolve(request.selection, request.span))
        opened.run(view.close())
        root = _root(opened.store)
    frames = _sealed(spark, request, root, snapshot.topics[topic], _slices(snapshot, ranges))
    tail = [one for one in ranges if max(one.start, _sealed_end(snapshot, one)) < one.end]
    if tail or not frames:
        frames.append(_unsealed(spark, given, snapshot, tail or ranges))
    return reduce(DataFrame.union, frames)


def _slices(snapshot: Snapshot, ranges: Iterable[Range]) -> list[SegmentSlice]:
    return [one for within in ranges for one in segment_slices(snapshot, within)]


def _sealed_end(snapshot: Snapshot, one: Range) -> int:
    return snapshot.topics[one.topic].partitions[one.partition].sealed_end


def _sealed(
    spark: SparkSession,
    request: ReadRequest,
    root: str,
    topic: TopicView,
    slices: Sequence[SegmentSlice],
) -> list[DataFrame]:
    """Whole segments, and apart from them those of which an offset filter leaves a part."""
    whole = [one for one in slices if _is_whole(topic, one)]
    cut = [one for one in slices if not _is_whole(topic, one)]
    frames = [_parquet(spark, request, root, topic, part) for part in (whole, cut) if part]
    if cut:
        frames[-1] = _between(frames[-1], cut)
    columns = [
        F.col("key"),
        F.col("value"),
        F.lit(topic.name).alias("topic"),
        F.col("partition"),
        F.col("offset"),
        F.col("timestamp"),
        F.lit(int(topic.is_log_append_time)).alias("timestampType"),
        *([F.col("headers")] if request.has_headers else []),
    ]
    return [frame.select(*columns) for frame in frames]


def _is_whole(topic: TopicView, one: SegmentSlice) -> bool:
    name = keys.parse_segment(one.key.removeprefix(f"{topic.prefix}/"))
    assert name is not None, "the manifest names segments only"
    return (name.base_offset, name.end_offset) == (one.start, one.end)


def _parquet(
    spark: SparkSession,
    request: ReadRequest,
    root: str,
    topic: TopicView,
    slices: Sequence[SegmentSlice],
) -> DataFrame:
    files = [(f"{root}/{one.key}", one.size) for one in slices]
    options = {"basePath": f"{root}/{topic.prefix}", **_PARQUET_OPTIONS, **_s3a_options(request)}
    if root.startswith("file:"):
        # Above the threshold Spark lists with one task a file: 600 took 4 s, and here 0.1.
        with _setting(spark, _LISTING_THRESHOLD, "1000000"):
            return parquet_by_listing(spark, files, options)
    try:
        return parquet_by_sizes(spark, files, options)
    except (Py4JError, TypeError, AttributeError) as error:
        log.warning("this Spark lists %d files, which takes a while: %s", len(files), error)
        return parquet_by_listing(spark, files, options)


def parquet_by_listing(
    spark: SparkSession, files: Sequence[tuple[str, int]], options: Mapping[str, str]
) -> DataFrame:
    """These Parquet files, looked up one by one: in S3 three requests each."""
    reader = spark.read.schema(f"{_PARQUET_COLUMNS}, {_PARQUET_PARTITION}").options(**options)
    return reader.parquet(*(path for path, _ in files))


def parquet_by_sizes(
    spark: SparkSession, files: Sequence[tuple[str, int]], options: Mapping[str, str]
) -> DataFrame:
    """The same without any request: the manifest has said how long each (path, bytes) is.

    What Spark's own reader does after its listing, with the cache of listings filled beforehand.
    There is no public way; a Spark that is built otherwise raises, and is asked publicly.
    """
    jvm, session = spark._jvm, spark._jsparkSession  # noqa: SLF001
    assert jvm is not None
    sources = jvm.org.apache.spark.sql.execution.datasources
    scala = jvm.org.apache.spark.api.python.PythonUtils
    new_path, new_status = jvm.org.apache.hadoop.fs.Path, jvm.org.apache.hadoop.fs.FileStatus
    listed = sources.FileStatusCache.getOrCreate(session)
    paths = jvm.java.util.ArrayList()
    for name, size in files:
        path = new_path(name)
        statuses = spark.sparkContext._gateway.new_array(new_status, 1)  # type: ignore[union-attr]  # noqa: SLF001
        statuses[0] = new_status(size, False, 1, _BLOCK_BYTES, 0, path)
        listed.putLeafFiles(path, statuses)
        paths.add(path)

    def schema(ddl: str) -> Any:
        return jvm.org.apache.spark.sql.types.StructType.fromDDL(ddl)

    none, given = jvm.scala.Option.empty(), scala.toScalaMap(dict(options))
    whole = jvm.scala.Option.apply(schema(f"{_PARQUET_COLUMNS}, {_PARQUET_PARTITION}"))
    index = sources.InMemoryFileIndex(session, scala.toSeq(paths), given, whole, listed, none, none)
    relation = sources.HadoopFsRelation(
        index,
        schema(_PARQUET_PARTITION),
        schema(_PARQUET_COLUMNS),
        none,
        sources.parquet.ParquetFileFormat(),
        given,
        session,
    )
    return DataFrame(session.baseRelationToDataFrame(relation), spark)


def _between(frame: DataFrame, slices: Sequence[SegmentSlice]) -> DataFrame:
    """Only the records of the slices. The outer bounds are for Parquet's statistics."""
    count = max(one.partition for one in slices) + 1
    starts, ends = [OFFSET_MAX] * count, [0] * count
    for one in slices:
        starts[one.partition] = min(starts[one.partition], one.start)
        ends[one.partition] = max(ends[one.partition], one.end)
    offset, partition = F.col("offset"), F.col("partition")
    frame = frame.where((offset >= min(starts)) & (offset < max(ends)))
    if len({one.partition for one in slices}) == 1:
        return frame
    return frame.where((offset >= F.lit(starts)[partition]) & (offset < F.lit(ends)[partition]))


def _unsealed(
    spark: SparkSession, given: Mapping[str, str], snapshot: Snapshot, ranges: Sequence[Range]
) -> DataFrame:
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for one in ranges:
        starts[str(one.partition)] = min(max(one.start, _sealed_end(snapshot, one)), one.end)
        ends[str(one.partition)] = one.end
    topic = ranges[0].topic
    kept = {n: v for n, v in given.items() if not n.lower().startswith(_POSITION_OPTIONS)}
    return (
        spark.read.format(NAME)
        .options(**kept)
        .option("assign", json.dumps({topic: [int(partition) for partition in starts]}))
        .option("startingOffsets", json.dumps({topic: starts}))
        .option("endingOffsets", json.dumps({topic: ends}))
        .load()
    )


def _root(store: ObjectStore) -> str:
    """The store's URL as the JVM's file systems know it; Hadoop takes paths as they are."""
    if isinstance(store, ReadOnlyFolder):
        return f"file://{store.table_uri('')}"
    return store.url.replace("s3://", "s3a://", 1)


def _s3a_options(request: ReadRequest) -> dict[str, str]:
    """Credentials are Spark's matter: its configuration, or the AWS chain."""
    s3 = request.s3
    is_path_style = bool(s3.endpoint_url) if s3.path_style is None else s3.path_style
    options = {"fs.s3a.path.style.access": str(is_path_style).lower()}
    if s3.endpoint_url:
        options["fs.s3a.endpoint"] = s3.endpoint_url
        options["fs.s3a.connection.ssl.enabled"] = str(s3.endpoint_url.startswith("https")).lower()
    if s3.region:
        options["fs.s3a.endpoint.region"] = s3.region
    return options


@contextlib.contextmanager
def _setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """A session's setting, for a moment."""
    before = spark.conf.get(name)
    assert before is not None, "every setting of Spark's own has a value"
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
