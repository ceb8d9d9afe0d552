"""`tidelog backup`: copies of a cluster."""

import datetime as dt
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.option_units import size_bytes
from tidelog.service.cli.options import JsonOption
from tidelog.service.cli.output import Progress, plural, show_line, warn
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    StoreOptions,
)
from tidelog.storage.store.open import open_store

if TYPE_CHECKING:
    from tidelog.compaction.backups.backup import BackedUp
    from tidelog.compaction.maintenance_session import MaintenanceSession

MEMORY = "memory:"


def backup(
    to: Annotated[str, Argument(metavar="TO", help="folder or URL of the backups, like --store")],
    *,
    store: StoreOptions,
    verify: Annotated[
        bool, Option("--verify", help="read the whole copy before the backup becomes valid")
    ] = False,
    keep: Annotated[
        int | None,
        Option(
            "--keep",
            metavar="N",
            min=1,
            help="after the backup, remove all backups but the N newest (default: remove none)",
        ),
    ] = None,
    max_bytes_per_s: Annotated[
        int | None,
        Option(
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
    refuse_memory(to)

    async def work(cluster: "MaintenanceSession", progress: Progress) -> "BackedUp":
        from tidelog.compaction.backups.backup import backup as run

        place = await open_store(to, s3=store.settings().s3)
        try:
            return await run(
                cluster,
                place,
                is_verified=verify,
                keep=keep,
                bytes_per_s=max_bytes_per_s,
                on_bytes=progress,
            )
        finally:
            await place.close()

    result = store.run("copying", work)
    warn_of_doubts(result.doubts)
    if result.prune_problem:
        warn(f"the backup is complete, but old backups are left: {result.prune_problem}")
    ChangeOptions(True, as_json).finish(_backed_up(result, is_pruned=keep is not None))


def _backed_up(result: "BackedUp", *, is_pruned: bool) -> Done:
    manifest = result.manifest
    size = sum(backup_object.size for backup_object in manifest.objects)
    fields = {
        "seq": manifest.seq,
        "from_ms": manifest.from_ms,
        "to_ms": manifest.to_ms,
        "objects": len(manifest.objects),
        "bytes": size,
        "copied_objects": result.copied_objects,
        "copied_bytes": result.copied_bytes,
        "doubts": result.doubts,
        "removed_backups": result.pruned.backups,
        "removed_objects": result.pruned.objects,
        "removed_bytes": result.pruned.size,
    }
    count = plural(len(manifest.objects), "object")
    line = (
        f"backup of entry {manifest.seq} ({time_text(manifest.to_ms)}): {count}, {size:,} bytes; "
        f"copied {plural(result.copied_objects, 'object')}, {result.copied_bytes:,} bytes"
    )
    if is_pruned:
        removed = f"removed {plural(result.pruned.backups, 'backup')}"
        line += f"; {removed}, {plural(result.pruned.objects, 'object')}"
    return Done(fields, lambda: show_line(line), bool(result.doubts or result.prune_problem))


def refuse_memory(*urls: str) -> None:
    for url in urls:
        if url.startswith(MEMORY):
            raise BadUsage(f"{url} exists inside one process only: take a folder or s3://")


def warn_of_doubts(doubts: list[str]) -> None:
    for doubt in doubts:
        warn(f"copied as it is: {doubt}; see tidelog repair")


def time_text(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="milliseconds")
