"""`tidelog collect`: deletes the objects that the cluster does not need any more."""

import time
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tidelog.service.cli.output import Progress, show_line
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    GraceOption,
    StoreOptions,
    grace_of,
    recorded,
    skipped_topics,
    table,
)

if TYPE_CHECKING:
    from tidelog.compaction.collect import CollectionPlan
    from tidelog.compaction.garbage import Grace
    from tidelog.compaction.maintenance_session import MaintenanceSession


def collect(
    *,
    store: StoreOptions,
    file_grace_ms: GraceOption = None,
    unknown_topics: Annotated[
        bool,
        Option(
            "--unknown-topics",
            help="also delete objects of topics that the cluster state does not contain",
        ),
    ] = False,
    change: ChangeOptions,
) -> None:
    """Delete objects that are no longer referenced.

    A dry run also writes a checkpoint, so that later runs can delete older WAL entries.
    """

    async def work(cluster: "MaintenanceSession", progress: Progress) -> Done:
        grace = grace_of(cluster, file_grace_ms)
        step = collect_step(cluster, grace, progress, yes=change.yes, takes_unknown=unknown_topics)
        return await recorded(cluster, "collect", step, change.yes)

    change.finish(store.run("collecting", work))


async def collect_step(
    cluster: "MaintenanceSession",
    grace: "Grace",
    progress: Progress,
    *,
    yes: bool,
    takes_unknown: bool = False,
) -> Done:
    """Delete the objects that are not needed, or, without `yes`, show them."""
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
    rows = [(*kind, *count) for kind, count in sums.items()]
    table("nothing to collect", ("what", "why", "objects", "bytes", "oldest, s"), rows)
    if planned.waiting:
        show_line(f"{planned.waiting:,} more bytes of garbage are in their grace period")
