"""Records that `delete-records` deletes are gone for other engines too."""

from collections.abc import Callable
from pathlib import Path

import deltalake
import polars as pl
import pytest

from tests.support.foreign_engines import (
    END,
    ROWS,
    SEGMENTS,
    batch_offsets,
    caring,
    filled,
    table_uri,
)
from tidelog.compaction.retention import delete_records

FIRST_KEPT = ROWS + ROWS // 2
"""In the middle of the second segment."""


def by_deltalake(uri: str) -> list[int]:
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(uri))
    batches = query.execute('select "offset" from t')
    return sorted(offset for batch in batches for offset in batch.column("offset").to_pylist())


def by_polars(uri: str) -> list[int]:
    return sorted(pl.scan_delta(uri).select("offset").collect()["offset"].to_list())


@pytest.mark.parametrize("read", [by_deltalake, by_polars])
def test_other_engines_do_not_see_deleted_records(
    tmp_path: Path, read: Callable[[str], list[int]]
) -> None:
    filled(tmp_path)
    assert read(table_uri(tmp_path)) == list(range(SEGMENTS * ROWS))
    cut = {0: FIRST_KEPT}
    caring(tmp_path, lambda cluster: delete_records(cluster, "t", cut, is_dry=False))
    assert batch_offsets(tmp_path) == list(range(FIRST_KEPT, END))
    assert read(table_uri(tmp_path)) == list(range(FIRST_KEPT, SEGMENTS * ROWS))
