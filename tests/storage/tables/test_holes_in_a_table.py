"""Another engine removes whole segments from a table. Readers must not pass over the hole."""

import logging
from collections.abc import Callable
from pathlib import Path

import deltalake
import pytest

from tests.support.foreign_engines import (
    END,
    batch_offsets,
    broker_records,
    caring,
    filled,
    outcome,
    stream_offsets,
    table,
)
from tidelog.compaction.compact import compact
from tidelog.compaction.garbage import Grace
from tidelog.compaction.scrub import scrub
from tidelog.storage.core.errors import Corrupt, LogError

ALL = list(range(END))


def restore(delta: deltalake.DeltaTable) -> None:
    """The newest three of five segments leave the table."""
    delta.restore(2)


def delete(delta: deltalake.DeltaTable) -> None:
    """The third of five segments leaves the table."""
    delta.delete('"offset" >= 20 and "offset" < 30')


Remove = Callable[[deltalake.DeltaTable], None]
ways = pytest.mark.parametrize("remove", [restore, delete])


def is_whole_or_refused(answer: list[int] | LogError) -> bool:
    """A reader gives all records, or says that the table is damaged."""
    return answer == ALL or isinstance(answer, Corrupt)


@ways
def test_a_batch_read_never_passes_over_a_hole(tmp_path: Path, remove: Remove) -> None:
    filled(tmp_path)
    assert batch_offsets(tmp_path) == ALL
    remove(table(tmp_path))
    assert is_whole_or_refused(outcome(lambda: batch_offsets(tmp_path)))


@ways
def test_a_stream_never_passes_over_a_hole(tmp_path: Path, remove: Remove) -> None:
    def streamed() -> list[int]:
        return [offset for batch in stream_offsets(tmp_path, 15) for offset in batch]

    filled(tmp_path)
    assert streamed() == ALL
    remove(table(tmp_path))
    assert is_whole_or_refused(outcome(streamed))


@ways
def test_a_reader_that_may_lose_data_says_what_it_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, remove: Remove
) -> None:
    filled(tmp_path)
    remove(table(tmp_path))
    left = batch_offsets(tmp_path, failOnDataLoss="false")
    assert set(range(20)) <= set(left)
    assert set(range(50, END)) <= set(left)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert left == ALL or warnings


@ways
def test_a_new_broker_says_that_a_table_with_a_hole_is_damaged(
    tmp_path: Path, remove: Remove
) -> None:
    records = filled(tmp_path)
    remove(table(tmp_path))
    try:
        served_records = broker_records(tmp_path)
    except Corrupt:
        return
    assert served_records == records


def test_compaction_never_merges_over_a_hole(tmp_path: Path) -> None:
    filled(tmp_path)
    delete(table(tmp_path))
    before = table(tmp_path).file_uris()
    caring(tmp_path, lambda cluster: compact(cluster, None, is_dry=False))
    assert sorted(table(tmp_path).file_uris()) == sorted(before)


def test_compaction_by_key_never_hides_a_loss_from_scrub(tmp_path: Path) -> None:
    def is_whole() -> bool:
        return caring(tmp_path, lambda cluster: scrub(cluster, None, Grace())).is_whole

    filled(tmp_path, cleanup_policy="compact")
    assert is_whole()
    delete(table(tmp_path))
    assert not is_whole()
    caring(tmp_path, lambda cluster: compact(cluster, None, is_dry=False, is_forced=True))
    assert not is_whole()
