"""Which engine a compaction runs on, and what is said where there is none."""

import importlib.util

import pytest

from tidelog.service.cli.results import CommandError
from tidelog.service.cli.stores.engines import EngineChoice, EngineName
from tidelog.service.settings.settings import Settings

SETTINGS = Settings(compact_spark_bytes=1000)


def test_larger_go_to_spark_unless_engine_is_named() -> None:
    pytest.importorskip("pyspark")
    here, spark = EngineName.IN_PROCESS, EngineName.SPARK
    for named, size, expected in (
        (EngineName.AUTO, 1000, here),
        (EngineName.AUTO, 1001, spark),
        (here, 1001, here),
        (spark, 0, spark),
    ):
        assert EngineChoice(named, None, SETTINGS).of(size) is expected


def test_without_spark_only_request_for_spark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert EngineChoice(EngineName.AUTO, None, SETTINGS).of(2000) is EngineName.IN_PROCESS
    missing = r"^Spark is not installed: pip install 'tidelog\[spark\]'$"
    with pytest.raises(CommandError, match=missing):
        EngineChoice(EngineName.SPARK, None, SETTINGS).of(2000)
