"""Batch reads: the same rows as the log's, by `format("tidelog")` and by `read_topic`."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from tests.spark.conftest import History, Read, records_of, without_headers
from tests.support.broker_log import TIME_MS, BrokerLog
from tests.support.moto import Moto
from tests.support.seaweed import REGION
from tidelog.storage.core.errors import LogError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

KAFKA_SCHEMA = (
    "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
    "timestamp:timestamp,timestampType:int>"
)


def spans(frame: "DataFrame") -> dict[int, tuple[int, int, int]]:
    """First and last offset and count, by partition."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = frame.groupBy("partition").agg(F.min("offset"), F.max("offset"), F.count("offset"))
    return {row[0]: (row[1], row[2], row[3]) for row in rows.collect()}


def offsets(topic: str, **partitions: int) -> str:
    """offsets("events", p0=5, p1=-2) is Kafka's JSON."""
    return json.dumps({topic: {name[1:]: offset for name, offset in partitions.items()}})


@pytest.mark.parametrize("topic", ["events", "stamped", "fresh", "empty"])
def test_the_rows_are_the_log(read: Read, history: History, topic: str) -> None:
    frame = read(history.url, topic, includeHeaders="true")
    assert records_of(frame) == history.of(topic)


@pytest.mark.parametrize(("python_path", "used"), [("python3", sys.executable), ("/py", "/py")])
def test_workers_of_a_local_session_run_the_interpreter_of_this_environment(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, python_path: str, used: str
) -> None:
    from tidelog.storage.spark.session import use_this_python

    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_path)
    use_this_python(spark)
    assert spark.sparkContext.pythonExec == used


def test_the_schema_is_that_of_the_kafka_source(read: Read, history: History) -> None:
    frame = read(history.url, "events")
    assert frame.schema.simpleString() == KAFKA_SCHEMA
    with_headers = read(history.url, "events", includeHeaders="true").schema["headers"].dataType
    assert with_headers.simpleString() == "array<struct<key:string,value:binary>>"


def test_the_timestamp_type_is_kafkas_number(read: Read, history: History) -> None:
    for topic, kind in (("events", 0), ("stamped", 1)):
        frame = read(history.url, topic)
        assert [tuple(row) for row in frame.select("timestampType").distinct().collect()] == [
            (kind,)
        ]


def test_offsets_bound_a_read_in_both_tiers(read: Read, history: History) -> None:
    frame = read(
        history.url,
        "events",
        startingOffsets=offsets("events", p0=150, p1=-2, p2=0),
        endingOffsets=offsets("events", p0=250, p1=30, p2=0),
    )
    assert spans(frame) == {0: (150, 249, 100), 1: (0, 29, 30)}


def test_timestamps_bound_a_read_in_both_tiers(read: Read, history: History) -> None:
    frame = read(
        history.url,
        "events",
        startingTimestamp=str(TIME_MS + 90),
        endingTimestamp=str(TIME_MS + 210),
        startingOffsetsByTimestampStrategy="latest",  # partition 2 has nothing so late
    )
    assert spans(frame) == {0: (90, 209, 120), 1: (90, 209, 120)}


def test_a_filter_gives_what_it_says(read: Read, history: History) -> None:
    frame = read(history.url, "events")
    assert spans(frame.where("offset >= 95 and offset < 105 and partition = 1")) == {
        1: (95, 104, 10)
    }


@pytest.mark.parametrize(
    ("topic", "options", "message"),
    [
        ("absent", {}, "topic 'absent' does not exist"),
        ("events", {"startingOffsets": '{"events":'}, "option startingOffsets: expected"),
        ("events", {"startingOffsets": '{"events":{"0":999,"1":0,"2":0}}'}, "offset 999 is out of"),
        ("events", {"endingOffsets": '{"events":{"0":5}}'}, "events-1 is missing"),
        ("events", {"startingOffset": "earliest"}, "unknown option"),
    ],
)
def test_what_cannot_be_read_is_said(
    read: Read, history: History, topic: str, options: dict[str, str], message: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises((LogError, AnalysisException), match=message):
        read(history.url, topic, **options).count()


def test_a_store_that_is_not_there_is_not_made(read: Read, tmp_path: Path) -> None:
    from pyspark.errors import AnalysisException

    absent = tmp_path / "absent"
    with pytest.raises((LogError, AnalysisException), match="does not exist or is not a folder"):
        read(absent.as_uri(), "events").count()
    assert not absent.exists()
    with pytest.raises((LogError, AnalysisException), match=r"there is no cluster\.json"):
        read(str(tmp_path), "events").count()
    assert not list(tmp_path.iterdir())


def test_reading_writes_nothing(read: Read, history: History) -> None:
    def everything() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in history.root.rglob("*")}

    old_times = everything()
    assert read(history.url, "events", startingTimestamp=str(TIME_MS)).count()
    assert everything() == old_times


def test_a_snapshot_is_consistent_while_a_writer_goes_on(read: Read, tmp_path: Path) -> None:
    """Each request goes to both partitions: no snapshot has half of one (I4).

    None has a record twice or not at all while it moves to the table (I7).
    """
    stop = threading.Event()
    span_list: list[tuple[int, int]] = []
    is_written = threading.Event()

    def write() -> None:
        broker = BrokerLog(tmp_path)
        broker.create("t", 2)
        count = 0
        while not stop.is_set() and count < 2000:
            broker.append("t", {0: [b"%d" % count] * 3, 1: [b"%d" % count] * 3})
            count += 1
            is_written.set()
            if count % 10 == 0:
                broker.seal("t", [count // 10 % 2])
            stop.wait(0.005)
        broker.close()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        assert is_written.wait(30)
        try:
            # Beside other suites a seal, at the lowest priority, may take longer than a few reads.
            while len(span_list) < 4 or (span_list[0] == span_list[-1] and len(span_list) < 60):
                span_by_partition = spans(read(str(tmp_path), "t"))
                (first, last, count), other = span_by_partition[0], span_by_partition[1]
                assert other == (first, last, count)
                assert (first, count) == (0, last + 1)
                assert count % 3 == 0
                span_list.append((last, count))
        finally:
            stop.set()
            writer.result()
    assert span_list == sorted(span_list)
    assert span_list[0] < span_list[-1], "the writer did not go on"


# -- format("tidelog") alone


def load(spark: "SparkSession", history: History, **options: Any) -> "DataFrame":
    return spark.read.format("tidelog").options(store=history.url, **options).load()


@pytest.mark.usefixtures("has_format")
def test_several_topics_are_one_read(spark: "SparkSession", history: History) -> None:
    expected = without_headers(history.of("fresh") + history.of("stamped"))
    assert records_of(load(spark, history, subscribe="fresh,stamped")) == expected
    assert records_of(load(spark, history, subscribePattern="fresh|stam.*")) == expected


@pytest.mark.usefixtures("has_format")
def test_partitions_may_be_assigned(spark: "SparkSession", history: History) -> None:
    assigned = load(spark, history, assign='{"events":[2,1]}')
    assert spans(assigned) == {1: (0, 299, 300), 2: (0, 0, 1)}


@pytest.mark.usefixtures("has_format")
def test_a_schema_prunes_columns(spark: "SparkSession", history: History) -> None:
    from pyspark.errors import AnalysisException

    reader = spark.read.format("tidelog").options(store=history.url, topic="events")
    assert reader.schema("offset long").load().agg({"offset": "sum"}).collect() == [
        (2 * sum(range(300)),)
    ]
    rows = reader.schema("partition int, topic string").load().distinct().collect()
    assert sorted(tuple(row) for row in rows) == [(n, "events") for n in range(3)]
    headers = reader.schema("headers array<struct<key:string,value:binary>>").load()
    assert headers.where("headers is not null").count() == 120
    with pytest.raises(AnalysisException, match="column offset string is none of key binary"):
        reader.schema("offset string").load().count()


@pytest.mark.usefixtures("has_format")
def test_more_partitions_can_be_asked_for(spark: "SparkSession", history: History) -> None:
    assert load(spark, history, topic="events", minPartitions="4").rdd.getNumPartitions() >= 4


@pytest.mark.usefixtures("has_format")
def test_a_dataframe_is_one_snapshot(spark: "SparkSession", tmp_path: Path) -> None:
    broker = BrokerLog(tmp_path)
    broker.create("t", 1)
    broker.append("t", {0: [b"1"]})
    options = {"store": str(tmp_path), "topic": "t"}
    frame = spark.read.format("tidelog").options(**options).load()
    assert frame.count() == 1
    broker.append("t", {0: [b"2"]})
    broker.seal("t")
    broker.close()
    from tidelog.storage.spark.versions import VERSION

    assert frame.count() == (1 if VERSION > (4, 0) else 2)  # 4.0 plans each action
    assert spark.read.format("tidelog").options(**options).load().count() == 2


@pytest.mark.usefixtures("has_format")
def test_filters_of_one_dataframe_do_not_meet(spark: "SparkSession", history: History) -> None:
    """Spark keeps what was pushed in the DataFrame; so nothing is, even where it would be."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, history, topic="events")
        assert frame.where("offset >= 290").count() == 20
        assert frame.count() == 601
        both = frame.where("offset >= 290").union(frame.where("offset < 10"))
        assert both.count() == 20 + 21
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.usefixtures("has_format")
@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_option_that_made_dataframes_lose_records_is_refused(
    spark: "SparkSession", history: History, pushdown: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="filterPushdown is not served"):
        load(spark, history, topic="events", filterPushdown=pushdown).count()


# -- read_topic alone


def test_only_the_manifests_files_are_read(spark: "SparkSession", tmp_path: Path) -> None:
    """Garbage of a dead sealer lies beside the segments, and is no part of the log."""
    from tidelog.storage.spark.topic_frame import read_topic

    broker = BrokerLog(tmp_path)
    broker.create("t", 1)
    broker.append("t", {0: [b"1", b"2"]})
    broker.seal("t")
    broker.close()
    segment = next(tmp_path.rglob("*.parquet"))
    segment.with_name(f"{2:020}-{4:020}-dead.parquet").write_bytes(segment.read_bytes())
    frame = read_topic(spark, str(tmp_path), "t")
    assert spans(frame) == {0: (0, 1, 2)}
    assert len(frame.inputFiles()) == 1
    narrow = read_topic(spark, str(tmp_path), "t", startingOffsets=offsets("t", p0=1))
    assert spans(narrow) == {0: (1, 1, 1)}


def test_files_outside_of_the_range_are_not_named(spark: "SparkSession", history: History) -> None:
    from tidelog.storage.spark.topic_frame import read_topic

    frame = read_topic(
        spark,
        history.url,
        "events",
        startingOffsets=offsets("events", p0=120, p1=300, p2=1),
        endingOffsets=offsets("events", p0=130, p1=300, p2=1),
    )
    assert len(frame.inputFiles()) == 1
    assert spans(frame) == {0: (120, 129, 10)}


def test_no_file_is_looked_up(spark: "SparkSession", tmp_path: Path) -> None:
    """The manifest has the sizes: a read of 10,000 files in S3 makes no request a file for them."""
    from tidelog.storage.spark.sealed_frame import parquet_frame

    path = f"file://{tmp_path}/store [a] %41/topics/t-1/partition=7/0-9.parquet"
    frame = parquet_frame(spark, [(path, 1234)], {})
    assert [unquote(name) for name in frame.inputFiles()] == [path]
    assert frame.where("partition = 6").count() == 0
    with pytest.raises(Exception, match=r"File.*does not exist|FAILED_READ_FILE"):
        frame.count()


# -- S3


@pytest.mark.usefixtures("has_format")
async def test_s3_is_read_by_the_executors(spark: "SparkSession", moto_server: Moto) -> None:
    from tests.support.broker_log import open_log
    from tests.support.broker_log import records_of as log_records
    from tidelog.storage.store.s3 import S3Store
    from tidelog.storage.store.s3_options import S3Options

    options = S3Options(endpoint_url=moto_server.endpoint_url, region=REGION)
    store = await S3Store.open(moto_server.bucket, "spark", options)
    log = await open_log(store)
    topic = await log.topics.create("t", 2, {})
    assert topic is not None
    from tidelog.storage.codec.record_columns import Rows

    for number in (0, 1):
        rows = Rows([TIME_MS] * 500, [b"k"] * 500, [b"v%d" % n for n in range(500)])
        await log.records.append(topic, [(number, rows)], size=1000, is_json=False)
    await log.records.seal("t", [0])
    expected = await log_records(log, "t")
    await log.close()
    frame = (
        spark.read.format("tidelog")
        .options(store=store.url, topic="t", endpoint=moto_server.endpoint_url, region=REGION)
        .load()
    )
    await store.close()
    assert records_of(frame) == expected
