"""`tidelog retain`, `compact`, `collect`, `delete-records`, `maintain`: options and output;
`tidelog.compaction` does the work.

The commands work on the store, with or without running brokers, by hand or from cron. Commands that
delete or rewrite are dry runs without `--yes`. Two runs at once are safe, because the run that
loses a race reports this and changes no data.

**On a crash**: a command may be killed at any moment; run it again.
"""

import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidelog.service.cli.positions import (
    BEGINNING,
    END,
    Form,
    PartitionOffsets,
    duration_ms,
    position,
)
from tidelog.service.cli.requests import JsonOption
from tidelog.service.cli.results import (
    BadUsage,
    Progress,
    show_line,
    warn,
)
from tidelog.service.cli.stores import upkeep
from tidelog.service.cli.stores.engines import (
    EngineChoice,
    EngineName,
    EngineOption,
    started,
)
from tidelog.service.cli.stores.on_store import (
    Done,
    Row,
    finish,
    run_on_store,
    table,
)
from tidelog.service.cli.stores.store_options import (
    NO_FLAGS,
    BrokerOption,
    MasterOption,
    StoreFlags,
    at_broker,
    settings_of,
    with_store_options,
)
from tidelog.service.cli.topics import TopicArgument

if TYPE_CHECKING:
    from tidelog.compaction.collect import CollectionPlan
    from tidelog.compaction.garbage import Grace
    from tidelog.compaction.retention import Retained
    from tidelog.compaction.session import MaintenanceSession
    from tidelog.service.telemetry.maintenance_results import Kind
    from tidelog.storage.runtime.clock import Clock
    from tidelog.storage.store.object_store import ObjectStore

TopicNames = Sequence[str] | None
Work = Coroutine[Any, Any, "Done"]


TopicsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="TOPIC", help="default: all topics")
]
ApplyOption = Annotated[
    bool,
    typer.Option("--yes/--dry-run", "-y", help="apply the changes (default: show them only)"),
]
GraceOption = Annotated[
    int | None,
    typer.Option(
        "--file-grace-ms",
        parser=duration_ms(),
        metavar="DURATION",
        help="time between removal of a file from its table and deletion of the file. The minimum "
        "and the default are the cluster's file grace (tidelog bounds). A file that no commit "
        "references yet is kept for at least a day",
    ),
]


@with_store_options
def retain(
    topics: TopicsArgument = None,
    store: StoreFlags = NO_FLAGS,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the records that exceed retention.ms or retention.bytes.

    Removes whole segments, and the records that `delete-records` left in the tables.

    Example: tidelog retain events --store s3://bucket/prefix --yes
    """

    def work(cluster: "MaintenanceSession", _: Progress) -> Work:
        step = _retain(cluster, topics, yes=yes)
        return _recorded(cluster, "retain", step, yes and not topics)

    _apply(store, "retaining", work, yes=yes, as_json=as_json, is_reading=not yes)


@with_store_options
def delete_records(
    ctx: typer.Context,
    topic: TopicArgument,
    before: Annotated[
        list[str],
        typer.Argument(metavar="PARTITION:OFFSET", help=f"first offset to keep; {END} keeps none"),
    ],
    store: StoreFlags = NO_FLAGS,
    server: BrokerOption = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the records of a topic before given offsets.

    Sealed records are removed immediately, other records at the first retention after their seal.
    With --server, a broker deletes the records for clients immediately, and its retention removes
    them from the table within minutes; the key needs the right DELETE on the topic. Older versions
    of the table keep the removed records until collection. Backups keep them, too.

    Example: tidelog delete-records events 0:1000 1:end --yes
    """
    offsets = _offsets(before)
    if at_broker(server, store):
        upkeep.delete_records(ctx, server, topic, offsets, yes=yes, as_json=as_json)
        return

    from tidelog.compaction.retention import delete_records as delete

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        results = await delete(cluster, topic, offsets, is_dry=not yes)
        return _retained(results, skipped_topics(cluster))

    _apply(store, "deleting", work, yes=yes, as_json=as_json, is_reading=not yes)


@with_store_options
def compact(  # noqa: PLR0913 - a command's options are its arguments
    ctx: typer.Context,
    topics: TopicsArgument = None,
    store: StoreFlags = NO_FLAGS,
    server: BrokerOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="compact even below min.cleanable.dirty.ratio")
    ] = False,
    engine: EngineOption = EngineName.AUTO,
    master: MasterOption = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small segments, and compact by key.

    Topics with compact in cleanup.policy keep only the newest record of each key. With --server, a
    broker does the work, one topic after the other, and the key needs the rights ALTER and DESCRIBE
    on the topics. The work goes on if this command is interrupted: see tidelog compactions.

    Example: tidelog compact events --engine in-process --yes
    """
    if at_broker(server, store):
        if engine is EngineName.SPARK or master is not None:
            raise BadUsage("--server excludes --engine spark and --master: a broker has no Spark")
        upkeep.compact(ctx, server, topics, yes=yes, force=force, as_json=as_json)
        return
    choice = EngineChoice(engine, master, settings_of(store))

    def work(cluster: "MaintenanceSession", progress: Progress) -> Work:
        step = _compact(cluster, topics, choice, progress, yes=yes, force=force)
        return _recorded(cluster, "compact", step, yes and not topics)

    _apply(store, "compacting", work, yes=yes, as_json=as_json, is_reading=not yes)


@with_store_options
def collect(
    store: StoreFlags = NO_FLAGS,
    file_grace_ms: GraceOption = None,
    unknown_topics: Annotated[
        bool,
        typer.Option(
            "--unknown-topics",
            help="also delete objects of topics that the cluster state does not contain",
        ),
    ] = False,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete objects that are no longer referenced.

    A dry run also writes a checkpoint, so that later runs can delete older WAL entries.
    """

    def work(cluster: "MaintenanceSession", progress: Progress) -> Work:
        grace = _grace(cluster, file_grace_ms)
        step = _collect(cluster, grace, progress, yes=yes, takes_unknown=unknown_topics)
        return _recorded(cluster, "collect", step, yes)

    _apply(store, "collecting", work, yes=yes, as_json=as_json)


@with_store_options
def maintain(
    topics: TopicsArgument = None,
    store: StoreFlags = NO_FLAGS,
    file_grace_ms: GraceOption = None,
    engine: EngineOption = EngineName.AUTO,
    master: MasterOption = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run retain, compact and collect, for example as a cron job.

    Example: tidelog maintain --store s3://bucket/prefix --yes
    """
    choice = EngineChoice(engine, master, settings_of(store))

    async def work(cluster: "MaintenanceSession", progress: Progress) -> Done:
        grace = _grace(cluster, file_grace_ms)
        is_recorded = yes and not topics
        compacting = _compact(cluster, topics, choice, progress, yes=yes, force=False)
        collecting = _collect(cluster, grace, progress, yes=yes)
        works: list[tuple[Kind, Work]] = [
            ("retain", _retain(cluster, topics, yes=yes)),
            ("compact", compacting),
            ("collect", collecting),
        ]
        with contextlib.ExitStack() as unstarted:
            for _, step in works:
                unstarted.callback(step.close)  # if a step fails, the later ones are not awaited
            steps = [await _recorded(cluster, kind, step, is_recorded) for kind, step in works]

        def show() -> None:
            for step in steps:
                step.show()

        fields = {name: value for step in steps for name, value in step.fields.items()}
        return Done(fields, show, any(step.is_failed for step in steps))

    _apply(store, "maintaining", work, yes=yes, as_json=as_json)


# -- the steps


async def _recorded(
    cluster: "MaintenanceSession", kind: "Kind", step: Work, is_recorded: bool
) -> Done:
    """Return the result of a step. If `is_recorded` is set, also write it to the store. A run of
    only some topics is not recorded, because `tidelog status` shows runs of all topics. An
    interrupted run records nothing."""
    from tidelog.storage.core.errors import LogError

    try:
        done = await step
    except (LogError, OSError) as error:
        if is_recorded:
            await record(cluster.store, cluster.clock, kind, str(error))
        raise
    if is_recorded:
        why = "a part of the work failed: the output of the command has it"
        await record(cluster.store, cluster.clock, kind, why if done.is_failed else "")
    return done


async def record(
    store: "ObjectStore", clock: "Clock", kind: "Kind", failure: str, damage: int = 0
) -> None:
    """Write a result to the store. If this fails, only warn, because the work itself is done."""
    from tidelog.service.telemetry.maintenance_results import result, store_result
    from tidelog.storage.core.errors import LogError

    try:
        now = result(kind, clock.now_ms(), failure, damage=damage)
        await store_result(store, now)
    except (LogError, OSError) as error:
        warn_unrecorded(error)


def warn_unrecorded(error: Exception) -> None:
    warn(f"the result is not recorded, so `tidelog status` does not show it: {error}")


async def _retain(cluster: "MaintenanceSession", topics: TopicNames, *, yes: bool) -> Done:
    from tidelog.compaction.retention import retain as run

    results = await run(cluster, topics, is_dry=not yes)
    return _retained(results, skipped_topics(cluster))


def skipped_topics(cluster: "MaintenanceSession") -> dict[str, Any]:
    """Return the topics that the steps left as they are, with the reasons. Warn about each one."""
    for name, error in cluster.skipped.items():
        warn(f"topic {name} is left as it is: {error}")
    return {"skipped": {name: str(error) for name, error in cluster.skipped.items()}}


def _retained(results: "Sequence[Retained]", skipped: dict[str, Any]) -> Done:
    def show() -> None:
        columns = ("topic", "partition", "why", "log start", "moves to", "segments", "rows")
        rows: list[Row] = [tuple(result) for result in results]
        table("nothing to retain", (*columns, "bytes", "rewritten bytes"), rows)

    fields = {"retained": [result._asdict() for result in results], **skipped}
    return Done(fields, show, bool(skipped["skipped"]))


async def _compact(
    cluster: "MaintenanceSession",
    topics: TopicNames,
    choice: EngineChoice,
    progress: Progress,
    *,
    yes: bool,
    force: bool,
) -> Done:
    from tidelog.compaction.compact import compact as run

    done = 0

    def on_rows(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done)

    results = await run(cluster, topics, is_dry=True, is_forced=force)
    size = sum(result.size for result in results)
    name = choice.of(size).value
    if results and yes:
        async with started(choice, size, cluster) as engine:
            name = engine.name
            results = await run(
                cluster, topics, is_dry=False, is_forced=force, engine=engine, on_rows=on_rows
            )

    def show() -> None:
        upkeep.show_compacted([result._asdict() for result in results])
        if results:
            show_line(f"engine: {name}")

    fields = {"compacted": [result._asdict() for result in results], "engine": name}
    return Done(fields, show, any(result.is_damaged for result in results))


async def _collect(
    cluster: "MaintenanceSession",
    grace: "Grace",
    progress: Progress,
    *,
    yes: bool,
    takes_unknown: bool = False,
) -> Done:
    from tidelog.compaction import collect as collection

    planned = await collection.plan(cluster, grace, takes_unknown=takes_unknown)
    started = time.perf_counter()
    deleted = await collection.collect(cluster, planned, progress) if yes else 0
    fields = {
        "objects": len(planned.garbage),
        "bytes": planned.size,
        "waiting_bytes": planned.waiting,
        "oldest_ms": planned.oldest_ms if planned.garbage else None,
        "seconds": round(time.perf_counter() - started, 3) if yes else None,
        "kept_from": planned.kept_from,
        "topics": [topic.name for topic in planned.emptied],
        "holds": [hold.hold_id for hold in planned.holds],
        "deleted": deleted,
        "garbage": [garbage_object._asdict() for garbage_object in planned.garbage],
    }
    skipped = skipped_topics(cluster)
    is_failed = bool(cluster.skipped)
    return Done({"collected": fields, **skipped}, lambda: _show_plan(planned), is_failed)


def _show_plan(planned: "CollectionPlan") -> None:
    if planned.holds:
        names = ", ".join(hold.hold_id for hold in planned.holds)
        show_line(f"nothing is deleted while a backup runs: {names}")
    sums: dict[tuple[str, str], list[int]] = {}
    for garbage_object in planned.garbage:
        count = sums.setdefault(
            (garbage_object.key.partition("/")[0], garbage_object.why), [0, 0, 0]
        )
        age_ms = planned.now_ms - garbage_object.modified_ms
        count[:] = count[0] + 1, count[1] + garbage_object.size, max(count[2], age_ms // 1000)
    rows: list[Row] = [(*kind, *count) for kind, count in sums.items()]
    table("nothing to collect", ("what", "why", "objects", "bytes", "oldest, s"), rows)
    if planned.waiting:
        show_line(f"{planned.waiting:,} more bytes of garbage are in their grace period")


# -- arguments


def _offsets(before: Sequence[str]) -> dict[int, int]:
    """Return the first offsets to keep, by partition; -1 stands for the end."""
    place = position(",".join(before), (Form.PARTITIONS,))
    assert isinstance(place, PartitionOffsets)
    if any(offset == BEGINNING for _, offset in place.of):
        raise BadUsage(f"nothing is before the {BEGINNING}: give an offset or {END}")
    return {number: offset if isinstance(offset, int) else -1 for number, offset in place.of}


def _grace(cluster: "MaintenanceSession", file_grace_ms: int | None) -> "Grace":
    from tidelog.compaction.garbage import Grace

    least = cluster.state.bounds.now.file_grace_ms
    if file_grace_ms is not None and file_grace_ms < least:
        raise BadUsage(
            f"--file-grace-ms {file_grace_ms} is shorter than the cluster's {least}, which "
            "`tidelog bounds --file-grace-ms` changes"
        )
    return Grace(table_ms=file_grace_ms or least)


def _apply(
    store: StoreFlags,
    what: str,
    work: "Callable[[MaintenanceSession, Progress], Work]",
    *,
    yes: bool,
    as_json: bool,
    is_reading: bool = False,
) -> None:
    finish(run_on_store(store, what, work, is_reading=is_reading), yes=yes, as_json=as_json)
