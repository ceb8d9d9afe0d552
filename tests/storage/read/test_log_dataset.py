"""`tidelog.read` against the records as they were produced, at every stage of a log's life."""

import asyncio
import datetime as dt
import operator
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.broker_log import TIME_MS, BrokerLog, open_log
from tests.support.properties import examples
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.read import LogDataset, read
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.core.errors import Corrupt, InvalidRequest, Unavailable, UnknownTopic
from tidelog.storage.read import segment_reader
from tidelog.storage.read.log_dataset import SEALED, TAIL
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

COLUMNS = ["offset", "timestamp", "key", "value", "headers", "partition"]
PARTITIONS = 2
Row = dict[str, Any]


class Where(NamedTuple):
    """A condition for Arrow, and the same in Python; None is SQL's unknown."""

    expression: pc.Expression
    holds: Callable[[Row], bool | None]


def _compared(column: str, name: str, value: Any) -> Where:
    compare = getattr(operator, name)
    scalar = pa.scalar(value, pa.timestamp("us", "UTC")) if column == "timestamp" else value

    def holds(row: Row) -> bool | None:
        return None if row[column] is None else compare(row[column], value)

    return Where(compare(pc.field(column), scalar), holds)


def _time(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp((TIME_MS + ms) / 1000, ZoneInfo("UTC"))  # as Arrow's


def _and(first: Where, second: Where) -> Where:
    def holds(row: Row) -> bool | None:
        sides = {first.holds(row), second.holds(row)}
        return False if False in sides else None if None in sides else True

    return Where(first.expression & second.expression, holds)


def _or(first: Where, second: Where) -> Where:
    def holds(row: Row) -> bool | None:
        sides = {first.holds(row), second.holds(row)}
        return True if True in sides else None if None in sides else False

    return Where(first.expression | second.expression, holds)


def _not(inner: Where) -> Where:
    def holds(row: Row) -> bool | None:
        answer = inner.holds(row)
        return None if answer is None else not answer

    return Where(~inner.expression, holds)


def _is_null(column: str) -> Where:
    return Where(pc.field(column).is_null(), lambda row: row[column] is None)


COMPARISONS = st.sampled_from(["lt", "le", "eq", "ne", "gt", "ge"])
LEAVES = st.one_of(
    st.builds(_compared, st.just("offset"), COMPARISONS, st.integers(-1, 130)),
    st.builds(_compared, st.just("partition"), COMPARISONS, st.integers(-1, 2)),
    st.builds(_compared, st.just("timestamp"), COMPARISONS, st.integers(-1, 130).map(_time)),
    st.builds(_compared, st.just("key"), COMPARISONS, st.sampled_from([b"k0", b"k3", b"none"])),
    st.builds(_is_null, st.sampled_from(["key", "value", "headers", "timestamp"])),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_and, inner, inner), st.builds(_or, inner, inner), st.builds(_not, inner)
    ),
    max_leaves=5,
)
QUERIES = st.tuples(
    st.one_of(st.none(), st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True)),
    st.one_of(st.none(), CONDITIONS),
)
STEPS = st.lists(
    st.sampled_from(["append", "append", "seal", "seal one", "merge", "retain", "delete"]),
    min_size=2,
    max_size=9,
)


class ProducedLog:
    """A log on a folder, and the records that it should have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: list[Row] = []
        self._ends = [0] * PARTITIONS

    async def run(self, step: str, log: Broker, numbers: random.Random) -> None:
        match step:
            case "append":
                await self._append(log, numbers)
            case "seal":
                await log.records.seal("t")
            case "seal one":
                await log.records.seal("t", [numbers.randrange(PARTITIONS)])
            case _:
                await self._maintain(step, log, numbers)

    async def _append(self, log: Broker, numbers: random.Random) -> None:
        parts = []
        for partition in range(PARTITIONS):
            first, count = self._ends[partition], numbers.randint(1, 20)
            offsets = range(first, first + count)
            stamps = [TIME_MS + offset + numbers.randint(-2, 2) for offset in offsets]
            keys = [None if numbers.random() < 0.2 else b"k%d" % (n % 5) for n in offsets]
            values = [None if numbers.random() < 0.1 else b"v%d" % n for n in offsets]
            headers: list[Headers | None] = [
                numbers.choice([None, [("h", b"x"), ("h", None)]]) for _ in offsets
            ]
            parts.append((partition, Rows(stamps, keys, values, headers)))
            self._ends[partition] += count
            for index, offset in enumerate(offsets):
                named = headers[index]
                self.rows.append(
                    {
                        "offset": offset,
                        "timestamp": _time(stamps[index] - TIME_MS),
                        "key": keys[index],
                        "value": values[index],
                        "headers": named and [{"key": key, "value": value} for key, value in named],
                        "partition": partition,
                    }
                )
        await log.records.append(log.state.topic("t"), parts, size=99, is_json=False)

    async def _maintain(self, step: str, log: Broker, numbers: random.Random) -> None:
        cluster = await MaintenanceSession.open(FolderStore(self.root), SystemClock())
        if step == "merge":
            await compact(cluster, None, is_dry=False)
        elif step == "retain":
            await retain(cluster, None, is_dry=False)
        else:
            partition = numbers.randrange(PARTITIONS)
            until = numbers.randint(0, self._ends[partition])
            await delete_records(cluster, "t", {partition: until}, is_dry=False)
        await cluster.close()
        await cluster.store.close()
        await log.refresh()
        starts = [
            (await log.records.offsets("t", partition)).log_start_offset
            for partition in range(PARTITIONS)
        ]
        self.rows = [row for row in self.rows if row["offset"] >= starts[row["partition"]]]


def in_order(rows: list[Row]) -> list[str]:
    """Rows have no order, but those that are twice count twice."""
    return sorted(map(repr, rows))


@examples(12)
@given(seed=st.integers(0, 2**32), steps=STEPS, data=st.data())
def test_any_read_equals_the_records_as_produced(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[str], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("produced")
    numbers, produced = random.Random(seed), ProducedLog(root)
    with asyncio.Runner() as runner:
        log = runner.run(open_log(FolderStore(root)))
        runner.run(
            log.topics.create("t", PARTITIONS, {"retention.ms": "-1", "retention.bytes": "9000"})
        )
        for step in ["append", *steps]:
            runner.run(produced.run(step, log, numbers))
            for columns, where in data.draw(st.lists(QUERIES, min_size=2, max_size=2)):
                expected = [
                    {name: row[name] for name in columns or COLUMNS}
                    for row in produced.rows
                    if where is None or where.holds(row) is True
                ]
                dataset = read(str(root), "t", columns, None if where is None else where.expression)
                assert in_order(dataset.to_table().to_pylist()) == in_order(expected)
                assert dataset.count_rows() == len(expected)
        runner.run(log.close())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[BrokerLog]:
    """`t`: two partitions, 200 records each, of which 100 are sealed in two segments."""
    with BrokerLog(tmp_path) as broker:
        broker.create("t", PARTITIONS)
        for first in (0, 50, 100, 150):
            values = [b"value-%d" % n for n in range(first, first + 50)]
            broker.append("t", {0: values, 1: values}, keys=[b"k%d" % (n % 5) for n in range(50)])
            if first < 100:
                broker.seal("t")
        yield broker


class OpenedFiles:
    """Counts the footers that reads open."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        original = segment_reader.SegmentReader.footer

        async def footer(reader: segment_reader.SegmentReader, key: str, size: int) -> object:
            self.keys.append(key)
            return await original(reader, key, size)

        patch.setattr(segment_reader.SegmentReader, "footer", footer)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedFiles:
    return OpenedFiles(monkeypatch)


@pytest.mark.parametrize(
    ("where", "count", "files"),
    [
        (pc.field("offset") == 20, 2, 2),
        ((pc.field("offset") == 20) & (pc.field("partition") == 1), 1, 1),
        (pc.field("offset") >= 100, 200, 0),
        (pc.field("partition") == 7, 0, 0),
        ((pc.field("offset") < 5) | (pc.field("offset") > 195), 18, 2),
        (pc.field("timestamp") < _time(50), 100, 2),
        ([("partition", "=", 0), ("offset", "in", [60, 61])], 2, 1),
    ],
)
def test_bounds_prune_files_before_a_footer_is_opened(
    log: BrokerLog, opened: OpenedFiles, tmp_path: Path, where: Any, count: int, files: int
) -> None:
    assert read(str(tmp_path), "t", where=where).to_table().num_rows == count
    assert len(opened.keys) == files


def test_counts_and_offsets_open_no_file(
    log: BrokerLog, opened: OpenedFiles, tmp_path: Path
) -> None:
    dataset = read(str(tmp_path), "t")
    connection = duckdb.connect()
    connection.register("t", dataset)
    answer = connection.sql('select count(*), sum("offset"), max(partition) from t').fetchall()
    assert answer == [(400, 2 * sum(range(200)), 1)]
    assert dataset.count_rows(pc.field("partition") == 1) == 200
    assert opened.keys == []


def test_compacted_segments_count_by_their_rows(tmp_path: Path) -> None:
    with BrokerLog(tmp_path) as broker:
        broker.create("c", 1, cleanup_policy="compact")
        for _ in range(2):
            broker.append("c", {0: [b"v"] * 50}, keys=[b"k%d" % (n % 5) for n in range(50)])
            broker.seal("c")

        async def run() -> None:
            cluster = await MaintenanceSession.open(FolderStore(tmp_path), SystemClock())
            await compact(cluster, None, is_dry=False)
            await cluster.close()
            await cluster.store.close()

        asyncio.run(run())
        broker.append("c", {0: [b"last"]}, keys=[b"k0"])
    dataset = read(str(tmp_path), "c")
    assert dataset.count_rows() == len(dataset.to_table()) == 6
    assert sorted(dataset.to_table(columns=["offset"])["offset"].to_pylist()) == [*range(95, 101)]


def test_engines_see_table_and_tail(log: BrokerLog, tmp_path: Path) -> None:
    dataset = read(str(tmp_path), "t")
    scan = pl.scan_pyarrow_dataset(dataset).filter(pl.col("offset") >= 99).select("value")
    assert len(scan.collect()) == 202
    assert pl.DataFrame(dataset).shape == (400, 6)
    frame = read(str(tmp_path), "t", ["offset", "key"]).to_table().to_pandas()
    assert list(frame.columns) == ["offset", "key"]
    assert len(frame) == 400
    connection = duckdb.connect()
    connection.register("t", dataset)
    sql = "select count(*) from t where decode(value) = 'value-150' and key is not null"
    assert connection.sql(sql).fetchall() == [(2,)]


def test_sides_split_at_the_sealed_end(log: BrokerLog, tmp_path: Path) -> None:
    dataset = read(str(tmp_path), "t")

    def offsets(topic: Any) -> list[int]:
        side = LogDataset(topic, dataset._open_store)
        return sorted(side.to_table()["offset"].to_pylist())[::PARTITIONS]

    assert offsets(SEALED.of(dataset._topic)) == [*range(100)]
    assert offsets(TAIL.of(dataset._topic)) == [*range(100, 200)]


def test_a_dataset_keeps_its_snapshot(log: BrokerLog, tmp_path: Path) -> None:
    dataset = read(str(tmp_path), "t")
    log.append("t", {0: [b"later"]})
    log.seal("t")
    assert dataset.to_table().num_rows == 400
    assert read(str(tmp_path), "t").to_table().num_rows == 401


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"columns": ["of"]}, "unknown column 'of': columns are offset, timestamp, key"),
        ({"where": pc.field("of") == 1}, r"where: No match for FieldRef.Name\(of\)"),
        ({"where": pc.field("offset") == "x"}, "where: Function 'equal' has no kernel"),
        ({"where": [("offset", "?", 1)]}, "where: "),
    ],
)
def test_a_wrong_question_is_refused(
    log: BrokerLog, tmp_path: Path, asked: dict, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(str(tmp_path), "t", **asked)


def test_an_unknown_topic_is_refused(log: BrokerLog, tmp_path: Path) -> None:
    with pytest.raises(UnknownTopic):
        read(str(tmp_path), "of")


def test_what_arrow_would_answer_wrong_is_refused(log: BrokerLog, tmp_path: Path) -> None:
    dataset: ds.Dataset = read(str(tmp_path), "t")
    for method in ("get_fragments", "sort_by", "join", "replace_schema"):
        with pytest.raises(TypeError, match="use to_table"):
            getattr(dataset, method)("offset")
    assert (
        dataset.filter(pc.field("offset") < 5).filter(pc.field("partition") == 0).count_rows() == 5
    )


@pytest.mark.parametrize("folder", ["topics", "wal"])
def test_damage_is_an_error(log: BrokerLog, tmp_path: Path, folder: str) -> None:
    dataset = read(str(tmp_path), "t")
    for path in (tmp_path / folder).rglob("*"):
        if path.is_file() and "_delta_log" not in path.parts:
            body = bytearray(path.read_bytes())
            for index in range(len(body) // 4, len(body) * 3 // 4):
                body[index] ^= 0x5A
            path.write_bytes(body)
    with pytest.raises(Corrupt):
        dataset.to_table()


def test_a_collected_object_is_unavailable(log: BrokerLog, tmp_path: Path) -> None:
    dataset = read(str(tmp_path), "t")
    for path in (tmp_path / "topics").rglob("*.parquet"):
        path.unlink()
    with pytest.raises(Unavailable, match="read again"):
        dataset.to_table()


def test_as_of_is_the_log_at_that_time(tmp_path: Path) -> None:
    with BrokerLog(tmp_path) as broker:
        broker.create("t", 1)
        broker.append("t", {0: [b"a", b"b"]})
        time_ms = SystemClock().now_ms()
        while SystemClock().now_ms() <= time_ms + 1:
            pass
        broker.append("t", {0: [b"c"]})
        broker.add_partitions("t", 2)
        broker.append("t", {1: [b"d"]})
        broker.seal("t")
    then = dt.datetime.fromtimestamp((time_ms + 1) / 1000, dt.UTC)
    assert sorted(read(str(tmp_path), "t", as_of=then).to_table()["value"].to_pylist()) == [
        b"a",
        b"b",
    ]
    assert len(read(str(tmp_path), "t").to_table()) == 4
    with pytest.raises(InvalidRequest, match="did not exist at 2001"):
        read(str(tmp_path), "t", as_of=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))


async def log_without_entries(root: Path) -> None:
    """Write a checkpoint, and delete the WAL's first entry, as collection does after an hour."""
    broker = await open_log(FolderStore(root))
    await broker._log.wal.checkpoint()
    await broker.close()
    min((root / "wal").iterdir()).unlink()


def test_as_of_refuses_what_is_not_known(log: BrokerLog, tmp_path: Path) -> None:
    time_ms = SystemClock().now_ms()
    while SystemClock().now_ms() <= time_ms:
        pass
    then = dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC)
    assert read(str(tmp_path), "t", as_of=then).count_rows() == 400

    async def delete() -> None:
        cluster = await MaintenanceSession.open(FolderStore(tmp_path), SystemClock())
        await delete_records(cluster, "t", {1: 5}, is_dry=False)
        await cluster.close()
        await cluster.store.close()

    asyncio.run(delete())
    with pytest.raises(InvalidRequest, match="partition t-1 has lost records of that time"):
        read(str(tmp_path), "t", as_of=then)
    asyncio.run(log_without_entries(tmp_path))
    with pytest.raises(InvalidRequest, match="the WAL no longer has the entries of that time"):
        read(str(tmp_path), "t", as_of=then)
