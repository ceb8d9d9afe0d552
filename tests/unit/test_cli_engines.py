"""Which engine a compaction runs on, and what is said where there is none."""

import importlib.util

import pytest

from service.cli_engines import Choice, EngineName
from service.cli_results import CommandError
from service.settings import Settings

SETTINGS = Settings(compact_spark_bytes=1000)


def test_the_larger_go_to_spark_unless_an_engine_is_named() -> None:
    pytest.importorskip("pyspark")
    here, spark = EngineName.IN_PROCESS, EngineName.SPARK
    for named, size, expected in (
        (EngineName.AUTO, 1000, here),
        (EngineName.AUTO, 1001, spark),
        (here, 1001, here),
        (spark, 0, spark),
    ):
        assert Choice(named, None, SETTINGS).of(size) is expected


def test_without_spark_only_who_names_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert Choice(EngineName.AUTO, None, SETTINGS).of(2000) is EngineName.IN_PROCESS
    with pytest.raises(CommandError, match=r"^no Spark here: pip install 'tidelog\[spark\]'$"):
        Choice(EngineName.SPARK, None, SETTINGS).of(2000)
