"""`tidelog compact`: compaction here, on Spark, or by a broker.

Spark is imported and started only if it does the compaction. With `--engine auto`, the compaction
runs in this process if Spark is not installed or does not start. If a broker does the work, the
caller needs no rights on the store.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from typer import Option

from tidelog.service.cli.broker_requests import ClientCommand, missing_is, no_topic
from tidelog.service.cli.errors import BadUsage, CommandError, Unreachable
from tidelog.service.cli.output import Progress, SlowProgress, show_line, warn
from tidelog.service.cli.replay import NO_SPARK, spark_session
from tidelog.service.cli.store_commands import (
    BrokerOption,
    ChangeOptions,
    Done,
    MasterOption,
    StoreOptions,
    TopicsArgument,
    recorded,
    table,
)
from tidelog.service.client.connection import Connection, quoted
from tidelog.service.exit_status import EXIT_FAILED
from tidelog.service.settings.settings import Settings

if TYPE_CHECKING:
    from tidelog.compaction.engine import Engine
    from tidelog.compaction.maintenance_session import MaintenanceSession

JOBS = "/tidelog/v1/compactions"
RUNNING, DONE = "running", "done"
ASK_EVERY_S = 0.3
UNSEEN_MAX = 20
"""The command fails after more than this number of answers in a row without the job. Then the job's
broker has stopped, or the broker that answers cannot reach it."""

EngineName: TypeAlias = Literal["auto", "in-process", "spark"]


class EngineOptions(NamedTuple):
    """The options of a command that choose its engine."""

    engine: Annotated[
        EngineName,
        Option(
            "--engine",
            help="auto: Spark if the segments have more than compact_spark_bytes together and "
            "Spark is installed, else this process",
        ),
    ] = "auto"
    master: MasterOption = None

    def of(self, size: int, settings: Settings) -> EngineName:
        """Return the engine for segments of `size` bytes.

        Raises CommandError if `--engine spark` is given and Spark is not installed.
        """
        has_spark = importlib.util.find_spec("pyspark") is not None
        if self.engine == "spark" and not has_spark:
            raise CommandError(NO_SPARK)
        if self.engine != "auto":
            return self.engine
        is_large = size > settings.compact_spark_bytes
        return "spark" if is_large and has_spark else "in-process"

    @contextlib.asynccontextmanager
    async def started(
        self, size: int, cluster: "MaintenanceSession", settings: Settings
    ) -> "AsyncIterator[Engine]":
        """Start the engine for `size` bytes; stop it at the end of the block."""
        from tidelog.compaction.in_process_engine import KEYS_PART, InProcess
        from tidelog.storage.runtime.malloc import keep_freed_columns

        keep_freed_columns()
        keys_bytes_max = settings.compact_memory_bytes // KEYS_PART
        engine: Engine = InProcess(cluster.store, cluster.clock, keys_bytes_max)
        with contextlib.ExitStack() as stack:
            if self.of(size, settings) == "spark":
                try:
                    session = spark_session("tidelog compact", self.master)
                    spark = await asyncio.to_thread(stack.enter_context, session)
                except CommandError as error:
                    if self.engine == "spark":
                        raise
                    warn(f"{error}: compacting in this process")
                else:
                    from tidelog.compaction.spark_engine import SparkEngine

                    url, s3 = cluster.store.url, settings.s3
                    engine = SparkEngine(spark, url, s3, keys_bytes_max=keys_bytes_max)
            yield engine


def compact(
    ctx: typer.Context,
    topics: TopicsArgument = None,
    *,
    store: StoreOptions,
    server: BrokerOption = None,
    force: Annotated[
        bool, Option("--force", help="compact even below min.cleanable.dirty.ratio")
    ] = False,
    engines: EngineOptions,
    change: ChangeOptions,
) -> None:
    """Merge small segments, and compact by key.

    Topics with compact in cleanup.policy keep only the newest record of each key. With --server, a
    broker does the work, one topic after the other, and the key needs the rights ALTER and DESCRIBE
    on the topics. The work goes on if this command is interrupted: see tidelog compactions.

    Example: tidelog compact events --engine in-process --yes
    """
    if store.is_replaced_by(server):
        if engines.engine == "spark" or engines.master is not None:
            raise BadUsage("--server excludes --engine spark and --master: a broker has no Spark")
        _compact_at_broker(ClientCommand(ctx, server), topics, change, force=force)
        return
    settings = store.settings()

    async def work(cluster: "MaintenanceSession", progress: Progress) -> Done:
        step = compact_step(
            cluster, topics, engines, settings, progress, yes=change.yes, force=force
        )
        return await recorded(cluster, "compact", step, change.yes and not topics)

    change.finish(store.run("compacting", work, is_reading=not change.yes))


async def compact_step(
    cluster: "MaintenanceSession",
    topics: Sequence[str] | None,
    engines: EngineOptions,
    settings: Settings,
    progress: Progress,
    *,
    yes: bool,
    force: bool = False,
) -> Done:
    """Merge and compact, or, without `yes`, show what would be merged and compacted."""
    from tidelog.compaction.compact import compact as run

    rows_read = 0

    def on_rows(rows: int) -> None:
        nonlocal rows_read
        rows_read += rows
        progress(rows_read)

    results = await run(cluster, topics, is_dry=True, is_forced=force)
    size = sum(result.size for result in results)
    name: str = engines.of(size, settings)
    if results and yes:
        async with engines.started(size, cluster, settings) as engine:
            name = engine.name
            results = await run(
                cluster, topics, is_dry=False, is_forced=force, engine=engine, on_rows=on_rows
            )

    compacted = [result._asdict() for result in results]

    def show() -> None:
        _show_compacted(compacted)
        if compacted:
            show_line(f"engine: {name}")

    is_failed = any(result.is_damaged for result in results)
    return Done({"compacted": compacted, "engine": name}, show, is_failed)


# -- compactions by a broker


def _compact_at_broker(
    command: ClientCommand, topics: Sequence[str] | None, change: ChangeOptions, *, force: bool
) -> None:
    """Compact the topics, one after the other, and wait for the end of each."""
    if not topics:
        raise BadUsage("--server needs the names of the topics to compact")
    body = {"validate_only": not change.yes, "is_forced": force}

    async def work(connection: Connection) -> list[dict[str, Any]]:
        jobs = []
        for topic in topics:
            path = f"/tidelog/v1/topics/{quoted(topic)}/compactions"
            with missing_is(no_topic(topic)):
                started = connection.json_of(await connection.post(path, json=body))
            jobs.append(await _ended(connection, started))
        return jobs

    jobs = command.run(work)
    results = [result for job in jobs for result in job["results"]]

    def show() -> None:
        _show_compacted(results)
        if any(job["has_more_results"] for job in jobs):
            show_line("there are more: a broker keeps the first 1,000 of each job")

    change.finish(Done({"compacted": results, "jobs": [job_fields(job) for job in jobs]}, show))
    failed = [job for job in jobs if job["state"] != DONE]
    for job in failed:
        warn(f"{job['topic']}: {job['state']} at broker {job['broker']}: {job['error']}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


async def _ended(connection: Connection, job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a job. Any broker may answer, because each asks the others."""
    unseen = 0
    with SlowProgress(f"compacting {job['topic']}") as progress:
        while job["state"] == RUNNING:
            await asyncio.sleep(ASK_EVERY_S)
            jobs = (await connection.get_json(JOBS))["data"]
            now = next(
                (listed_job for listed_job in jobs if listed_job["job_id"] == job["job_id"]), None
            )
            unseen = unseen + 1 if now is None else 0
            if unseen > UNSEEN_MAX:
                raise Unreachable(
                    f"the compaction of {job['topic']} is not in the answers any more: broker "
                    f"{job['broker']} has stopped or cannot be reached; run the command again"
                )
            job = now or job
            progress.show(job["rows_read"])
    return job


def job_fields(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job with the number of its results."""
    return {**job, "results": len(job["results"])}


def _show_compacted(results: Sequence[Mapping[str, Any]]) -> None:
    """Print merges and compactions, each as the fields of `Compacted`, as a table."""
    fields = ("topic", "partition", "what", "why", "segments", "rows", "size")
    rows = [(*(result[name] for name in fields), _becomes(result)) for result in results]
    columns = ("topic", "partition", "what", "why", "segments", "rows", "bytes", "becomes")
    table("nothing to compact", columns, rows)


def _becomes(result: Mapping[str, Any]) -> str:
    if result["is_damaged"]:
        return "DAMAGED: unchanged"
    if result["is_lost"]:
        return "another run was faster: unchanged"
    if result["segments_after"] < 0:
        return ""
    return (
        f"{result['segments_after']:,} with {result['rows_after']:,} rows, "
        f"{result['size_after']:,} bytes"
    )
