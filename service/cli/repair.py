"""`tidelog repair`, `upgrade` and `bounds`: what changes a cluster as a whole, rarely and by hand.

**On a crash**: a command may be killed at any moment; run it again.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.service.cli.maintenance import (
    ApplyOption,
    Done,
    Progress,
    Row,
    TopicsArgument,
    finish,
    run_on_store,
    skipped_topics,
    table,
)
from tidelog.service.cli.replay import StoreOption, settings_of
from tidelog.service.cli.requests import JsonOption
from tidelog.service.cli.results import show_line

if TYPE_CHECKING:
    from tidelog.compaction.offline import OfflineCluster


class RepairWay(StrEnum):
    """Ways of `tidelog repair`."""

    RESTORE = "restore"
    ADOPT = "adopt"


def repair(
    topics: TopicsArgument = None,
    store: StoreOption = None,
    way: Annotated[
        RepairWay | None,
        typer.Option(
            "--way",
            help="restore: put back what the log had there. adopt: keep the rows as the other "
            "program left them; records that it took out are lost (default: restore if possible)",
        ),
    ] = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repair tables in doubt: damaged, changed by another program, or ahead of the WAL.

    Nothing is sealed into such a table and nothing is collected from it. The exit status is 1 if a
    table stays in doubt.

    Example: tidelog repair events --store s3://bucket/prefix --yes
    """

    async def work(cluster: "OfflineCluster", _: Progress) -> Done:
        from tidelog.compaction.repair import NONE
        from tidelog.compaction.repair import repair as run

        found = await run(cluster, topics, is_dry=not yes, way=None if way is None else way.value)

        def show() -> None:
            columns = ("topic", "version", "why", "way", "what", "lost offsets")
            rows: list[Row] = [(*each[:5], _lost(each.lost)) for each in found]
            table("no table is in doubt", columns, rows)

        fields = {"repaired": [each._asdict() for each in found], **skipped_topics(cluster)}
        is_failed = bool(cluster.skipped) or any(each.way == NONE for each in found)
        return Done(fields, show, is_failed)

    finish(run_on_store(store, "repairing", work), yes=yes, as_json=as_json)


def upgrade(
    store: StoreOption = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Raise the level of the log's format to the newest that this version knows.

    Refused while a live broker (by broker_timeout_ms) does not know the level. There is no way
    back: older versions can neither read nor write the log afterwards.

    Example: tidelog upgrade --store s3://bucket/prefix --yes
    """

    async def work(cluster: "OfflineCluster", _: Progress) -> Done:
        from tidelog.compaction.upgrade import upgrade as run

        membership = settings_of(store).log_settings().membership
        change = await run(cluster, is_dry=not yes, settings=membership)
        line = f"level of the format: {change.before} to {change.after}"
        if change.before == change.after:
            line = f"the log has level {change.after} of the format already"
        return Done(change._asdict(), lambda: show_line(line))

    finish(run_on_store(store, "upgrading", work), yes=yes, as_json=as_json)


def bounds(
    view_age_ms: Annotated[
        int | None,
        typer.Option(min=1, help="a view of the WAL that is not refreshed for this time expires"),
    ] = None,
    wal_retention_ms: Annotated[
        int | None,
        typer.Option(min=1, help="minimum time that WAL entries are kept; at least 4 view ages"),
    ] = None,
    file_grace_ms: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="time between removal of a file from its table and its deletion; must exceed the "
            "duration of a read",
        ),
    ] = None,
    store: StoreOption = None,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show or change the bounds that all brokers and commands of a cluster obey.

    A lowered retention or grace is in effect when the old one and ten minutes have passed, as
    measured by the entries of the log.

    Example: tidelog bounds --file-grace-ms 172800000 --store s3://bucket/prefix --yes
    """
    from tidelog.storage.core.actions import SetBounds

    change = SetBounds(view_age_ms, wal_retention_ms, file_grace_ms)
    is_shown = change == SetBounds()

    async def work(cluster: "OfflineCluster", _: Progress) -> Done:
        from tidelog.compaction.upgrade import bounds_of, change_bounds

        if is_shown:
            found = await bounds_of(cluster)
        else:
            found = await change_bounds(cluster, change, is_dry=not yes)

        def show() -> None:
            columns = ("bound", "in effect, ms", "set to, ms", "waits, ms")
            table("", columns, [tuple(each) for each in found])

        return Done({"bounds": [each._asdict() for each in found]}, show)

    finish(run_on_store(store, "reading bounds", work), yes=yes or is_shown, as_json=as_json)


def _lost(ranges: "Sequence[tuple[int, int, int]]") -> str:
    return ", ".join(f"{number}: {first} to {end - 1}" for number, first, end in ranges)
