"""`batches`: a checkpoint gives each record once, on each version of Spark."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.broker_log import BrokerLog
from tidelog.storage.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.storage.spark.batches import TopicBatch

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

Read = list[tuple[int, list[int]]]


class Reader:
    """Reads the topic `t` of a folder with one checkpoint."""

    def __init__(self, spark: "SparkSession", root: Path) -> None:
        self.spark = spark
        self.store = root / "store"
        self.checkpoint = root / "checkpoint"

    def batches(self, **options: str | int) -> "Iterator[TopicBatch]":
        from tidelog.spark import batches

        options = {"startingOffsets": "earliest"} | options
        checkpoint = str(self.checkpoint)
        return batches(self.spark, str(self.store), "t", checkpoint=checkpoint, **options)

    def read(self, **options: str | int) -> Read:
        """The number and the values of each batch, to the end."""
        return [(batch.number, values(batch)) for batch in self.batches(**options)]


def values(batch: "TopicBatch") -> list[int]:
    return sorted(int(bytes(row.value)) for row in batch.frame.select("value").collect())


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, end)]


def test_each_record_comes_once_over_runs_seals_and_crashes(
    spark: "SparkSession", broker: BrokerLog, tmp_path: Path
) -> None:
    reader = Reader(spark, tmp_path)
    broker.append("t", {0: numbered(0, 6)})
    assert reader.read(maxOffsetsPerTrigger=4) == [(1, [0, 1, 2, 3]), (2, [4, 5])]
    assert reader.read() == []
    broker.seal("t")
    broker.add_partitions("t", 3)
    broker.append("t", {1: numbered(6, 9), 2: numbered(9, 10)})
    run = reader.batches()
    assert values(next(run)) == [6, 7, 8, 9]
    run.close()  # type: ignore[attr-defined]  # the caller crashed: the batch is not done
    broker.append("t", {0: numbered(10, 12)})
    broker.seal("t")
    assert reader.read() == [(3, [6, 7, 8, 9]), (4, [10, 11])]
    assert reader.read() == []


def test_a_checkpoint_is_of_one_topic_and_one_reader(
    spark: "SparkSession", broker: BrokerLog, tmp_path: Path
) -> None:
    reader = Reader(spark, tmp_path)
    broker.append("t", {0: numbered(0, 3)})
    first, second = reader.batches(), reader.batches()
    next(first)
    next(second)  # the batch that is not done
    assert list(first) == []
    with pytest.raises(InvalidRequest, match="commits/1 was not written by this reader"):
        next(second)
    broker.delete_topic("t")
    broker.create("t", 2)
    with pytest.raises(InvalidRequest, match="was deleted and created again"):
        reader.read()


def test_a_start_at_the_end_is_kept(
    spark: "SparkSession", broker: BrokerLog, tmp_path: Path
) -> None:
    reader = Reader(spark, tmp_path)
    broker.append("t", {0: numbered(0, 3)})
    assert reader.read(startingOffsets="latest") == []
    broker.append("t", {0: numbered(3, 5)})
    assert reader.read(startingOffsets="latest") == [(1, [3, 4])]
