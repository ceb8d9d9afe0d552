"""One real Spark session for the whole suite, and a log of two tiers to read with it."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.broker_log import BrokerLog, Record, headers_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parents[2]
QUICK_JVM = "-XX:TieredStopAtLevel=1"
"""The second compiler takes more CPU than its code saves in a session of a minute."""


@pytest.fixture(scope="session")
def spark(
    aws_credentials: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["SparkSession"]:
    """local[2], quiet. After the credentials: a JVM's environment is that of its start."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{home}/bin" if home else None) is None:
        pytest.skip("Spark needs Java 17 on the PATH or in JAVA_HOME")
    from pyspark.sql import SparkSession

    from tidelog.storage.spark import versions
    from tidelog.storage.spark.session import register

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        # The workers' too; `make test-spark` puts its version of Spark there.
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        # Theirs are processes of their own; what pyspark itself warns of there is not ours.
        patch.setenv("PYTHONWARNINGS", "ignore")
        session = (
            SparkSession.builder.master("local[2]")
            .appName("tidelog tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.extraJavaOptions", QUICK_JVM)
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
            .config("spark.sql.session.timeZone", "America/New_York")
            .config("spark.local.dir", str(scratch))
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("OFF")
    if versions.PYTHON_SOURCES.is_here:
        register(session)
    yield session
    session.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerLog]:
    """A broker with the topic `t` of two partitions."""
    log = BrokerLog(tmp_path / "store")
    log.create("t", 2)
    yield log
    log.close()


@pytest.fixture
def has_format() -> None:
    """Skip the test if this version of Spark has no data sources in Python."""
    from tidelog.storage.spark import versions

    if not versions.PYTHON_SOURCES.is_here:
        pytest.skip('format("tidelog") needs a newer Spark')


class History:
    """A folder with a log in it, its broker gone."""

    def __init__(self, root: Path, records: list[Record]) -> None:
        self.url = root.as_uri()
        self.root = root
        self.records = records

    def of(self, topic: str) -> list[Record]:
        return [record for record in self.records if record.topic == topic]


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """`events`: 3 partitions, sealed twice, a tail, keys, headers and tombstones.

    `stamped`: one partition with the log's own times, both tiers. `empty`: nothing. `fresh`: a tail
    alone.
    """
    root = tmp_path_factory.mktemp("history") / "store [a] b"
    broker = BrokerLog(root)
    broker.create("events", 3)
    for first in (0, 100, 200):
        numbers = range(first, first + 100)
        values = [b"value-%d" % n if n % 7 else None for n in numbers]
        keys = [b"key-%d" % (n % 10) if n % 3 else None for n in numbers]
        headers = [[("h", b"%d" % n), ("h", None)] if n % 5 == 0 else None for n in numbers]
        broker.append("events", {0: values, 1: values}, keys=keys, headers=headers)
        if first == 0:
            broker.append("events", {2: [b"alone"]})
        if first < 200:
            broker.seal("events", [0, 2] if first else None)
    broker.create("stamped", 1, message_timestamp_type="LogAppendTime")
    broker.append("stamped", {0: [b"a", b"b"]})
    broker.seal("stamped")
    broker.append("stamped", {0: [b"c"]})
    broker.create("empty", 2)
    broker.create("fresh", 1)
    broker.append("fresh", {0: [b"x", b"y"]})
    topics = ("events", "stamped", "empty", "fresh")
    records = [record for topic in topics for record in broker.records(topic)]
    broker.close()
    return History(root, records)


Read = Callable[..., "DataFrame"]


@pytest.fixture(params=["format", "native"])
def read(request: pytest.FixtureRequest, spark: "SparkSession") -> Read:
    """Both ways to read one topic in batch: read(url, topic, **options)."""
    from tidelog.storage.spark.topic_frame import read_topic

    def by_format(url: str, topic: str, **options: str) -> "DataFrame":
        return spark.read.format("tidelog").options(store=url, topic=topic, **options).load()

    def natively(url: str, topic: str, **options: str) -> "DataFrame":
        return read_topic(spark, url, topic, **options)

    if request.param == "native":
        return natively
    request.getfixturevalue("has_format")
    return by_format


def records_of(frame: "DataFrame") -> list[Record]:
    """The rows of a DataFrame in order of topic, partition and offset; sees a row that is twice."""
    from pyspark.sql import functions as F  # noqa: N812

    has_headers = "headers" in frame.columns
    rows = frame.withColumn("us", F.unix_micros("timestamp")).collect()
    return sorted(
        (
            Record(
                row.topic,
                row.partition,
                row.offset,
                row.us,
                _bytes(row.key),
                _bytes(row.value),
                headers_in(row.headers) if has_headers else None,
            )
            for row in rows
        ),
        key=lambda record: record[:3],
    )


def without_headers(records: list[Record]) -> list[Record]:
    return [record._replace(headers=None) for record in records]


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)
