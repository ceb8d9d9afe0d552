"""`tidelog upgrade`: the level of the format of a cluster."""

from typing import TYPE_CHECKING

from tidelog.service.cli.output import Progress, show_line
from tidelog.service.cli.store_commands import ChangeOptions, Done, StoreOptions

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession


def upgrade(store: StoreOptions, change: ChangeOptions) -> None:
    """Raise the level of the log's format to the newest that this version knows.

    The command fails while a live broker does not know the level (a broker counts as live until
    broker_timeout_ms after its last heartbeat). An upgrade cannot be undone. Older versions can
    neither read nor write the log afterwards.

    Example: tidelog upgrade --store s3://bucket/prefix --yes
    """

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction.upgrade import upgrade as run

        membership = store.settings().log_settings().membership
        level = await run(cluster, is_dry=not change.yes, settings=membership)
        line = f"level of the format: {level.before} to {level.after}"
        if level.before == level.after:
            line = f"the log has level {level.after} of the format already"
        return Done(level._asdict(), lambda: show_line(line))

    change.finish(store.run("upgrading", work))
