"""Which engine a compaction runs on: in this process, or Spark, by its size unless named.

Spark is loaded and started only when it is going to work, and no command needs it: where it is not
installed, or does not start, what was not asked for by name is done in process.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from service.cli_replay import MasterOption, spark_session
from service.cli_results import CommandError, warn
from service.settings import Settings

if TYPE_CHECKING:
    from compaction.cluster import Cluster
    from compaction.engine import Engine

NO_SPARK = "no Spark here: pip install 'tidelog[spark]'"
KEYS_PART = 4
"""Of the memory for keys: what is known, what is new, and the union that is as large as both."""


class EngineName(StrEnum):
    """What `--engine` takes."""

    AUTO = "auto"
    IN_PROCESS = "in-process"
    SPARK = "spark"


EngineOption = Annotated[
    EngineName,
    typer.Option("--engine", help="auto: spark for more than compact_spark_bytes, if installed"),
]


class Choice(NamedTuple):
    """What the command line says of it."""

    engine: EngineName
    master: str | None
    settings: Settings

    def of(self, size: int) -> EngineName:
        """The engine for segments of so many bytes. Raises CommandError when it is named and not
        installed."""
        has_spark = importlib.util.find_spec("pyspark") is not None
        if self.engine is EngineName.SPARK and not has_spark:
            raise CommandError(NO_SPARK)
        if self.engine is not EngineName.AUTO:
            return self.engine
        is_large = size > self.settings.compact_spark_bytes
        return EngineName.SPARK if is_large and has_spark else EngineName.IN_PROCESS


@contextlib.asynccontextmanager
async def started(choice: Choice, size: int, cluster: "Cluster") -> AsyncIterator["Engine"]:
    """The engine for so many bytes, until the end of the block."""
    from compaction.engine import InProcess
    from storage.malloc import keep_freed_columns

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
                warn(f"{error}: compacting in process")
            else:
                from compaction.spark_jobs import SparkEngine

                url, s3 = cluster.store.url, choice.settings.s3
                engine = SparkEngine(spark, url, s3, keys_bytes_max=keys_bytes_max)
        yield engine


__all__ = ["Choice", "EngineName", "EngineOption", "MasterOption", "started"]
