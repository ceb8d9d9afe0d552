"""`tidelog repair`, `upgrade`, `bounds`, `backup` and `restore`: commands for a whole cluster.

**On a crash**: run the command again. Before `restore` runs again, empty the new store.
"""

import asyncio
import datetime as dt
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.service.cli.positions import duration_ms, moment, size_bytes
from tidelog.service.cli.requests import JsonOption, now
from tidelog.service.cli.results import (
    BadUsage,
    Progress,
    command_errors,
    plural,
    show_line,
    warn,
    with_progress,
)
from tidelog.service.cli.stores.maintenance import ApplyOption, TopicsArgument, skipped_topics
from tidelog.service.cli.stores.on_store import (
    Done,
    Row,
    finish,
    run_on_store,
    table,
)
from tidelog.service.cli.stores.store_options import (
    NO_FLAGS,
    EndpointOption,
    RegionOption,
    StoreFlags,
    settings_of,
    with_store_options,
)

if TYPE_CHECKING:
    from tidelog.compaction.backups.restore import Restored
    from tidelog.compaction.repair_wal import WalDamage
    from tidelog.compaction.session import MaintenanceSession


LOST_COLUMNS = ("topic", "partition", "first offset", "end offset", "why")
UNREAD_SHOWN = 20

MEMORY = "memory:"


class RepairWay(StrEnum):
    """Ways of `tidelog repair`."""

    RESTORE = "restore"
    ADOPT = "adopt"


@with_store_options
def repair(
    topics: TopicsArgument = None,
    store: StoreFlags = NO_FLAGS,
    way: Annotated[
        RepairWay | None,
        typer.Option(
            "--way",
            help="restore: put back the files of the log's own commits. adopt: keep the rows as "
            "another program left them, and lose the records that this program removed (default: "
            "restore if possible)",
        ),
    ] = None,
    drop_after: Annotated[
        int | None,
        typer.Option(
            "--drop-after",
            metavar="ENTRY",
            min=0,
            help="give up all entries after this entry, because the WAL behind it is damaged or "
            "has a hole. Stop all brokers first",
        ),
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost", help="give up tail records that cannot be read, and repair nothing else"
        ),
    ] = False,
    strays: Annotated[
        bool,
        typer.Option("--strays", help="delete objects in wal/ that are not entries"),
    ] = False,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repair the WAL, tails, or tables in doubt (damaged, changed by another program, or ahead of
    the WAL).

    Without --drop-after, --lost or --strays the command repairs tables. Until a table in doubt is
    repaired, nothing is sealed into it or collected from it. If the WAL is damaged, the
    command shows only this damage, because nothing else can be read. The exit status is 1 if
    something stays damaged.

    Example: tidelog repair events --store s3://bucket/prefix --yes
    """

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
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
    cluster: "MaintenanceSession", topics: list[str] | None, way: RepairWay | None, *, yes: bool
) -> Done:
    from tidelog.compaction.repair_tables import NONE
    from tidelog.compaction.repair_tables import repair as run

    repairs = await run(cluster, topics, is_dry=not yes, way=None if way is None else way.value)

    def show() -> None:
        columns = ("topic", "version", "why", "way", "what", "lost offsets")
        rows: list[Row] = [
            (*table_repair[:5], _lost(table_repair.lost)) for table_repair in repairs
        ]
        table("no table is in doubt", columns, rows)

    fields = {
        "repaired": [table_repair._asdict() for table_repair in repairs],
        **skipped_topics(cluster),
    }
    is_failed = bool(cluster.skipped) or any(table_repair.way == NONE for table_repair in repairs)
    return Done(fields, show, is_failed)


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
        rows: list[Row] = [lost_range[:4] for lost_range in damage.lost]
        table("no records of these entries are known", LOST_COLUMNS[:4], rows)
        if damage.unread:
            numbers = ", ".join(map(str, damage.unread[:UNREAD_SHOWN]))
            show_line(f"the records of these entries are not known: {numbers}")

    fields = None if damage is None else damage._asdict()
    if damage is not None and fields is not None:
        fields["lost"] = [lost_range._asdict() for lost_range in damage.lost]
    return Done({"wal": fields, "dropped": is_done}, show, damage is not None and not is_done)


async def _strays(cluster: "MaintenanceSession", *, yes: bool) -> Done:
    from tidelog.compaction import repair_wal

    strays = await repair_wal.strays(cluster)
    if yes:
        await repair_wal.delete_strays(cluster, strays)
    rows: list[Row] = [(info.key, info.size) for info in strays]
    fields = {"strays": [info.key for info in strays], "deleted": yes}
    return Done(fields, lambda: table("no stray in wal/", ("object", "bytes"), rows))


async def _lost_records(
    cluster: "MaintenanceSession", topics: list[str] | None, *, yes: bool
) -> Done:
    from tidelog.compaction import repair_wal

    lost_ranges = await repair_wal.lost_records(cluster, topics, is_dry=not yes)
    fields = {"lost": [lost_range._asdict() for lost_range in lost_ranges], "given_up": yes}

    def show() -> None:
        table(
            "all records of the tails can be read",
            LOST_COLUMNS,
            [tuple(lost_range) for lost_range in lost_ranges],
        )

    return Done(fields, show)


@with_store_options
def upgrade(
    store: StoreFlags = NO_FLAGS,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Raise the level of the log's format to the newest that this version knows.

    The command fails while a live broker does not know the level (a broker counts as live until
    broker_timeout_ms after its last heartbeat). An upgrade cannot be undone. Older versions can
    neither read nor write the log afterwards.

    Example: tidelog upgrade --store s3://bucket/prefix --yes
    """

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction.upgrade import upgrade as run

        membership = settings_of(store).log_settings().membership
        change = await run(cluster, is_dry=not yes, settings=membership)
        line = f"level of the format: {change.before} to {change.after}"
        if change.before == change.after:
            line = f"the log has level {change.after} of the format already"
        return Done(change._asdict(), lambda: show_line(line))

    finish(run_on_store(store, "upgrading", work), yes=yes, as_json=as_json)


@with_store_options
def bounds(
    view_age_ms: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms(1),
            metavar="DURATION",
            help="a view of the WAL that is not refreshed for this time expires",
        ),
    ] = None,
    wal_retention_ms: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms(1),
            metavar="DURATION",
            help="minimum time that WAL entries are kept; at least 4 view ages",
        ),
    ] = None,
    file_grace_ms: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms(),
            metavar="DURATION",
            help="time between removal of a file from its table and deletion of the file; must "
            "exceed the duration of a read",
        ),
    ] = None,
    store: StoreFlags = NO_FLAGS,
    yes: ApplyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show or change the bounds that all brokers and commands of a cluster obey.

    A lowered retention or grace takes effect after the old retention or grace plus ten minutes.
    This is elapsed time, which passes only while the log gets new entries.

    Example: tidelog bounds --file-grace-ms 2d --store s3://bucket/prefix --yes
    """
    from tidelog.storage.core.actions import SetBounds

    change = SetBounds(view_age_ms, wal_retention_ms, file_grace_ms)
    is_shown = change == SetBounds()

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction.upgrade import bounds_of, change_bounds

        if is_shown:
            bound_states = await bounds_of(cluster)
        else:
            bound_states = await change_bounds(cluster, change, is_dry=not yes)

        def show() -> None:
            columns = ("bound", "in effect, ms", "set to, ms", "waits, ms")
            table("", columns, [tuple(bound_state) for bound_state in bound_states])

        return Done({"bounds": [bound_state._asdict() for bound_state in bound_states]}, show)

    finish(run_on_store(store, "reading bounds", work), yes=yes or is_shown, as_json=as_json)


def _lost(ranges: "Sequence[tuple[int, int, int]]") -> str:
    return ", ".join(f"{number}: {first} to {end - 1}" for number, first, end in ranges)


# -- backups


@with_store_options
def backup(
    to: Annotated[
        str, typer.Argument(metavar="TO", help="folder or URL of the backups, like --store")
    ],
    store: StoreFlags = NO_FLAGS,
    verify: Annotated[
        bool, typer.Option("--verify", help="read the whole copy before the backup becomes valid")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            min=1,
            help="after the backup, remove all backups but the N newest (default: remove none)",
        ),
    ] = None,
    max_bytes_per_s: Annotated[
        int | None,
        typer.Option(
            "--max-bytes-per-s",
            metavar="SIZE",
            parser=size_bytes(),
            help="read at most this many bytes a second on average, for example 50MB (default: no "
            "limit)",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a cluster to another store, while its brokers run.

    A second backup to the same place copies only new objects. During a backup, collection deletes
    nothing. A table in doubt is copied as it is, and the exit status is then 1.

    Example: tidelog backup s3://backups/events --store s3://bucket/prefix --keep 30
    """
    _refuse_memory(to)

    async def work(cluster: "MaintenanceSession", progress: Progress) -> Done:
        from tidelog.compaction.backups.backup import backup as run
        from tidelog.storage.store.open import open_store

        place = await open_store(to, s3=settings_of(store).s3)
        try:
            done = await run(
                cluster,
                place,
                is_verified=verify,
                keep=keep,
                bytes_per_s=max_bytes_per_s,
                on_bytes=progress,
            )
        finally:
            await place.close()
        made = done.manifest
        fields = {
            "seq": made.seq,
            "from_ms": made.from_ms,
            "to_ms": made.to_ms,
            "objects": len(made.objects),
            "bytes": sum(backup_object.size for backup_object in made.objects),
            "copied_objects": done.copied_objects,
            "copied_bytes": done.copied_bytes,
            "doubts": done.doubts,
            "removed_backups": done.pruned.backups,
            "removed_objects": done.pruned.objects,
            "removed_bytes": done.pruned.size,
        }
        _warn_of(done.doubts)
        if done.prune_problem:
            warn(f"the backup is complete, but old backups are left: {done.prune_problem}")
        count = plural(len(made.objects), "object")
        line = (
            f"backup of entry {made.seq} ({_time(made.to_ms)}): {count}, "
            f"{fields['bytes']:,} bytes; copied {plural(done.copied_objects, 'object')}, "
            f"{done.copied_bytes:,} bytes"
        )
        if keep is not None:
            removed = f"removed {plural(done.pruned.backups, 'backup')}"
            line += f"; {removed}, {plural(done.pruned.objects, 'object')}"
        return Done(fields, lambda: show_line(line), bool(done.doubts or done.prune_problem))

    finish(run_on_store(store, "copying", work), yes=True, as_json=as_json)


def restore(
    place: Annotated[
        str, typer.Argument(metavar="FROM", help="folder or URL of the backups, as for `backup`")
    ],
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="empty store of the new cluster")
    ],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="restore the commits up to this time: an ISO time, or -2h for two hours before "
            "now (default: the newest backup)",
        ),
    ] = None,
    cluster_id: Annotated[
        str | None,
        typer.Option(
            "--cluster-id",
            metavar="ID",
            help="id of the new cluster (default: a new id). Give the old cluster's id only if the "
            "old cluster is gone. Brokers then commit the acks=1 records that it left on disks",
        ),
    ] = None,
    s3_endpoint: EndpointOption = None,
    s3_region: RegionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new cluster in an empty store from a backup.

    Every object is verified. The exit status is 1 if a table was in doubt in the backup.

    Example: tidelog restore s3://backups/events --store s3://bucket/new
    """
    _refuse_memory(place, store)
    at_ms = None if at is None else int(moment(at, now()).timestamp() * 1000)
    s3 = settings_of(StoreFlags(store, s3_endpoint, s3_region), warn).s3

    async def work(progress: Progress) -> "Restored":
        from tidelog.compaction.backups.restore import restore as run
        from tidelog.storage.runtime.clock import SystemClock
        from tidelog.storage.store.open import open_store
        from tidelog.storage.store.read_only import open_to_read

        copies = await open_to_read(place, s3)
        target = await open_store(store, s3=s3)
        try:
            clock = SystemClock()
            return await run(
                copies, target, clock, at_ms=at_ms, cluster_id=cluster_id, on_bytes=progress
            )
        finally:
            await target.close()
            await copies.close()

    with command_errors():
        made = asyncio.run(with_progress("restoring", work))
    _warn_of(made.doubts)
    line = (
        f"cluster {made.cluster_id} up to entry {made.seq} ({_time(made.time_ms)}): "
        f"{plural(made.objects, 'object')}, {made.size:,} bytes"
    )
    fields = {"bytes" if name == "size" else name: value for name, value in made._asdict().items()}
    finish(Done(fields, lambda: show_line(line), bool(made.doubts)), yes=True, as_json=as_json)


def _refuse_memory(*urls: str) -> None:
    for url in urls:
        if url.startswith(MEMORY):
            raise BadUsage(f"{url} exists inside one process only: take a folder or s3://")


def _warn_of(doubts: list[str]) -> None:
    for doubt in doubts:
        warn(f"copied as it is: {doubt}; see tidelog repair")


def _time(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="milliseconds")
