"""The frame of the commands on a store, which need no broker.

It has their options, the cluster in the store, and the result with its dry run.

The commands work with or without running brokers, by hand or from cron. Commands that delete or
rewrite are dry runs without `--yes`. Two runs at once are safe, because the run that loses a race
reports this and changes no data.

**On a crash**: a command may be killed at any moment; run it again.

The commands import what works on a store only when they run, because their help and the errors
about their options need no Arrow, and no extra of the distribution.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer
from typer import Argument, Option

from tidelog.service.cli.errors import BadUsage, command_errors
from tidelog.service.cli.option_units import duration_ms
from tidelog.service.cli.options import JsonOption, given_server
from tidelog.service.cli.output import (
    Progress,
    WorkResult,
    show_json,
    show_line,
    show_table,
    warn,
    with_progress,
)
from tidelog.service.exit_status import EXIT_FAILED
from tidelog.service.settings.settings import Settings, load
from tidelog.service.telemetry.maintenance_results import Kind, result, store_result
from tidelog.storage.core.errors import LogError

if TYPE_CHECKING:
    from tidelog.compaction.garbage import Grace
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.storage.runtime.clock import Clock
    from tidelog.storage.store.object_store import ObjectStore

Work: TypeAlias = "Callable[[MaintenanceSession, Progress], Coroutine[Any, Any, WorkResult]]"

DRY_RUN = "dry run: nothing was changed; --yes applies the changes"

EndpointOption = Annotated[
    str | None,
    Option(
        "--s3-endpoint",
        metavar="URL",
        help="URL of an S3 server other than AWS (TIDELOG_S3_ENDPOINT)",
    ),
]
RegionOption = Annotated[
    str | None,
    Option("--s3-region", metavar="REGION", help="region of the bucket (TIDELOG_S3_REGION)"),
]
BrokerOption = Annotated[
    str | None,
    Option(
        "--server",
        metavar="URL",
        callback=given_server,
        help="let this broker do it, not this process: needs no rights on the store (default: work "
        "on the store)",
    ),
]
MasterOption = Annotated[
    str | None,
    Option("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])"),
]
TopicsArgument = Annotated[list[str] | None, Argument(metavar="TOPIC", help="default: all topics")]
GraceOption = Annotated[
    int | None,
    Option(
        "--file-grace-ms",
        parser=duration_ms(),
        metavar="DURATION",
        help="time between removal of a file from its table and deletion of the file. The minimum "
        "and the default are the cluster's file grace (tidelog bounds). A file that no commit "
        "references yet is kept for at least a day",
    ),
]


class StoreOptions(NamedTuple):
    """The store of a command, as far as its options name it. The rest are variables."""

    store: Annotated[
        str | None,
        Option(
            "--store",
            metavar="URL",
            help="URL of the store, as for `tidelog serve` (TIDELOG_STORE)",
        ),
    ] = None
    s3_endpoint: EndpointOption = None
    s3_region: RegionOption = None

    def settings(self, on_old_name: Callable[[str], object] = lambda _: None) -> Settings:
        """Return the settings of the environment and these options. Raises BadSettings."""
        flags = {name: value for name, value in self._asdict().items() if value is not None}
        return load(flags, warn=on_old_name)

    def is_replaced_by(self, server: str | None) -> bool:
        """Whether a broker does the work.

        Raises BadUsage if both a broker and a store are given.
        """
        if server is not None and self != StoreOptions():
            raise BadUsage("--server and --store exclude each other: a broker has its own store")
        return server is not None

    def run(
        self,
        title: str,
        work: "Work[WorkResult]",
        *,
        report_damage: bool = True,
        is_reading: bool = False,
    ) -> WorkResult:
        """Run the work on the cluster in the store.

        Raises errors of the log as CommandError. Work with `is_reading` writes nothing, so the
        store may be read-only.
        """
        settings = self.settings(warn)

        async def session() -> WorkResult:
            from tidelog.service.server.open_for_maintenance import check_cluster, opened_cluster

            # Opening a store for writing creates folders, so check first that there is a cluster.
            await check_cluster(settings)
            async with opened_cluster(
                settings, report_damage=report_damage, is_reading=is_reading
            ) as cluster:
                return await with_progress(title, lambda progress: work(cluster, progress))

        with command_errors(default_store_hint(settings)):
            return asyncio.run(session())


def default_store_hint(settings: Settings) -> str:
    """Return the end of a message about the store. If the store is not the default, it is empty."""
    is_default = settings.store == Settings.store
    return "; this is the default: name another with --store" if is_default else ""


class Done(NamedTuple):
    """Result of a command, or of its dry run: as JSON and as text."""

    fields: dict[str, Any]
    show: Callable[[], None]
    is_failed: bool = False
    """A part failed, but the other parts are done. The exit status is 1."""

    @classmethod
    def with_table(
        cls,
        fields: dict[str, Any],
        nothing: str,
        columns: Sequence[str],
        rows: Sequence[Iterable[object]],
        *,
        is_failed: bool = False,
    ) -> "Done":
        """Return a result whose text is a table, or `nothing` without rows."""
        return cls(fields, lambda: table(nothing, columns, rows), is_failed)


class ChangeOptions(NamedTuple):
    """Whether a command changes the store, and how it prints the result."""

    yes: Annotated[
        bool, Option("--yes/--dry-run", "-y", help="apply the changes (default: show them only)")
    ] = False
    as_json: JsonOption = False

    def finish(self, result: Done) -> None:
        """Print the result. Raises the exit status of a failure."""
        if self.as_json:
            show_json({"is_dry": not self.yes, **result.fields})
        else:
            result.show()
            if not self.yes:
                show_line(DRY_RUN)
        if result.is_failed:
            raise typer.Exit(EXIT_FAILED)


async def recorded(
    cluster: "MaintenanceSession", kind: Kind, step: Coroutine[Any, Any, Done], is_recorded: bool
) -> Done:
    """Return the result of a step.

    If `is_recorded` is set, also write it to the store. A run of only some topics is not recorded,
    because `tidelog status` shows runs of all topics. An interrupted run records nothing.
    """
    try:
        result = await step
    except (LogError, OSError) as error:
        if is_recorded:
            await record(cluster.store, cluster.clock, kind, str(error))
        raise
    if is_recorded:
        why = "a part of the work failed: the output of the command has it"
        await record(cluster.store, cluster.clock, kind, why if result.is_failed else "")
    return result


async def record(
    store: "ObjectStore", clock: "Clock", kind: Kind, failure: str, damage: int = 0
) -> None:
    """Write a result to the store. If this fails, only warn, because the work itself is done."""
    try:
        await store_result(store, result(kind, clock.now_ms(), failure, damage=damage))
    except (LogError, OSError) as error:
        warn_unrecorded(error)


def warn_unrecorded(error: Exception) -> None:
    warn(f"the result is not recorded, so `tidelog status` does not show it: {error}")


def table(nothing: str, columns: Sequence[str], rows: Sequence[Iterable[object]]) -> None:
    if rows:
        show_table(columns, rows)
    else:
        show_line(nothing)


def skipped_topics(cluster: "MaintenanceSession") -> dict[str, Any]:
    """Return the topics that the steps left as they are, with the reasons. Warn about each one."""
    for name, error in cluster.skipped.items():
        warn(f"topic {name} is left as it is: {error}")
    return {"skipped": {name: str(error) for name, error in cluster.skipped.items()}}


def grace_of(cluster: "MaintenanceSession", file_grace_ms: int | None) -> "Grace":
    """Return the grace periods of a collection.

    Raises BadUsage if `--file-grace-ms` is shorter than the cluster's.
    """
    from tidelog.compaction.garbage import Grace

    least = cluster.state.bounds.now.file_grace_ms
    if file_grace_ms is not None and file_grace_ms < least:
        raise BadUsage(
            f"--file-grace-ms {file_grace_ms} is shorter than the cluster's {least}, which "
            "`tidelog bounds --file-grace-ms` changes"
        )
    return Grace(table_ms=file_grace_ms or least)
