"""`tidelog repair` and `upgrade`: what changes a cluster as a whole, rarely and by hand.

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
    from tidelog.compaction.repair_wal import WalDamage


LOST_COLUMNS = ("topic", "partition", "first offset", "end offset", "why")
UNREAD_SHOWN = 20


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
    drop_after: Annotated[
        int | None,
        typer.Option(
            "--drop-after",
            metavar="ENTRY",
            min=0,
            help="the WAL is damaged or has a hole after this entry: continue there, and give up "
            "all later entries. Stop all brokers first",
        ),
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost", help="give up records of tails that cannot be read, and nothing else"
        ),
    ] = False,
    strays: Annotated[
        bool,
        typer.Option("--strays", help="delete objects in wal/ that are no entries"),
    ] = False,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repair what is damaged: the WAL, tails, tables in doubt (damaged, changed by another program,
    or ahead of the WAL).

    Without --drop-after, --lost or --strays it repairs tables: nothing is sealed into a table in
    doubt and nothing is collected from it. A damaged WAL is shown first, since nothing else can be
    read then. The exit status is 1 if something stays damaged.

    Example: tidelog repair events --store s3://bucket/prefix --yes
    """

    async def work(cluster: "OfflineCluster", _: Progress) -> Done:
        from tidelog.compaction import repair_wal

        if drop_after is not None and yes:
            membership = settings_of(store).log_settings().membership
            return _wal_done(
                await repair_wal.drop_after(cluster, drop_after, membership), is_done=True
            )
        damage = await repair_wal.damage_of(cluster)
        if damage is not None or drop_after is not None:
            return _wal_done(damage, is_done=False)
        if strays:
            return await _strays(cluster, yes=yes)
        if lost:
            return await _lost_records(cluster, topics, yes=yes)
        return await _tables(cluster, topics, way, yes=yes)

    done = run_on_store(store, "repairing", work, report_damage=False)
    finish(done, yes=yes, as_json=as_json)


async def _tables(
    cluster: "OfflineCluster", topics: list[str] | None, way: RepairWay | None, *, yes: bool
) -> Done:
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


def _wal_done(damage: "WalDamage | None", *, is_done: bool) -> Done:
    def show() -> None:
        if damage is None:
            show_line("the WAL can be read to its end")
            return
        show_line(f"the WAL can be read up to entry {damage.readable_to}: {damage.why}")
        if is_done:
            show_line(f"all entries from there to {damage.newest} were given up: start the brokers")
        else:
            show_line(
                "restore the object from a copy of the store, or give up all entries from there to "
                f"{damage.newest}: --drop-after {damage.readable_to}"
            )
        rows: list[Row] = [each[:4] for each in damage.lost]
        table("no records are known there", LOST_COLUMNS[:4], rows)
        if damage.unread:
            numbers = ", ".join(map(str, damage.unread[:UNREAD_SHOWN]))
            show_line(f"what these entries have is not known: {numbers}")

    fields = None if damage is None else damage._asdict()
    if damage is not None and fields is not None:
        fields["lost"] = [each._asdict() for each in damage.lost]
    return Done({"wal": fields, "dropped": is_done}, show, damage is not None and not is_done)


async def _strays(cluster: "OfflineCluster", *, yes: bool) -> Done:
    from tidelog.compaction import repair_wal

    found = await repair_wal.strays(cluster)
    if yes:
        await repair_wal.delete_strays(cluster, found)
    rows: list[Row] = [(info.key, info.size) for info in found]
    fields = {"strays": [info.key for info in found], "deleted": yes}
    return Done(fields, lambda: table("no stray in wal/", ("object", "bytes"), rows))


async def _lost_records(cluster: "OfflineCluster", topics: list[str] | None, *, yes: bool) -> Done:
    from tidelog.compaction import repair_wal

    found = await repair_wal.lost_records(cluster, topics, is_dry=not yes)
    fields = {"lost": [each._asdict() for each in found], "given_up": yes}

    def show() -> None:
        table("all records of the tails can be read", LOST_COLUMNS, [tuple(each) for each in found])

    return Done(fields, show)


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


def _lost(ranges: "Sequence[tuple[int, int, int]]") -> str:
    return ", ".join(f"{number}: {first} to {end - 1}" for number, first, end in ranges)
