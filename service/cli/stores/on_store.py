"""The frame of a command on a store: open the store, run the work on its cluster, show progress and
result."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from tidelog.service.cli.results import (
    Progress,
    WorkResult,
    command_errors,
    show_json,
    show_line,
    show_table,
    warn,
    with_progress,
)
from tidelog.service.cli.stores.store_options import (
    StoreFlags,
    default_store_hint,
    settings_of,
)
from tidelog.service.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tidelog.compaction.session import MaintenanceSession

Row = tuple[str | int, ...]

DRY_RUN = "dry run: nothing was changed; --yes applies the changes"


class Done(NamedTuple):
    """Result of a command, or of its dry run: as JSON and as text."""

    fields: dict[str, Any]
    show: Callable[[], None]
    is_failed: bool = False
    """A part failed, but the other parts are done. The exit status is 1."""


def run_on_store(
    store: StoreFlags,
    what: str,
    work: "Callable[[MaintenanceSession, Progress], Coroutine[Any, Any, WorkResult]]",
    *,
    report_damage: bool = True,
    is_reading: bool = False,
) -> WorkResult:
    """Run the work on the cluster in the store. Raises errors of the log as CommandError. Work with
    `is_reading` writes nothing, so the store may be read-only."""
    settings = settings_of(store, warn)

    async def session() -> WorkResult:
        from tidelog.service.server.open_cluster import check_cluster, opened_cluster

        # Opening a store for writing creates folders, so check first that there is a cluster.
        await check_cluster(settings)
        async with opened_cluster(
            settings, report_damage=report_damage, is_reading=is_reading
        ) as cluster:
            return await with_progress(what, lambda progress: work(cluster, progress))

    with command_errors(default_store_hint(settings)):
        return asyncio.run(session())


def finish(done: Done, *, yes: bool, as_json: bool) -> None:
    if as_json:
        show_json({"is_dry": not yes, **done.fields})
    else:
        done.show()
        if not yes:
            show_line(DRY_RUN)
    if done.is_failed:
        raise typer.Exit(EXIT_FAILED)


def table(nothing: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if rows:
        show_table(columns, rows)
    else:
        show_line(nothing)
