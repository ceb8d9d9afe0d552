"""Which engine a compaction runs on, and what is said where there is none."""

import importlib.util

import pytest

from tidelog.service.cli.compact import EngineOptions
from tidelog.service.cli.errors import CommandError
from tidelog.service.settings.settings import Settings

SETTINGS = Settings(compact_spark_bytes=1000)


def test_larger_go_to_spark_unless_engine_is_named() -> None:
    pytest.importorskip("pyspark")
    for named, size, expected in (
        ("auto", 1000, "in-process"),
        ("auto", 1001, "spark"),
        ("in-process", 1001, "in-process"),
        ("spark", 0, "spark"),
    ):
        assert EngineOptions(named).of(size, SETTINGS) == expected


def test_without_spark_only_request_for_spark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert EngineOptions("auto").of(2000, SETTINGS) == "in-process"
    missing = r"^Spark is not installed: pip install 'tidelog\[spark\]'$"
    with pytest.raises(CommandError, match=missing):
        EngineOptions("spark").of(2000, SETTINGS)
