"""A topic's table opens in other people's engines, below the store's own prefix."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import Protocol

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.moto import Moto
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY
from tidelog.storage.codec import segment
from tidelog.storage.codec.record_columns import RECORD_SCHEMA, Headers, Rows, batch_of_rows
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import Created, ObjectStore
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.tables.delta import TABLE_SCHEMA, open_table
from tidelog.storage.tables.manifest import seal_app_id

PREFIX = object_keys.topic("orders", "0af3")
START_MS = 1_700_000_000_000
COUNT = 12_000  # more than one row group

HEADERS: list[Headers | None] = [None, [], [("trace", b"\x01")], [("a", None), ("ü", b"")]]


def record(partition: int, offset: int) -> tuple[int, bytes | None, bytes | None, Headers | None]:
    return (
        START_MS + 7 * offset,
        None if offset % 5 == 0 else b"key-%d" % (offset % 100),
        None if offset % 11 == 0 else b'{"partition": %d, "offset": %d}' % (partition, offset),
        HEADERS[offset % 4],
    )


def batch(partition: int, base: int, end: int) -> pa.RecordBatch:
    timestamps, record_keys, values, headers = zip(
        *(record(partition, offset) for offset in range(base, end)), strict=True
    )
    rows = Rows(list(timestamps), list(record_keys), list(values), list(headers))
    offsets = pa.array(range(base, end), pa.int64())
    return pa.RecordBatch.from_arrays(
        [offsets, *batch_of_rows([rows]).columns], schema=RECORD_SCHEMA
    )


@pytest.fixture(scope="module", params=["producer", "lz4", "snappy", "gzip", "uncompressed"])
def uri(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return asyncio.run(written(tmp_path_factory.mktemp("store"), request.param))


async def written(root: Path, codec: str) -> str:
    """The URI of a table of two partitions, sealed in two commits."""
    store = FolderStore(root)
    table = open_table(store, PREFIX, "orders")
    for base, end in ((0, COUNT), (COUNT, COUNT + 10)):
        files = []
        for partition in (0, 1):
            written_segment = segment.write(
                [batch(partition, base, end)], codec=codec, is_json=False
            )
            path = object_keys.segment(partition, base, end, "0123456789abcdef")
            assert (
                await store.create(f"{PREFIX}/{path}", [memoryview(written_segment.body)])
                is Created.DONE
            )
            times = (written_segment.timestamp_min, written_segment.timestamp_max)
            files.append(
                SegmentFile(
                    path, partition, base, end, written_segment.size, written_segment.rows, *times
                )
            )
        await table.add(files, {seal_app_id(partition): end for partition in (0, 1)})
    await store.close()
    return store.table_uri(PREFIX)


def expected(partition: int) -> list[dict[str, object]]:
    names = ("timestamp", "key", "value", "headers")
    rows = []
    for offset in range(COUNT + 10):
        row = dict(zip(names, record(partition, offset), strict=True))
        stamp = dt.timedelta(milliseconds=record(partition, offset)[0])
        row["timestamp"] = dt.datetime.fromtimestamp(0, dt.UTC) + stamp
        if (headers := HEADERS[offset % 4]) is not None:
            row["headers"] = [{"key": key, "value": value} for key, value in headers]
        rows.append({"offset": offset, **row, "partition": partition})
    return rows


def in_order(table: pa.Table) -> list[dict[str, object]]:
    names = [field.name for field in TABLE_SCHEMA]
    return (
        table.select(names)
        .sort_by([("partition", "ascending"), ("offset", "ascending")])
        .to_pylist()
    )


def test_deltalake_and_arrow_read_it(uri: str) -> None:
    delta_table = deltalake.DeltaTable(uri)
    table = delta_table.to_pyarrow_table()
    assert in_order(table) == expected(0) + expected(1)
    for field in TABLE_SCHEMA:
        assert table.schema.field(field.name).type == field.type
    partition_rows = delta_table.to_pyarrow_table(
        filters=[("partition", "=", 1)], columns=["offset"]
    )
    assert partition_rows.num_rows == COUNT + 10


def test_datafusion_skips_files_by_statistics(uri: str) -> None:
    delta_table = deltalake.DeltaTable(uri)
    predicate = f'"offset" >= {COUNT}'
    assert len(delta_table.file_uris()) == 4
    assert len(delta_table.file_uris(file_pruning_predicate=predicate)) == 2
    last = START_MS + 7 * (COUNT + 9)
    last_time = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=last)
    predicate = f"\"timestamp\" >= '{last_time.isoformat()}'"
    assert len(delta_table.file_uris(file_pruning_predicate=predicate)) == 2
    reader = pa.RecordBatchReader.from_stream(delta_table.scan(predicate='"offset" = 3'))
    assert sorted(reader.read_all().column("partition").to_pylist()) == [0, 1]


def test_polars_reads_it(uri: str) -> None:
    frame = pl.scan_delta(uri)
    assert frame.collect_schema()["timestamp"] == pl.Datetime("us", "UTC")
    assert in_order(frame.collect().to_arrow().cast(TABLE_SCHEMA)) == expected(0) + expected(1)
    selected = frame.filter((pl.col("partition") == 1) & (pl.col("offset") >= COUNT)).collect()
    assert sorted(selected["offset"].to_list()) == list(range(COUNT, COUNT + 10))


def test_duckdb_reads_its_files(uri: str) -> None:
    # Its own Delta reader is an extension that it downloads; the files and their paths say enough.
    files = deltalake.DeltaTable(uri).file_uris()
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        relation = connection.read_parquet(files, hive_partitioning=True)
        types = dict(zip(relation.columns, map(str, relation.types), strict=True))
        assert types["timestamp"] == "TIMESTAMP WITH TIME ZONE"
        assert types["headers"] == 'STRUCT("key" VARCHAR, "value" BLOB)[]'
        table = relation.to_arrow_table()
    assert in_order(table.cast(_aligned(table))) == expected(0) + expected(1)


def _aligned(table: pa.Table) -> pa.Schema:
    """TABLE_SCHEMA in the table's order of columns."""
    return pa.schema([TABLE_SCHEMA.field(name) for name in table.column_names])


class TableStore(ObjectStore, Protocol):
    def table_uri(self, key: str) -> str: ...


@pytest.mark.parametrize(
    "store", ["folder", "moto", pytest.param("seaweed", marks=pytest.mark.seaweed)], indirect=True
)
async def test_tables_and_objects_share_a_prefix(store: TableStore) -> None:
    uri = store.table_uri("topics/orders-1")
    options = await store.deltalake_options() if isinstance(store, S3Store) else {}

    def append(number: int) -> None:
        rows = pa.table({"offset": pa.array([number], pa.int64())})
        write_deltalake(uri, rows, mode="append", storage_options=options)

    await asyncio.to_thread(append, 0)
    # Each commit is a create-if-absent too: two at once both end up in the table.
    await asyncio.gather(*(asyncio.to_thread(append, number) for number in (1, 2)))
    table = await asyncio.to_thread(DeltaTable, uri, storage_options=options)
    rows = await asyncio.to_thread(table.to_pyarrow_table)
    assert sorted(rows.column("offset").to_pylist()) == [0, 1, 2]
    keys = [info.key async for info in store.list("topics/orders-1/_delta_log/0")]
    assert keys == [f"topics/orders-1/_delta_log/{number:020d}.json" for number in range(3)]
    assert b'"add"' in await store.get(keys[2])


async def test_options_for_deltalake(moto_server: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials as they are at that moment, for an endpoint of one's own in either style."""
    options = S3Options(endpoint_url=moto_server.endpoint_url, region=REGION)
    store = await S3Store.open(moto_server.bucket, "/a//", options)
    assert store.table_uri("topics/t-1") == f"s3://{moto_server.bucket}/a/topics/t-1"
    options = await store.deltalake_options()
    await store.close()
    assert options == {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ALLOW_HTTP": "true",
        "AWS_CONDITIONAL_PUT": "etag",
        "AWS_ENDPOINT_URL": moto_server.endpoint_url,
        "AWS_REGION": REGION,
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }
    monkeypatch.setenv("AWS_SESSION_TOKEN", "for an hour")
    virtual = S3Store("bucket", "", S3Options(endpoint_url="https://s3.test", path_style=False))
    assert await virtual.deltalake_options() == {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": "for an hour",
        "AWS_ALLOW_HTTP": "false",
        "AWS_CONDITIONAL_PUT": "etag",
        "AWS_ENDPOINT_URL": "https://bucket.s3.test",
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }
    aws = S3Store("bucket", "p", S3Options(region="eu-central-1"))
    options = await aws.deltalake_options()
    assert "AWS_ENDPOINT_URL" not in options
    assert (options["AWS_REGION"], options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"]) == (
        "eu-central-1",
        "true",
    )
