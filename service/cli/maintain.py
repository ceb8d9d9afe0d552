"""`tidelog maintain`: the steps of `retain`, `compact` and `collect`."""

from typing import TYPE_CHECKING

from tidelog.service.cli.collect import collect_step
from tidelog.service.cli.compact import EngineOptions, compact_step
from tidelog.service.cli.output import Progress
from tidelog.service.cli.retain import retain_step
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    GraceOption,
    StoreOptions,
    TopicsArgument,
    grace_of,
    recorded,
)

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession


def maintain(
    topics: TopicsArgument = None,
    *,
    store: StoreOptions,
    file_grace_ms: GraceOption = None,
    engines: EngineOptions,
    change: ChangeOptions,
) -> None:
    """Run retain, compact and collect, for example as a cron job.

    With topics, retain and compact are of these topics; collect is always of the whole cluster.

    Example: tidelog maintain --store s3://bucket/prefix --yes
    """
    settings = store.settings()
    yes, is_recorded = change.yes, change.yes and not topics

    async def work(cluster: "MaintenanceSession", progress: Progress) -> Done:
        grace = grace_of(cluster, file_grace_ms)
        retaining = retain_step(cluster, topics, yes=yes)
        steps = [await recorded(cluster, "retain", retaining, is_recorded)]
        compacting = compact_step(cluster, topics, engines, settings, progress, yes=yes)
        steps.append(await recorded(cluster, "compact", compacting, is_recorded))
        collecting = collect_step(cluster, grace, progress, yes=yes)
        steps.append(await recorded(cluster, "collect", collecting, is_recorded))

        def show() -> None:
            for step in steps:
                step.show()

        fields = {name: value for step in steps for name, value in step.fields.items()}
        return Done(fields, show, any(step.is_failed for step in steps))

    change.finish(store.run("maintaining", work))
