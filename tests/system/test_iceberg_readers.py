"""Readers of the Iceberg catalog see what the Delta table has.

Seals of topics that no client loads write no object of Iceberg.
"""

import json
from pathlib import Path
from typing import Any

import deltalake
import httpx
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table

from tests.support.broker import Broker
from tests.support.counting_s3 import RunningServer
from tests.support.seaweed import REGION

RECORDS = 40
SEALS = 30
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}


def produce(broker: Broker, topic: str, first: int, count: int) -> None:
    records = [
        {"key": f"k{number % 7}", "value": {"n": number}, "partition": number % 2}
        for number in range(first, first + count)
    ]
    url = f"{broker.base_url}/topics/{topic}"
    httpx.post(url, json={"records": records}, headers=JSON).raise_for_status()


def seal(broker: Broker, topic: str) -> None:
    httpx.post(f"{broker.base_url}/admin/topics/{topic}/seal").raise_for_status()


def catalog_of(broker: Broker, **properties: str) -> Catalog:
    return load_catalog("tidelog", type="rest", uri=f"{broker.base_url}/iceberg", **properties)


def rows_of(table: pa.Table) -> list[Any]:
    """The rows in order. PyIceberg reads null lists as empty ones: no record has headers here."""
    assert not any(table.column("headers").to_pylist())
    columns = ["partition", "offset", "timestamp", "key", "value"]
    ordered = table.select(columns).sort_by([("partition", "ascending"), ("offset", "ascending")])
    rows: list[Any] = ordered.to_pylist()
    return rows


def delta_rows(folder: Path) -> list[Any]:
    return rows_of(deltalake.DeltaTable(folder).to_pyarrow_table())


def files_of(table: Table, expression: str) -> int:
    return len(list(table.scan(row_filter=expression).plan_files()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_pyiceberg_and_polars_read_what_delta_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # else it warns
    with Broker(tmp_path, iceberg_refresh_ms=0, merge_cpu_percent=0) as broker:
        broker.create_topic("flights", 2)
        for number in range(4):
            produce(broker, "flights", number * RECORDS, RECORDS)
            seal(broker, "flights")
        (folder,) = (tmp_path / "store" / "topics").iterdir()
        planned = catalog_of(broker, warehouse="planned").load_table("logs.flights")
        assert rows_of(planned.scan().to_arrow()) == delta_rows(folder)
        assert not (folder / "iceberg").exists(), "nothing is written"
        catalog = catalog_of(broker)
        assert catalog.list_tables("logs") == [("logs", "flights")]
        table = catalog.load_table("logs.flights")
        assert rows_of(table.scan().to_arrow()) == delta_rows(folder)
        assert len(list((folder / "iceberg").iterdir())) == 2
        narrow = "partition = 1 and offset >= 25 and offset < 30"
        assert files_of(table, narrow) == files_of(planned, narrow) == 1
        assert table.scan(row_filter=narrow).to_arrow().num_rows == 5
        frame = pl.scan_iceberg(table).filter(pl.col("partition") == 1).collect()
        assert len(frame) == 2 * RECORDS
        first = table.current_snapshot()
        assert first is not None

        store = ("--store", (tmp_path / "store").as_uri())
        for arguments in (
            ("compact", "flights", "--yes", "--engine", "in-process", *store),
            ("delete-records", "flights", "0:30", "1:end", "--yes", *store),
        ):
            broker.cli(*arguments)
            table = catalog.load_table("logs.flights")
            assert rows_of(table.scan().to_arrow()) == delta_rows(folder), arguments
        produce(broker, "flights", 4 * RECORDS, RECORDS)
        seal(broker, "flights")
        table = catalog.load_table("logs.flights")
        assert rows_of(table.scan().to_arrow()) == delta_rows(folder)
        assert table.scan(snapshot_id=first.snapshot_id).to_arrow().num_rows == 4 * RECORDS
        times = [snapshot.timestamp_ms for snapshot in table.snapshots()]
        assert times == sorted(times)
        history = deltalake.DeltaTable(folder).history()
        commit_ms = {commit["version"]: commit["timestamp"] for commit in history}
        committed = [commit_ms[snapshot.snapshot_id - 1] for snapshot in table.snapshots()]
        assert times == committed, "the times of the commits"
        entries = table.inspect.entries().select(["status", "snapshot_id"]).to_pylist()
        assert {entry["snapshot_id"] for entry in entries if entry["status"] == 1} <= {
            snapshot.snapshot_id for snapshot in table.snapshots()
        }
        broker.cli("scrub", *store)
        broker.cli("backup", (tmp_path / "place").as_uri(), *store)
        assert not [path for path in (tmp_path / "place").rglob("*") if "iceberg" in path.name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_pyiceberg_reads_up_to_last_ack(tmp_path: Path) -> None:
    settings = {"iceberg_refresh_ms": 0, "iceberg_freshness": "acked", "seal_enabled": True}
    with Broker(tmp_path, **settings) as broker:
        broker.create_topic("flights", 2)
        catalog = catalog_of(broker)
        for number in range(3):
            produce(broker, "flights", number * RECORDS, RECORDS)
            table = catalog.load_table("logs.flights").scan().to_arrow()
            ends = table.group_by("partition").aggregate([("offset", "max"), ("offset", "count")])
            per_partition = (number + 1) * RECORDS // 2
            assert sorted(ends.to_pylist(), key=lambda row: row["partition"]) == [
                {"partition": n, "offset_max": per_partition - 1, "offset_count": per_partition}
                for n in range(2)
            ]
            if number == 1:
                seal(broker, "flights")


def test_seals_without_a_load_write_no_object_of_iceberg(
    counting_s3: RunningServer, tmp_path: Path
) -> None:
    settings = {
        "s3_endpoint": counting_s3.endpoint_url,
        "s3_region": REGION,
        "iceberg_refresh_ms": 0,
        "commits_per_minute": 0,
    }
    store = f"s3://{counting_s3.bucket}/iceberg"
    with Broker(tmp_path, store, **settings) as broker:
        broker.create_topic("t")
        for number in range(SEALS):
            produce_one(broker, number)
            seal(broker, "t")
        load = f"{broker.base_url}/iceberg/v1/planned/namespaces/logs/tables/t"
        snapshot = httpx.get(load).raise_for_status().json()["metadata"]["snapshots"][-1]
        assert snapshot["summary"]["total-data-files"] == str(SEALS)
        assert counting_s3.counts().of(kind="iceberg", verb="PUT") == 0
        assert counting_s3.counts().of(kind="iceberg") == 0
        httpx.get(load.replace("/planned", "")).raise_for_status()
        assert counting_s3.counts().of(kind="iceberg", verb="PUT") == 2


def produce_one(broker: Broker, number: int) -> None:
    body = json.dumps({"records": [{"value": number}]})
    httpx.post(f"{broker.base_url}/topics/t", content=body, headers=JSON).raise_for_status()
