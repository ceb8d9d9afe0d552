"""`tidelog retain`: it deletes the records that are older than their topic's retention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidelog.service.cli.output import Progress
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    StoreOptions,
    TopicsArgument,
    recorded,
    skipped_topics,
)

if TYPE_CHECKING:
    from tidelog.compaction.log_starts import Retained
    from tidelog.compaction.maintenance_session import MaintenanceSession


def retain(topics: TopicsArgument = None, *, store: StoreOptions, change: ChangeOptions) -> None:
    """Delete the records that exceed retention.ms or retention.bytes.

    Removes whole segments, and the records that `delete-records` left in the tables.

    Example: tidelog retain events --store s3://bucket/prefix --yes
    """

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        step = retain_step(cluster, topics, yes=change.yes)
        return await recorded(cluster, "retain", step, change.yes and not topics)

    change.finish(store.run("retaining", work, is_reading=not change.yes))


async def retain_step(
    cluster: "MaintenanceSession", topics: Sequence[str] | None, *, yes: bool
) -> Done:
    """Delete the records that exceed their topics' retention, or, without `yes`, show them."""
    from tidelog.compaction.retention import retain as run

    results = await run(cluster, topics, is_dry=not yes)
    return retained_rows(results, skipped_topics(cluster))


def retained_rows(results: "Sequence[Retained]", skipped: dict[str, Any]) -> Done:
    columns = ("topic", "partition", "why", "log start", "moves to", "segments", "rows")
    return Done.with_table(
        {"retained": [result._asdict() for result in results], **skipped},
        "nothing to retain",
        (*columns, "bytes", "rewritten bytes"),
        results,
        is_failed=bool(skipped["skipped"]),
    )
