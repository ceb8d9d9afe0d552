"""Records that `tidelog replay` writes, in the session of this suite.

A whole run of the command is in tests/system/test_cli_replay.py.
"""

import contextlib
import csv
import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import History
from tidelog.service.cli import replay
from tidelog.service.cli.errors import CommandError
from tidelog.service.cli.replay import FileFormat, frame_of, positions, write
from tidelog.service.cli.store_commands import StoreOptions
from tidelog.service.settings.settings import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def written(
    spark: "SparkSession", history: History, to: Path, file_format: FileFormat, *words: str
) -> int:
    settings = load({"store": history.url})
    frame = frame_of(spark, settings, "events", file_format, positions("events", *words))
    return write(frame, str(to), file_format, overwrite=False)


def test_json_from_offsets_on(spark: "SparkSession", history: History, tmp_path: Path) -> None:
    first = {0: 90, 1: 250, 2: 0}
    expected = [it for it in history.of("events") if it.offset >= first[it.partition]]
    offsets = json.dumps(first)
    count = written(spark, history, tmp_path / "out", "json", offsets, "end")
    assert count == len(expected) > 0
    lines = [
        json.loads(line)
        for file in (tmp_path / "out").glob("*.json")
        for line in file.read_text().splitlines()
    ]
    value_by_place = {(line["partition"], line["offset"]): line.get("value") for line in lines}
    assert value_by_place == {
        (record.partition, record.offset): record.value and record.value.decode()
        for record in expected
    }


def when(us: int) -> str:
    return dt.datetime.fromtimestamp(us / 1e6, dt.UTC).isoformat()


def test_csv_of_a_time_range(spark: "SparkSession", history: History, tmp_path: Path) -> None:
    stamps = sorted({record.timestamp_us for record in history.of("events")})
    first, last = stamps[1], stamps[-1]
    expected = [it for it in history.of("events") if first <= it.timestamp_us < last]
    bounds = [f"@{when(first)}", f"@{when(last)}"]
    count = written(spark, history, tmp_path / "out", "csv", *bounds)
    rows = [
        row
        for file in (tmp_path / "out").glob("*.csv")
        for row in csv.DictReader(file.read_text().splitlines())
    ]
    assert count == len(rows) == len(expected) > 0
    places = sorted((int(row["partition"]), int(row["offset"])) for row in rows)
    assert places == sorted((it.partition, it.offset) for it in expected)


def test_a_folder_that_cannot_be_made_is_named_with_the_cause(
    spark: "SparkSession", history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    to = str(tmp_path / "file" / "out")
    session = contextlib.nullcontext(spark)
    monkeypatch.setattr(replay, "spark_session", lambda *_: session)
    with pytest.raises(CommandError) as failure:
        replay.replay("events", to, store=StoreOptions(history.url))
    said = str(failure.value)
    assert said.startswith(f"{to} cannot be written: ")
    assert "An error occurred while calling" not in said
