"""Other people's ways to the newest record of each key, and the bare way to merge.

All are on the same files. Each reads the segments as plain Parquet and writes one plain Parquet
file in offset order.

    python -m tests.tools.bench.maintenance.ways WAY FOLDER OUT

as a process of its own, so that its peak memory is its own. Ours are ways, too: `merge` and
`compact` are what `tidelog compact --yes` does, up to the commit to the table.
"""

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

WRITING = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
GROUP_ROWS = 10_000
"""As segments have them: no engine has to write smaller row groups."""


def main() -> None:
    way, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    files = sorted(str(path) for path in folder.glob("topics/*/partition=0/*.parquet"))
    for name in LOADED.get(way, ()):
        importlib.import_module(name)
    pa.array([way])  # pyarrow looks for pandas at the first one, and here it is installed
    started = time.perf_counter()
    rows = WAYS[way](folder, files, out)
    seconds = time.perf_counter() - started
    print(json.dumps({"rows": rows, "seconds": seconds, "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Of this program; `ru_maxrss` is also that of the process that it was forked from."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def ours(folder: Path, _: list[str], __: Path) -> int:
    """Merging or compaction, whichever the topic wants."""
    from tidelog.compaction.compact import compact
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.storage.runtime.clock import SystemClock
    from tidelog.storage.runtime.malloc import keep_freed_columns
    from tidelog.storage.store.folder import FolderStore

    keep_freed_columns()  # as the command line does

    async def run() -> int:
        store = FolderStore(folder)
        cluster = await MaintenanceSession.open(store, SystemClock())
        results = await compact(cluster, None, is_dry=False)
        await cluster.close()
        await store.close()
        assert results, "nothing was due"
        return sum(result.rows_after for result in results)

    return asyncio.run(run())


def bare_merge(_: Path, files: list[str], out: Path) -> int:
    """Read and write, file by file."""
    rows = 0
    schema = pq.read_schema(files[0])
    with pq.ParquetWriter(str(out), schema, **WRITING) as writer:
        for path in files:
            table = pq.ParquetFile(path).read()
            writer.write_table(table, row_group_size=GROUP_ROWS)
            rows += table.num_rows
    return rows


def by_duckdb(_: Path, files: list[str], out: Path) -> int:
    import duckdb

    with duckdb.connect() as session:
        session.execute("SET threads = 2")
        session.execute(
            f"""
            COPY (
                SELECT * FROM read_parquet({files!r}, hive_partitioning = false)
                WHERE "offset" IN (
                    SELECT max("offset")
                    FROM read_parquet({files!r}, hive_partitioning = false) GROUP BY key
                )
                ORDER BY "offset"
            ) TO '{out}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 122880)
            """
        )
    return pq.read_metadata(out).num_rows


def by_polars(_: Path, files: list[str], out: Path) -> int:
    import polars as pl

    scan = pl.scan_parquet(files, hive_partitioning=False)
    newest = (
        scan.group_by("key")
        .agg(pl.col("offset").max())
        .select("offset")
        .collect(engine="streaming")
    )
    newest_rows = scan.filter(pl.col("offset").is_in(newest["offset"].implode()))
    newest_rows.sink_parquet(out, compression="zstd", compression_level=1)
    return pq.read_metadata(out).num_rows


def by_pyarrow(_: Path, files: list[str], out: Path) -> int:
    dataset = ds.dataset(files, format="parquet")
    newest = dataset.to_table(columns=["key", "offset"]).group_by("key")
    offsets = newest.aggregate([("offset", "max")]).column("offset_max").combine_chunks()
    newest_offsets = np.sort(offsets.to_numpy())
    rows = 0
    with pq.ParquetWriter(str(out), dataset.schema, **WRITING) as writer:
        for batch in dataset.to_batches(batch_size=128 * 1024):
            own = batch.column("offset").to_numpy()
            first, end = np.searchsorted(newest_offsets, [own[0], own[-1] + 1])
            newest_rows = batch.take(pa.array(np.searchsorted(own, newest_offsets[first:end])))
            rows += newest_rows.num_rows
            if newest_rows.num_rows:
                writer.write_table(pa.Table.from_batches([newest_rows]), row_group_size=GROUP_ROWS)
    return rows


WAYS: dict[str, Callable[[Path, list[str], Path], int]] = {
    "ours": ours,
    "bare pyarrow": bare_merge,
    "DuckDB": by_duckdb,
    "Polars": by_polars,
    "pyarrow": by_pyarrow,
}

LOADED = {
    "ours": ("tidelog.compaction.compact", "tidelog.storage.store.folder"),
    "DuckDB": ("duckdb",),
    "Polars": ("polars",),
}
"""Before the clock starts."""


if __name__ == "__main__":
    main()
