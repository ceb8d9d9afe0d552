"""The two engines of compaction: whatever the log, they leave the same segments."""

import asyncio
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.parquet as pq
import pytest

from tests.support.broker_log import TIME_MS, Record, open_log, records_of
from tidelog.compaction.compact import Compacted, compact
from tidelog.compaction.engine import Engine, KeyScan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.rewrite import Rewrite
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import Corrupt, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.tables.manifest import removed_paths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
TOPICS = {
    "updates": COMPACT,
    "forgetful": COMPACT | {"delete.retention.ms": "0"},
    "many": COMPACT | {"target.segment.bytes": "3000"},
    "late": COMPACT | {"compression.type": "lz4"},
    "small": {"target.segment.bytes": "9000", "retention.ms": "-1"},
}
PARTITIONS = 1
NOW = Grace(wal_ms=0, table_ms=0)
Told = list[Compacted]


class Segment(NamedTuple):
    """The fields on which engines must agree; the name has an id of its own."""

    topic: str
    partition: int
    base_offset: int
    end_offset: int
    rows: list[dict]
    groups: int
    history: list[int]


async def write(log: Broker, draws: random.Random) -> None:
    """Some segments of updates, tombstones and, where the policy came later, keyless records."""
    for name in TOPICS:
        topic = log.state.topic(name)
        for _ in range(draws.randint(4, 6)):
            for number in range(PARTITIONS):
                count = draws.randint(1, 120)
                has_keyless = name == "late"
                keys = [
                    None if has_keyless and draws.random() < 0.1 else b"k%d" % draws.randrange(40)
                    for _ in range(count)
                ]
                values = [
                    None if draws.random() < 0.2 else draws.randbytes(draws.randrange(40))
                    for _ in range(count)
                ]
                headers = [[("h", b"%d" % n)] if n % 9 == 0 else None for n in range(count)]
                stamps = [TIME_MS + draws.randrange(10**6) for _ in range(count)]
                rows = Rows(stamps, keys, values, headers)
                await log.records.append(topic, [(number, rows)], size=99, is_json=False)
            await log.records.seal(name)


async def written(root: Path, draws: random.Random, *, is_new: bool) -> dict[str, list[Record]]:
    """All records before any compaction looks at the new ones."""
    log = await open_log(FolderStore(root))
    if is_new:
        for name, configs in TOPICS.items():
            await log.topics.create(name, PARTITIONS, configs if name != "late" else {})
    await write(log, draws)
    if is_new:
        await log.topics.alter("late", TOPICS["late"])
    records_by_topic = {name: await records_of(log, name) for name in TOPICS}
    await log.close()
    await log._log.store.close()
    return records_by_topic


async def compacted(root: Path, engine: Engine | None) -> tuple[Told, list[Segment]]:
    store = FolderStore(root)
    cluster = await MaintenanceSession.open(store, SystemClock())
    told = await compact(cluster, None, is_dry=False, engine=engine)
    segments = []
    for topic in topics_of(cluster.state, None):
        table = await cluster.table(topic)
        for number in range(PARTITIONS):
            files = await table.segments(number)
            segments += [segment(root / topic.prefix, topic.name, file) for file in files]
    report = await scrub(cluster, None, NOW)
    assert [finding for finding in report.findings if finding.is_damage] == []
    await cluster.close()
    await store.close()
    return told, segments


def segment(folder: Path, topic: str, file: SegmentFile) -> Segment:
    import msgspec

    parquet_file = pq.ParquetFile(folder / file.path)
    cleaned = (parquet_file.metadata.metadata or {}).get(b"tidelog.cleaned", b"[]")
    history = [end for end, _ in msgspec.json.decode(cleaned)]
    span = (file.base_offset, file.end_offset)
    rows = parquet_file.read().to_pylist()
    return Segment(
        topic, file.partition, *span, rows, parquet_file.metadata.num_row_groups, history
    )


def latest(records: list[Record]) -> list[Record]:
    newest = {(record.partition, record.key): record.offset for record in records}
    return [r for r in records if r.key is None or newest[r.partition, r.key] == r.offset]


@pytest.mark.parametrize("seed", range(1))
def test_both_engines_leave_the_same_log(
    spark: "SparkSession", tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds: the second finds what the first left, and takes its tombstones."""
    from tidelog.compaction.spark_engine import SparkEngine

    monkeypatch.setattr(
        "tidelog.compaction.spark_engine.PART_BYTES_MIN", 1
    )  # so that there are several
    draws = random.Random(seed)
    base, roots = tmp_path / "base", [tmp_path / "in-process", tmp_path / "spark"]
    for turn in range(2):
        everything = asyncio.run(written(base, draws, is_new=turn == 0))
        for root in roots:
            shutil.copytree(base, root)
        keys_bytes_max = draws.choice([600, 1 << 20])
        store = FolderStore(roots[0])
        here, segments = asyncio.run(
            compacted(roots[0], InProcess(store, SystemClock(), keys_bytes_max))
        )
        engine = SparkEngine(spark, roots[1].as_uri(), keys_bytes_max=keys_bytes_max)
        there, same = asyncio.run(compacted(roots[1], engine))
        assert same == segments
        assert there == here
        assert {result.what for result in here} == {"merge", "compact"}
        assert not any(result.is_lost for result in here)
        for name in ("updates", "many", "late"):
            records = [
                (r["offset"], r["value"])
                for log_segment in segments
                if log_segment.topic == name
                for r in log_segment.rows
            ]
            expected = [(record.offset, record.value) for record in latest(everything[name])]
            assert records == expected, name
        shutil.rmtree(base)
        roots[draws.randrange(2)].rename(base)  # either goes on where the other was
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)


async def planned(root: Path) -> tuple[MaintenanceSession, str, list[SegmentFile]]:
    cluster = await MaintenanceSession.open(FolderStore(root), SystemClock())
    topic = cluster.state.topic("updates")
    return cluster, topic.prefix, list(await (await cluster.table(topic)).segments(0))


def segments_in(root: Path) -> list[Path]:
    return [*root.glob("topics/updates-*/partition=*/*.parquet")]


def nothing(_: int) -> None:
    """Ignore the progress."""


def test_damage_is_named_and_what_is_gone_is_said(spark: "SparkSession", tmp_path: Path) -> None:
    from tidelog.compaction.spark_engine import SparkEngine

    async def main() -> None:
        root = tmp_path / "store"
        await written(root, random.Random(1), is_new=True)
        cluster, prefix, files = await planned(root)
        path = root / prefix / files[1].path
        body = bytearray(path.read_bytes())
        body[40] ^= 1
        path.write_bytes(body)
        engine = SparkEngine(spark, root.as_uri())
        task = Rewrite(prefix, files[:2], "zstd", sum(file.rows for file in files[:2]))
        for engine_ in (engine, InProcess(cluster.store, cluster.clock)):
            with pytest.raises(Corrupt, match="checksum of row group 0 differs") as caught:
                await engine_.write([task], nothing)
            assert caught.value.key == f"{prefix}/{files[1].path}"
        path.unlink()
        with pytest.raises(Unavailable, match=r"Spark: .*does not exist: it was collected"):
            await engine.newest(KeyScan(prefix, files, 0), nothing)
        elsewhere = SparkEngine(spark, (tmp_path / "elsewhere").as_uri())
        with pytest.raises(Unavailable, match=r"Spark: .*elsewhere does not exist"):
            await elsewhere.newest(KeyScan(prefix, files, 0), nothing)
        await cluster.close()
        await cluster.store.close()

    asyncio.run(main())


def test_who_comes_late_with_spark_says_so_and_takes_its_uploads_back(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """The other compactor is done between the planning and the commit."""
    from tidelog.compaction.spark_engine import SparkEngine

    root = tmp_path / "store"

    class Overtaken(SparkEngine):
        async def write(self, tasks, on_rows) -> list[SegmentFile]:
            files = await super().write(tasks, on_rows)
            async with asyncio.timeout(60):
                other = await MaintenanceSession.open(FolderStore(root), SystemClock())
                await compact(other, ["updates"], is_dry=False)
                await other.close()
                await other.store.close()
            return files

    async def main() -> None:
        await written(root, random.Random(2), is_new=True)
        cluster = await MaintenanceSession.open(FolderStore(root), SystemClock())
        engine = Overtaken(spark, root.as_uri())
        told = await compact(cluster, ["updates"], is_dry=False, engine=engine)
        assert [result.is_lost for result in told] == [True] * PARTITIONS
        assert (await scrub(cluster, None, NOW)).is_whole
        topic = cluster.state.topic("updates")
        table = await cluster.table(topic)
        paths = {path.relative_to(root / topic.prefix).as_posix() for path in segments_in(root)}
        assert paths == await table.paths() | removed_paths(await table.removed_since(0))
        await cluster.close()
        await cluster.store.close()

    asyncio.run(main())
