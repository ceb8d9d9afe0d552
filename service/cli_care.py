"""`tidelog retain`, `compact`, `collect`, `scrub`, `delete-records`, `maintain`: a thin layer on
compaction/, and the one place where service/ meets it.

They work on the store, with or without brokers beside them, by hand or from cron. What deletes or
rewrites says what it would do unless told `--yes`. Any of them may be killed at any moment and run
again, and run twice at once: who comes too late says so, and is done.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from service.cli_engines import Choice, EngineName, EngineOption, MasterOption, started
from service.cli_replay import StoreOption
from service.cli_results import (
    EXIT_FAILED,
    BadUsage,
    CommandError,
    NotReachable,
    NotThere,
    SlowProgress,
    plural,
    show_json,
    show_line,
    show_table,
)
from service.cli_topics import JsonOption, TopicArgument
from service.settings import BadSettings, Settings, load
from storage.errors import LogError, StoreUnfit, Unavailable, UnknownPartition, UnknownTopic

if TYPE_CHECKING:
    from compaction.checks import Finding
    from compaction.cluster import Cluster
    from compaction.collect import Plan
    from compaction.compact import Compacted
    from compaction.garbage import Grace
    from compaction.retain import Retained
    from compaction.scrub import Report

T = TypeVar("T")
Progress = Callable[[int], None]
Row = tuple[str | int, ...]

END = "end"
FINDINGS_SHOWN = 100
TICK_S = 0.2

TopicsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[TOPIC]...", help="all topics when none is given")
]
YesOption = Annotated[
    bool,
    typer.Option("--yes/--dry-run", "-y", help="do it; without, only say what would be done"),
]
GraceOption = Annotated[
    int,
    typer.Option(
        "--file-grace-ms",
        min=0,
        help="how long files of tables stay after no version names them; longer than any job reads",
    ),
]
FILE_GRACE_MS = 86_400_000


class _Done(NamedTuple):
    """What a command did or would do: for machines, and for people."""

    told: dict[str, Any]
    show: Callable[[], None]
    is_failed: bool = False
    """In part: the rest was done, and the exit status says so."""


def retain(
    topics: TopicsArgument = None,
    store: StoreOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move log starts as retention.ms and retention.bytes say; whole segments leave the tables."""

    async def work(cluster: "Cluster", _: Progress) -> _Done:
        return await _retain(cluster, topics, yes=yes)

    _finish(_run(store, "retaining", work), yes=yes, as_json=as_json)


def delete_records(
    topic: TopicArgument,
    before: Annotated[
        list[str],
        typer.Argument(metavar="PARTITION:OFFSET...", help=f"the first kept; {END} keeps none"),
    ],
    store: StoreOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a topic's records before an offset; whole segments leave the table."""
    from compaction.retain import delete_records as delete

    offsets = _offsets(before)

    async def work(cluster: "Cluster", _: Progress) -> _Done:
        return _retained(await delete(cluster, topic, offsets, is_dry=not yes))

    _finish(_run(store, "deleting", work), yes=yes, as_json=as_json)


def compact(
    topics: TopicsArgument = None,
    store: StoreOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="compact whatever min.cleanable.dirty.ratio says")
    ] = False,
    engine: EngineOption = EngineName.AUTO,
    master: MasterOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small segments; where cleanup.policy has compact, keep the newest record per key."""
    choice = Choice(engine, master, _settings(store))

    async def work(cluster: "Cluster", progress: Progress) -> _Done:
        return await _compact(cluster, topics, choice, progress, yes=yes, force=force)

    _finish(_run(store, "compacting", work), yes=yes, as_json=as_json)


def collect(
    store: StoreOption = None,
    file_grace_ms: GraceOption = FILE_GRACE_MS,
    unknown_topics: Annotated[
        bool,
        typer.Option(
            "--unknown-topics", help="also all of topics of which the cluster has no record"
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete objects that nothing can name any more. A dry run leaves a checkpoint, too: what may
    be deleted later stands on it."""
    grace = _grace(store, file_grace_ms)

    async def work(cluster: "Cluster", progress: Progress) -> _Done:
        return await _collect(cluster, grace, progress, yes=yes, takes_unknown=unknown_topics)

    _finish(_run(store, "collecting", work), yes=yes, as_json=as_json)


def scrub(
    topics: TopicsArgument = None,
    store: StoreOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="read no records of tables")] = False,
    file_grace_ms: GraceOption = FILE_GRACE_MS,
    as_json: JsonOption = False,
) -> None:
    """Check the log as it lies in the store: nothing missing, nothing twice, every byte true.

    The exit status is 1 where it is damaged.
    """
    grace = _grace(store, file_grace_ms)

    async def work(cluster: "Cluster", progress: Progress) -> "Report":
        from compaction.scrub import scrub as look

        return await look(cluster, topics, grace, is_quick=quick, on_bytes=progress)

    report = _run(store, "scrubbing", work, is_damage_told=False)
    if as_json:
        show_json(_scrubbed(report))
    else:
        _show_report(report)
    if not report.is_whole:
        raise typer.Exit(EXIT_FAILED)


def maintain(
    topics: TopicsArgument = None,
    store: StoreOption = None,
    file_grace_ms: GraceOption = FILE_GRACE_MS,
    engine: EngineOption = EngineName.AUTO,
    master: MasterOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """All of it in order: retain, compact, collect. For cron."""
    grace = _grace(store, file_grace_ms)
    choice = Choice(engine, master, _settings(store))

    async def work(cluster: "Cluster", progress: Progress) -> _Done:
        steps = [
            await _retain(cluster, topics, yes=yes),
            await _compact(cluster, topics, choice, progress, yes=yes, force=False),
            await _collect(cluster, grace, progress, yes=yes),
        ]

        def show() -> None:
            for step in steps:
                step.show()

        told = {name: told for step in steps for name, told in step.told.items()}
        return _Done(told, show, any(step.is_failed for step in steps))

    _finish(_run(store, "maintaining", work), yes=yes, as_json=as_json)


# -- the steps


async def _retain(cluster: "Cluster", topics: Sequence[str] | None, *, yes: bool) -> _Done:
    from compaction.retain import retain as run

    return _retained(await run(cluster, topics, is_dry=not yes))


def _retained(found: "Sequence[Retained]") -> _Done:
    def show() -> None:
        columns = ("topic", "partition", "why", "log start", "moves to", "segments", "rows")
        rows: list[Row] = [tuple(each) for each in found]
        _table("nothing to retain", (*columns, "bytes"), rows)

    return _Done({"retained": [each._asdict() for each in found]}, show)


async def _compact(
    cluster: "Cluster",
    topics: Sequence[str] | None,
    choice: Choice,
    progress: Progress,
    *,
    yes: bool,
    force: bool,
) -> _Done:
    from compaction.compact import compact as run

    done = 0

    def on_rows(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done)

    found = await run(cluster, topics, is_dry=True, is_forced=force)
    size = sum(each.size for each in found)
    name = choice.of(size).value
    if found and yes:
        async with started(choice, size, cluster) as engine:
            name = engine.name
            found = await run(
                cluster, topics, is_dry=False, is_forced=force, engine=engine, on_rows=on_rows
            )

    def show() -> None:
        columns = ("topic", "partition", "what", "why", "segments", "rows", "bytes", "becomes")
        _table("nothing to compact", columns, [(*each[:7], _becomes(each)) for each in found])
        if found:
            show_line(f"engine: {name}")

    told = {"compacted": [each._asdict() for each in found], "engine": name}
    return _Done(told, show, any(each.is_damaged for each in found))


def _becomes(each: "Compacted") -> str:
    if each.is_damaged:
        return "DAMAGED: left as it is"
    if each.is_lost:
        return "another was faster: left as it is"
    if each.segments_after < 0:
        return ""
    return f"{each.segments_after:,} with {each.rows_after:,} rows, {each.size_after:,} bytes"


async def _collect(
    cluster: "Cluster",
    grace: "Grace",
    progress: Progress,
    *,
    yes: bool,
    takes_unknown: bool = False,
) -> _Done:
    from compaction import collect as collection

    planned = await collection.plan(cluster, grace, takes_unknown=takes_unknown)
    started = time.perf_counter()
    deleted = await collection.collect(cluster, planned, progress) if yes else 0
    told = {
        "objects": len(planned.garbage),
        "bytes": planned.size,
        "waiting_bytes": planned.waiting,
        "oldest_ms": planned.oldest_ms,
        "seconds": time.perf_counter() - started,
        "kept_from": planned.kept_from,
        "topics": [gone.name for gone in planned.emptied],
        "deleted": deleted,
        "garbage": [each._asdict() for each in planned.garbage],
    }
    return _Done({"collected": told}, lambda: _show_plan(planned))


def _show_plan(planned: "Plan") -> None:
    sums: dict[tuple[str, str], list[int]] = {}
    for each in planned.garbage:
        count = sums.setdefault((each.key.partition("/")[0], each.why), [0, 0, 0])
        age_ms = planned.now_ms - each.modified_ms
        count[:] = count[0] + 1, count[1] + each.size, max(count[2], age_ms // 1000)
    rows: list[Row] = [(*kind, *count) for kind, count in sums.items()]
    _table("nothing to collect", ("what", "why", "objects", "bytes", "oldest, s"), rows)
    if planned.waiting:
        show_line(
            f"{planned.waiting:,} bytes more are garbage, and wait for the end of their grace"
        )


def _scrubbed(report: "Report") -> dict[str, Any]:
    return {
        "is_whole": report.is_whole,
        "entries": report.entries,
        "checkpoints": report.checkpoints,
        "topics": report.topics,
        "partitions": report.partitions,
        "segments": report.segments,
        "runs": report.runs,
        "rows": report.rows,
        "bytes": report.size,
        "findings": [finding._asdict() for finding in report.findings],
    }


def _show_report(report: "Report") -> None:
    def row(finding: "Finding") -> tuple[str, str, str, str]:
        return ("yes" if finding.is_damage else "no", finding.kind, finding.where, finding.what)

    worst = sorted(report.findings, key=lambda finding: not finding.is_damage)
    if worst:
        columns = ("damage", "kind", "where", "what")
        show_table(columns, [row(finding) for finding in worst[:FINDINGS_SHOWN]])
    if len(worst) > FINDINGS_SHOWN:
        show_line(f"... and {plural(len(worst) - FINDINGS_SHOWN, 'finding')} more: see --json")
    show_line(
        f"{'whole' if report.is_whole else 'DAMAGED'}: {plural(report.entries, 'WAL object')}"
        f", {plural(report.checkpoints, 'checkpoint')}, {plural(report.segments, 'segment')}, "
        f"{plural(report.rows, 'record')}, {report.size:,} bytes read"
    )


# -- how


def _offsets(before: Sequence[str]) -> dict[int, int]:
    offsets: dict[int, int] = {}
    for text in before:
        number, colon, offset = text.partition(":")
        is_number = offset.isascii() and offset.isdigit() and number.isascii()
        if not (colon and number.isdigit() and (is_number or offset == END)):
            raise BadUsage(f"{text!r} is not PARTITION:OFFSET, like 0:17 or 0:{END}")
        if int(number) in offsets:
            raise BadUsage(f"partition {number} is given twice")
        offsets[int(number)] = -1 if offset == END else int(offset)
    return offsets


def _settings(store: str | None) -> Settings:
    try:
        return load({} if store is None else {"store": store})
    except BadSettings as error:
        raise BadUsage(str(error)) from None


def _grace(store: str | None, file_grace_ms: int) -> "Grace":
    from compaction.garbage import Grace

    return Grace(wal_ms=_settings(store).wal_retention_ms, table_ms=file_grace_ms)


def _run(
    store: str | None,
    what: str,
    work: "Callable[[Cluster, Progress], Coroutine[Any, Any, T]]",
    *,
    is_damage_told: bool = True,
) -> T:
    """The work on the cluster in the store; what the log raises, as a command's failure."""
    settings = _settings(store)
    try:
        return asyncio.run(_with_cluster(settings, what, work, is_damage_told=is_damage_told))
    except (UnknownTopic, UnknownPartition) as error:
        raise NotThere(str(error)) from None
    except (StoreUnfit, Unavailable) as error:
        raise NotReachable(str(error)) from None
    except LogError as error:
        raise CommandError(str(error)) from None


async def _with_cluster(
    settings: Settings,
    what: str,
    work: "Callable[[Cluster, Progress], Coroutine[Any, Any, T]]",
    *,
    is_damage_told: bool,
) -> T:
    from compaction.cluster import Cluster
    from storage.clock import SystemClock
    from storage.readonly import open_to_read
    from storage.stores import open_store

    # A folder that is not there would be made by a store that writes.
    await (await open_to_read(settings.store, settings.s3)).close()
    store = await open_store(settings.store, s3=settings.s3)
    try:
        cluster = await Cluster.open(store, SystemClock(), is_damage_told=is_damage_told)
        try:
            with SlowProgress(what) as bar:
                done = 0

                def progress(count: int) -> None:
                    nonlocal done
                    done = count

                task = asyncio.create_task(work(cluster, progress))
                try:
                    while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
                        bar.show(done)
                    return task.result()
                finally:
                    if task.cancel():  # interrupted: let go of the store before it is closed
                        await asyncio.wait({task})
        finally:
            await cluster.close()
    finally:
        await store.close()


def _finish(done: _Done, *, yes: bool, as_json: bool) -> None:
    if as_json:
        show_json({"is_dry": not yes, **done.told})
    else:
        done.show()
        if not yes:
            show_line("dry run: nothing was done; --yes does it")
    if done.is_failed:
        raise typer.Exit(EXIT_FAILED)


def _table(nothing: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if rows:
        show_table(columns, rows)
    else:
        show_line(nothing)
