"""`readStream`: offsets in Kafka's JSON, bounded batches, and exactly once from a checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.broker_log import BrokerLog
from tidelog.storage.core.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tidelog.storage.spark.stream import TidelogStreamReader

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class Pipe:
    """A stream from a topic into Parquet files, with a checkpoint."""

    def __init__(self, spark: "SparkSession", root: Path) -> None:
        self.spark = spark
        self.store = root / "store"
        self.sink = root / "sink"
        self.checkpoint = root / "checkpoint"

    def run(self, **options: str) -> list[dict[str, Any]]:
        """Until nothing is left; the progress of each batch that had rows."""
        from tidelog.storage.spark.versions import READ_LIMITS

        batches = self._run(**options)
        # An older Spark ends after a batch that it repeats.
        return batches if READ_LIMITS.is_here else batches + self._run(**options)

    def _run(self, **options: str) -> list[dict[str, Any]]:
        query = self.start(**options)
        assert query.awaitTermination(120)
        if (error := query.exception()) is not None:
            raise error
        return [progress for progress in query.recentProgress if progress["numInputRows"]]

    def start(self, **options: str) -> "StreamingQuery":
        read_options = {
            "store": str(self.store),
            "topic": "t",
            "startingOffsets": "earliest",
        } | options
        return (
            self.spark.readStream.format("tidelog")
            .options(**read_options)
            .load()
            .selectExpr("partition", "offset", "cast(value as string) value")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self.checkpoint))
            .option("path", str(self.sink))
            .trigger(availableNow=True)
            .start()
        )

    def rows(self) -> list[tuple[int, int, str]]:
        read = self.spark.read.schema("partition int, offset long, value string")
        return sorted(tuple(row) for row in read.parquet(str(self.sink)).collect())

    def offsets(self, batch: int) -> Any:
        """Return the end offsets of a batch in the checkpoint."""
        return json.loads((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])

    def crash_back(self, *, is_written: bool) -> None:
        """As a crash leaves it: the last batch planned, perhaps written, and not committed."""
        commits = self.checkpoint / "commits"
        batch = max(int(path.name) for path in commits.glob("[0-9]*"))
        for log in [commits] if is_written else [commits, self.sink / "_spark_metadata"]:
            for name in (str(batch), f".{batch}.crc"):
                (log / name).unlink()


@pytest.fixture
def pipe(has_format: None, spark: "SparkSession", tmp_path: Path) -> Pipe:
    return Pipe(spark, tmp_path)


def expected(broker: BrokerLog) -> list[tuple[int, int, str]]:
    return [(r.partition, r.offset, (r.value or b"").decode()) for r in broker.records("t")]


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, end)]


def test_restarts_from_a_checkpoint_are_exactly_once(broker: BrokerLog, pipe: Pipe) -> None:
    from tidelog.storage.spark.versions import READ_LIMITS

    broker.append("t", {0: numbered(0, 30), 1: numbered(0, 10)})
    if READ_LIMITS.is_here:
        batches = pipe.run(maxOffsetsPerTrigger="16")
        assert [batch["numInputRows"] for batch in batches] == [16, 16, 8]
        assert pipe.offsets(0) == {"t": {"0": 12, "1": 4}}
    else:
        assert [batch["numInputRows"] for batch in pipe.run()] == [40]
    assert pipe.rows() == expected(broker)
    # It goes on where it ended, over a seal and a larger topic.
    broker.seal("t")
    broker.append("t", {0: numbered(30, 35)})
    broker.add_partitions("t", 3)
    broker.append("t", {2: numbered(0, 3)})
    assert sum(batch["numInputRows"] for batch in pipe.run()) == 8
    assert pipe.rows() == expected(broker)
    # A batch that was written is not written again.
    pipe.crash_back(is_written=True)
    broker.append("t", {1: numbered(10, 11)})
    assert sum(batch["numInputRows"] for batch in pipe.run()) == 1
    assert pipe.rows() == expected(broker)
    # One that was not is read again up to the same offsets, from the other tier.
    pipe.crash_back(is_written=False)
    broker.seal("t")
    broker.append("t", {1: numbered(11, 13)})
    assert [batch["numInputRows"] for batch in pipe.run()] == [1, 2]
    assert pipe.rows() == expected(broker)
    assert pipe.run() == []


def test_a_stream_starts_at_the_end_by_default(broker: BrokerLog, pipe: Pipe) -> None:
    broker.append("t", {0: numbered(0, 3)})
    assert pipe.run(startingOffsets="latest") == []
    broker.append("t", {0: numbered(3, 5)})
    pipe.run(startingOffsets="earliest")  # a checkpoint has the last word
    assert pipe.rows() == [(0, 3, "3"), (0, 4, "4")]


def test_what_cannot_be_streamed_is_said(broker: BrokerLog, pipe: Pipe) -> None:
    from pyspark.errors import StreamingQueryException

    from tidelog.storage.spark.versions import READ_LIMITS

    if not READ_LIMITS.is_here:
        with pytest.raises(
            StreamingQueryException, match=r"needs Spark 4\.2 or newer, and this is"
        ):
            pipe.run(maxOffsetsPerTrigger="5")

    with pytest.raises(StreamingQueryException, match="a stream has no end"):
        pipe.run(endingOffsets="latest")


# -- the reader by itself, as Spark calls it on the driver


@pytest.fixture
def readers(broker: BrokerLog, tmp_path: Path) -> Iterator["Readers"]:
    all_readers = Readers(str(tmp_path / "store"))
    yield all_readers
    for reader in all_readers.readers:
        reader.stop()


class Readers:
    """Makes stream readers with options."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.readers: list[TidelogStreamReader] = []

    def __call__(self, **options: str) -> "TidelogStreamReader":
        pytest.importorskip("pyspark.sql.datasource")
        from pyspark.sql.types import LongType, StructField, StructType

        from tidelog.storage.spark.request import request_of
        from tidelog.storage.spark.stream import TidelogStreamReader

        read_options = {"store": self.store, "topic": "t"} | options
        schema = StructType([StructField("offset", LongType())])
        reader = TidelogStreamReader(request_of(read_options, is_streaming=True), schema)
        self.readers.append(reader)
        return reader


def everything() -> Any:
    from tidelog.storage.spark.versions import ReadAllAvailable

    return ReadAllAvailable()


def read_all(reader: "TidelogStreamReader", start: Any, end: Any) -> list[int]:
    return [
        offset
        for split in reader.partitions(start, end)
        for batch in reader.read(split)
        for offset in batch.column("offset").to_pylist()
    ]


def test_offsets_are_kafkas_json_in_one_order(broker: BrokerLog, readers: Readers) -> None:
    broker.add_partitions("t", 11)
    broker.append("t", {10: numbered(0, 2), 2: numbered(0, 1)})
    reader = readers(startingOffsets="earliest")
    start = reader.initialOffset()
    assert list(start["t"]) == [str(n) for n in range(11)]
    end = reader.latestOffset(start, everything())
    assert json.dumps(reader.latestOffset(end, everything())) == json.dumps(end)
    assert (end["t"]["10"], end["t"]["2"], end["t"]["0"]) == (2, 1, 0)
    assert reader.reportLatestOffset() == end
    assert reader.partitions(end, end) == []


def test_available_now_stops_at_what_was_there(broker: BrokerLog, readers: Readers) -> None:
    from tidelog.storage.spark.versions import READ_LIMITS

    if not READ_LIMITS.is_here:
        pytest.skip("maxOffsetsPerTrigger needs a newer Spark")
    broker.append("t", {0: numbered(0, 5)})
    reader = readers(startingOffsets="earliest", maxOffsetsPerTrigger="3")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    broker.append("t", {0: numbered(5, 9)})
    broker.add_partitions("t", 3)
    limit = reader.getDefaultReadLimit()
    ends = [start]
    while (end := reader.latestOffset(ends[-1], limit)) != ends[-1]:
        ends.append(end)
    assert [end["t"]["0"] for end in ends] == [0, 3, 5]
    assert "2" not in ends[-1]["t"]


def test_a_spark_without_positions_gets_all_that_is_there(
    broker: BrokerLog, readers: Readers
) -> None:
    """Spark before 4.2 gives neither a start nor a limit."""
    broker.append("t", {0: numbered(0, 5)})
    reader = readers(startingOffsets="earliest")
    end = reader.latestOffset()
    assert end == {"t": {"0": 5, "1": 0}}
    assert read_all(reader, reader.initialOffset(), end) == list(range(5))
    beyond = {"t": {"0": 7, "1": 0}}
    with pytest.raises(OffsetOutOfRange, match="offset 7 is out of range for t-0"):
        reader.partitions(beyond, end)  # the topic was made again


def test_a_batch_is_the_same_after_it_was_sealed(broker: BrokerLog, readers: Readers) -> None:
    broker.append("t", {0: numbered(0, 50)})
    start, end = {"t": {"0": 10, "1": 0}}, {"t": {"0": 40, "1": 0}}
    old_values = read_all(readers(), start, end)
    broker.seal("t")
    assert read_all(readers(), start, end) == old_values == list(range(10, 40))


def test_a_topic_made_again_is_not_taken_for_the_old(broker: BrokerLog, readers: Readers) -> None:
    broker.append("t", {0: numbered(0, 9)})
    end = {"t": {"0": 9, "1": 0}}
    broker.delete_topic("t")
    with pytest.raises(UnknownTopic):
        readers().latestOffset(end, everything())
    broker.create("t", 2)
    broker.append("t", {0: numbered(0, 4)})
    with pytest.raises(OffsetOutOfRange, match="offset 9 is out of range for t-0"):
        readers().latestOffset(end, everything())
    with pytest.raises(OffsetOutOfRange, match="offset 9 is out of range for t-0"):
        readers().partitions({"t": {"0": 0, "1": 0}}, end)
    going_on = readers(failOnDataLoss="false")
    assert going_on.latestOffset(end, everything()) == {"t": {"0": 4, "1": 0}}


def test_a_stream_may_start_at_offsets_and_times(broker: BrokerLog, readers: Readers) -> None:
    from tests.support.broker_log import TIME_MS

    broker.append("t", {0: numbered(0, 20), 1: numbered(0, 20)})
    chosen = readers(startingOffsets='{"t":{"0":7,"1":-1}}').initialOffset()
    assert chosen == {"t": {"0": 7, "1": 20}}
    assert readers(startingTimestamp=str(TIME_MS + 5)).initialOffset() == {"t": {"0": 5, "1": 5}}
    with pytest.raises(InvalidRequest, match="t-1 is missing"):
        readers(startingOffsets='{"t":{"0":7}}').initialOffset()
