"""A log that was compacted, retained and collected, read without a broker.

It is read on every store by plan, by Spark in both ways, and as a plain Delta table.
"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import pytest

from tests.spark.conftest import Read, records_of, without_headers
from tests.spark.test_snapshot import read as read_plan
from tests.support.broker_log import TIME_MS, Record, open_log
from tests.support.broker_log import records_of as records_of_log
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.read.offline_log import open_snapshot
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = Grace(wal_ms=0, table_ms=0)
CONFIGS = {"cleanup.policy": "compact,delete", "retention.ms": "-1"}
KEYS = 40


async def write(log: Broker, first: int, count: int) -> None:
    from tidelog.storage.codec.record_columns import Rows

    topic = log.state.topic("t")
    numbers = range(first, first + count)
    stamps = [TIME_MS + n for n in numbers]
    keys: list[bytes | None] = [b"k%d" % (n % KEYS) for n in numbers]
    values: list[bytes | None] = [b"v%d" % n if n % 9 else None for n in numbers]
    for number in (0, 1):
        await log.records.append(
            topic, [(number, Rows(stamps, keys, values))], size=99, is_json=False
        )


async def cared_for(store: ObjectStore) -> list[Record]:
    """`t`: partition 0 compacted, 1 retained too, a tail; all garbage is gone.

    Return the records that are left.
    """
    log = await open_log(store)
    await log.topics.create("t", 2, CONFIGS)
    for first in range(0, 12_000, 2_000):
        await write(log, first, 2_000)
        await log.records.seal("t")
    everything = await records_of_log(log, "t")
    await write(log, 12_000, 10)
    cluster = await MaintenanceSession.open(store, SystemClock())
    told = await compact(cluster, None, is_dry=False)
    assert [result.rows_after for result in told] == [KEYS, KEYS]
    await delete_records(cluster, "t", {1: 11_990}, is_dry=False)
    assert await collect(cluster, await plan(cluster, NOW)) > 0
    assert (await scrub(cluster, None, NOW)).findings == []
    await cluster.close()
    await log.close()
    fresh = await open_log(store)
    records = await records_of_log(fresh, "t")
    await fresh.close()
    spans = {0: (11_960, 12_010), 1: (11_990, 12_010)}
    assert [record for record in records if record.offset < 12_000] == [
        record for record in everything if record.offset >= spans[record.partition][0]
    ]
    assert len(records) == sum(end - start for start, end in spans.values())
    return records


async def test_on_every_store_the_plan_reads_what_is_left(store: ObjectStore) -> None:
    expected = await cared_for(store)
    snapshot = await open_snapshot(store, SystemClock(), ["t"])
    assert await read_plan(store, snapshot) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    root = tmp_path_factory.mktemp("cared") / "store"

    async def make() -> list[Record]:
        store = FolderStore(root)
        records = await cared_for(store)
        await store.close()
        return records

    return root, asyncio.run(make())


def test_the_delta_table_is_what_was_sealed(folder: tuple[Path, list[Record]]) -> None:
    root, records = folder
    (path,) = (root / "topics").iterdir()
    table = deltalake.DeltaTable(str(path))
    rows = table.to_pyarrow_table(columns=["partition", "offset", "value"]).to_pylist()
    table_rows = sorted((row["partition"], row["offset"], row["value"]) for row in rows)
    expected = [(record.partition, record.offset, record.value) for record in records]
    assert table_rows == sorted(
        place_and_value for place_and_value in expected if place_and_value[1] < 12_000
    )


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_spark_reads_what_is_left(folder: tuple[Path, list[Record]], read: Read) -> None:
    root, records = folder
    assert records_of(read(root.as_uri(), "t")) == without_headers(records)
    middle = json.dumps({"t": {"0": 11_970, "1": 11_995}})
    later_records = records_of(read(root.as_uri(), "t", startingOffsets=middle))
    starts = {0: 11_970, 1: 11_995}
    assert later_records == without_headers([r for r in records if r.offset >= starts[r.partition]])


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("has_format")
def test_a_stream_passes_over_what_compaction_took(
    folder: tuple[Path, list[Record]], spark: "SparkSession", tmp_path: Path
) -> None:
    from tidelog.storage.spark.versions import READ_LIMITS

    root, records = folder
    options = {"store": root.as_uri(), "subscribe": "t", "startingOffsets": "earliest"}
    if READ_LIMITS.is_here:
        options["maxOffsetsPerTrigger"] = "1000"
    query = (
        spark.readStream.format("tidelog")
        .options(**options)
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "state"))
        .option("path", str(tmp_path / "out"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    streamed_records = records_of(spark.read.parquet(str(tmp_path / "out")))
    assert streamed_records == without_headers(records)
