"""`tidelog repair`: the WAL, the tails and the tables of a cluster."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.output import Progress, show_line
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    StoreOptions,
    TopicsArgument,
    skipped_topics,
    table,
)

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.compaction.repair_wal import WalDamage

LOST_COLUMNS = ("topic", "partition", "first offset", "end offset", "why")
UNREAD_SHOWN = 20


def repair(
    topics: TopicsArgument = None,
    *,
    store: StoreOptions,
    way: Annotated[
        Literal["restore", "adopt"] | None,
        Option(
            "--way",
            help="restore: put back the files of the log's own commits. adopt: keep the rows as "
            "another program left them, and lose the records that this program removed (default: "
            "restore if possible)",
        ),
    ] = None,
    drop_after: Annotated[
        int | None,
        Option(
            "--drop-after",
            metavar="ENTRY",
            min=0,
            help="give up all entries after this entry, because the WAL behind it is damaged or "
            "has a hole. Stop all brokers first",
        ),
    ] = None,
    lost: Annotated[
        bool,
        Option("--lost", help="give up tail records that cannot be read, and repair nothing else"),
    ] = False,
    strays: Annotated[
        bool, Option("--strays", help="delete objects in wal/ that are not entries")
    ] = False,
    change: ChangeOptions,
) -> None:
    """Repair the WAL, tails, or tables in doubt.

    A table in doubt is damaged, changed by another program, or ahead of the WAL.

    Without --drop-after, --lost or --strays the command repairs tables. Until a table in doubt is
    repaired, nothing is sealed into it or collected from it. If the WAL is damaged, the
    command shows only this damage, because nothing else can be read. The exit status is 1 if
    something stays damaged.

    Example: tidelog repair events --store s3://bucket/prefix --yes
    """

    given_options = [
        name
        for name, is_given in (
            ("--way", way is not None),
            ("--drop-after", drop_after is not None),
            ("--lost", lost),
            ("--strays", strays),
        )
        if is_given
    ]
    if len(given_options) > 1:
        raise BadUsage(f"{' and '.join(given_options)} exclude each other")
    if topics and (strays or drop_after is not None):
        raise BadUsage(f"{given_options[0]} is for the whole cluster: remove the topics")

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction import repair_wal

        if drop_after is not None and change.yes:
            membership = store.settings().log_settings().membership
            dropped = await repair_wal.drop_after(cluster, drop_after, membership)
            return _wal_done(dropped, is_done=True)
        damage = await repair_wal.damage_of(cluster)
        if damage is not None or drop_after is not None:
            return _wal_done(damage, is_done=False)
        if strays:
            return await _strays(cluster, yes=change.yes)
        if lost:
            return await _lost_records(cluster, topics, yes=change.yes)
        return await _tables(cluster, topics, way, yes=change.yes)

    change.finish(store.run("repairing", work, report_damage=False))


async def _tables(
    cluster: "MaintenanceSession", topics: list[str] | None, way: str | None, *, yes: bool
) -> Done:
    from tidelog.compaction.repair_tables import NONE
    from tidelog.compaction.repair_tables import repair as run

    repairs = await run(cluster, topics, is_dry=not yes, way=way)

    return Done.with_table(
        {"repaired": [fix._asdict() for fix in repairs], **skipped_topics(cluster)},
        "no table is in doubt",
        ("topic", "version", "why", "way", "what", "lost offsets"),
        [(*fix[:5], _lost(fix.lost)) for fix in repairs],
        is_failed=bool(cluster.skipped) or any(fix.way == NONE for fix in repairs),
    )


def _wal_done(damage: "WalDamage | None", *, is_done: bool) -> Done:
    def show() -> None:
        if damage is None:
            show_line("the WAL can be read to its end")
            return
        show_line(f"the WAL can be read up to entry {damage.readable_to}: {damage.why}")
        if is_done:
            show_line(f"all later entries, up to {damage.newest}, were given up: start the brokers")
        else:
            show_line(
                "restore the object from a copy of the store, or give up all later entries, up to "
                f"{damage.newest}, with --drop-after {damage.readable_to}"
            )
        rows = [lost_range[:4] for lost_range in damage.lost]
        table("no records of these entries are known", LOST_COLUMNS[:4], rows)
        if damage.unread:
            numbers = ", ".join(map(str, damage.unread[:UNREAD_SHOWN]))
            show_line(f"the records of these entries are not known: {numbers}")

    fields = None
    if damage is not None:
        lost = [lost_range._asdict() for lost_range in damage.lost]
        fields = {**damage._asdict(), "lost": lost}
    return Done({"wal": fields, "dropped": is_done}, show, damage is not None and not is_done)


async def _strays(cluster: "MaintenanceSession", *, yes: bool) -> Done:
    from tidelog.compaction import repair_wal

    strays = await repair_wal.strays(cluster)
    if yes:
        await repair_wal.delete_strays(cluster, strays)
    fields = {"strays": [info.key for info in strays], "deleted": yes}
    rows = [(info.key, info.size) for info in strays]
    return Done.with_table(fields, "no stray in wal/", ("object", "bytes"), rows)


async def _lost_records(
    cluster: "MaintenanceSession", topics: list[str] | None, *, yes: bool
) -> Done:
    from tidelog.compaction import repair_wal

    lost_ranges = await repair_wal.lost_records(cluster, topics, is_dry=not yes)
    fields = {"lost": [lost_range._asdict() for lost_range in lost_ranges], "given_up": yes}

    nothing = "all records of the tails can be read"
    return Done.with_table(fields, nothing, LOST_COLUMNS, lost_ranges)


def _lost(ranges: "Sequence[tuple[int, int, int]]") -> str:
    return ", ".join(f"{number}: {first} to {end - 1}" for number, first, end in ranges)
