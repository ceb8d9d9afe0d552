"""The engine of a compaction: this process or Spark, chosen by size or by `--engine`.

Spark is imported and started only if it does the compaction. With `--engine auto`, the compaction
runs in this process if Spark is not installed or does not start.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.service.cli.results import CommandError, warn
from tidelog.service.cli.stores.replay import NO_SPARK, spark_session
from tidelog.service.settings.settings import Settings

if TYPE_CHECKING:
    from tidelog.compaction.engine import Engine
    from tidelog.compaction.session import MaintenanceSession


class EngineName(StrEnum):
    """Values of `--engine`."""

    AUTO = "auto"
    IN_PROCESS = "in-process"
    SPARK = "spark"


EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="auto: Spark if the segments have more than compact_spark_bytes together and Spark is "
        "installed, else this process",
    ),
]


class EngineChoice(NamedTuple):
    """The options of a command that choose its engine."""

    engine: EngineName
    master: str | None
    settings: Settings

    def of(self, size: int) -> EngineName:
        """Return the engine for segments of `size` bytes.

        Raises CommandError if `--engine spark` is given and Spark is not installed.
        """
        has_spark = importlib.util.find_spec("pyspark") is not None
        if self.engine is EngineName.SPARK and not has_spark:
            raise CommandError(NO_SPARK)
        if self.engine is not EngineName.AUTO:
            return self.engine
        is_large = size > self.settings.compact_spark_bytes
        return EngineName.SPARK if is_large and has_spark else EngineName.IN_PROCESS


@contextlib.asynccontextmanager
async def started(
    choice: EngineChoice, size: int, cluster: "MaintenanceSession"
) -> AsyncIterator["Engine"]:
    """Start the engine for `size` bytes; stop it at the end of the block."""
    from tidelog.compaction.engine import KEYS_PART, InProcess
    from tidelog.storage.runtime.malloc import keep_freed_columns

    keep_freed_columns()
    keys_bytes_max = choice.settings.compact_memory_bytes // KEYS_PART
    engine: Engine = InProcess(cluster.store, cluster.clock, keys_bytes_max)
    with contextlib.ExitStack() as stack:
        if choice.of(size) is EngineName.SPARK:
            try:
                session = spark_session("tidelog compact", choice.master)
                spark = await asyncio.to_thread(stack.enter_context, session)
            except CommandError as error:
                if choice.engine is EngineName.SPARK:
                    raise
                warn(f"{error}: compacting in this process")
            else:
                from tidelog.compaction.spark_engine import SparkEngine

                url, s3 = cluster.store.url, choice.settings.s3
                engine = SparkEngine(spark, url, s3, keys_bytes_max=keys_bytes_max)
        yield engine
