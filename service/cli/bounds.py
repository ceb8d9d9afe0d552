"""`tidelog bounds`: the bounds that all processes of a cluster obey."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from tidelog.service.cli.option_units import duration_ms
from tidelog.service.cli.output import Progress
from tidelog.service.cli.store_commands import ChangeOptions, Done, StoreOptions
from tidelog.storage.core.actions import SetBounds

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession


def bounds(
    *,
    view_age_ms: Annotated[
        int | None,
        Option(
            parser=duration_ms(1),
            metavar="DURATION",
            help="a view of the WAL that is not refreshed for this time expires",
        ),
    ] = None,
    wal_retention_ms: Annotated[
        int | None,
        Option(
            parser=duration_ms(1),
            metavar="DURATION",
            help="minimum time that WAL entries are kept; at least 4 view ages",
        ),
    ] = None,
    file_grace_ms: Annotated[
        int | None,
        Option(
            parser=duration_ms(),
            metavar="DURATION",
            help="time between removal of a file from its table and deletion of the file; must "
            "exceed the duration of a read",
        ),
    ] = None,
    store: StoreOptions,
    change: ChangeOptions,
) -> None:
    """Show or change the bounds that all brokers and commands of a cluster obey.

    A lowered retention or grace takes effect after the old retention or grace plus ten minutes.
    This is elapsed time, which passes only while the log gets new entries.

    Example: tidelog bounds --file-grace-ms 2d --store s3://bucket/prefix --yes
    """
    new_bounds = SetBounds(view_age_ms, wal_retention_ms, file_grace_ms)
    is_shown = new_bounds == SetBounds()

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction.change_time_bounds import bounds_of, change_bounds

        if is_shown:
            bound_states = await bounds_of(cluster)
        else:
            bound_states = await change_bounds(cluster, new_bounds, is_dry=not change.yes)

        columns = ("bound", "in effect, ms", "set to, ms", "waits, ms")
        fields = {"bounds": [bound_state._asdict() for bound_state in bound_states]}
        return Done.with_table(fields, "", columns, bound_states)

    result = store.run("reading bounds", work)
    change._replace(yes=change.yes or is_shown).finish(result)
