"""`tidelog scrub`: verifies the log in the store, and stores the result there."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from tidelog.service.cli.options import JsonOption
from tidelog.service.cli.output import Progress, plural, show_json, show_line, show_table
from tidelog.service.cli.store_commands import (
    GraceOption,
    StoreOptions,
    TopicsArgument,
    record,
    warn_unrecorded,
)
from tidelog.service.exit_status import EXIT_FAILED
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.open import open_store

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.compaction.scrub import ScrubReport
    from tidelog.compaction.scrub_checks import Finding

FINDINGS_SHOWN = 100
NAMED = 3
"""Maximum damaged objects that the stored result names."""
SCRUB_COUNTS = ("entries", "checkpoints", "topics", "partitions", "segments", "runs", "rows")


def scrub(
    topics: TopicsArgument = None,
    *,
    store: StoreOptions,
    quick: Annotated[bool, Option("--quick", help="do not read the records of tables")] = False,
    file_grace_ms: GraceOption = None,
    no_record: Annotated[
        bool, Option("--no-record", help="do not store the result that `tidelog status` shows")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify the log in the store.

    Reads all objects and verifies checksums, offsets and references. The exit status is 1 if the
    log is damaged. After a scrub of all topics without --quick, the command writes the result to
    the store, and `tidelog status` shows it.
    """

    async def work(cluster: "MaintenanceSession", progress: Progress) -> "ScrubReport":
        from tidelog.compaction.garbage import Grace
        from tidelog.compaction.scrub import scrub as run

        grace = Grace(table_ms=file_grace_ms or 0)
        return await run(cluster, topics, grace, is_quick=quick, on_bytes=progress)

    report = store.run("scrubbing", work, report_damage=False, is_reading=True)
    if not topics and not quick and not no_record:
        asyncio.run(_record(store.settings(), report))
    if as_json:
        show_json(_fields(report))
    else:
        _show_report(report)
    if not report.is_whole:
        raise typer.Exit(EXIT_FAILED)


async def _record(settings: Settings, report: "ScrubReport") -> None:
    """Store the result. This opens the store again, because a scrub opens it only to read."""
    damaged = [finding for finding in report.findings if finding.is_damage]
    named = "; ".join(f"{finding.where}: {finding.what}" for finding in damaged[:NAMED])
    try:
        store = await open_store(settings.store, s3=settings.s3)
    except (LogError, OSError) as error:
        warn_unrecorded(error)
        return
    try:
        await record(store, SystemClock(), "scrub", named, len(damaged))
    finally:
        await store.close()


def _fields(report: "ScrubReport") -> dict[str, Any]:
    return {
        "is_whole": report.is_whole,
        **{name: getattr(report, name) for name in SCRUB_COUNTS},
        "bytes": report.size,
        "findings": [finding._asdict() for finding in report.findings],
    }


def _show_report(report: "ScrubReport") -> None:
    def row(finding: "Finding") -> tuple[str, str, str, str]:
        return ("yes" if finding.is_damage else "no", finding.kind, finding.where, finding.what)

    worst = sorted(report.findings, key=lambda finding: not finding.is_damage)
    if worst:
        columns = ("damage", "kind", "where", "what")
        show_table(columns, [row(finding) for finding in worst[:FINDINGS_SHOWN]])
    if len(worst) > FINDINGS_SHOWN:
        show_line(f"... and {plural(len(worst) - FINDINGS_SHOWN, 'finding')} more, see --json")
    show_line(
        f"{'whole' if report.is_whole else 'DAMAGED'}: {plural(report.entries, 'WAL object')}"
        f", {plural(report.checkpoints, 'checkpoint')}, {plural(report.segments, 'segment')}, "
        f"{plural(report.rows, 'record')}, {report.size:,} bytes read"
    )
