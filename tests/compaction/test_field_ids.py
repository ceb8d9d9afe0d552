"""Segments of level 1 and 2 in one table: the new ones have field ids, and no reader needs them."""

from pathlib import Path

import deltalake
import polars as pl
import pyarrow.parquet as pq

from tests.support.logs import COLD, append, read_values
from tidelog.compaction.compact import compact
from tidelog.compaction.session import MaintenanceSession
from tidelog.compaction.upgrade import raise_level
from tidelog.storage.broker import Broker
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore


def ids_in(path: Path) -> list[int]:
    fields = pq.ParquetFile(path).schema_arrow
    return [int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in fields]


async def test_segments_with_and_without_field_ids_are_one_table(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    await store.create("cluster.json", [b'{"format":1,"cluster_id":"c0ffee","created_ms":1}'])
    log = await Broker.open(store, COLD, clock=SystemClock(), name="b")
    await log.create_topic("t", 1, {})
    root = tmp_path / log.state.topic("t").prefix
    paths = root / "partition=0"
    path_levels = []
    for level, value in ((1, "a"), (1, "b"), (2, "c"), (2, "d")):
        await raise_level(log.wal, level)
        await append(log, value)
        await log.seal("t")
        (new,) = set(paths.iterdir()) - {path for path, _ in path_levels}
        path_levels.append((new, level))
    assert [ids_in(path) for path, _ in path_levels] == [[-1] * 5] * 2 + [[1, 2, 3, 4, 5]] * 2
    assert await read_values(log) == ["a", "b", "c", "d"]

    def values_of_others() -> list[list[bytes]]:
        table = deltalake.DeltaTable(root)
        by_arrow = table.to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
        by_polars = pl.read_delta(str(root)).sort("offset")
        return [by_arrow["value"].to_pylist(), by_polars["value"].to_list()]

    assert values_of_others() == [[b"a", b"b", b"c", b"d"]] * 2
    cluster = await MaintenanceSession.open(store, SystemClock())
    (merged,) = await compact(cluster, None, is_dry=False)
    assert (merged.segments, merged.segments_after, merged.rows_after) == (4, 1, 4)
    await cluster.close()
    (new,) = set(paths.iterdir()) - {path for path, _ in path_levels}
    assert ids_in(new) == [1, 2, 3, 4, 5]
    assert values_of_others() == [[b"a", b"b", b"c", b"d"]] * 2
    await log.close()
    fresh = await Broker.open(store, COLD, clock=SystemClock(), name="fresh")
    assert await read_values(fresh) == ["a", "b", "c", "d"]
    await fresh.close()
    await store.close()
