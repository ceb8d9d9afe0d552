"""`tidelog restore`: a cluster from its backup.

**On a crash**: empty the new store, and run the command again.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tidelog.service.cli.backup import refuse_memory, time_text, warn_of_doubts
from tidelog.service.cli.errors import command_errors
from tidelog.service.cli.options import JsonOption
from tidelog.service.cli.output import Progress, plural, show_line, warn, with_progress
from tidelog.service.cli.positions import moment, now
from tidelog.service.cli.store_commands import (
    ChangeOptions,
    Done,
    EndpointOption,
    RegionOption,
    StoreOptions,
)
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.open import open_store

if TYPE_CHECKING:
    from tidelog.compaction.backups.restore import Restored


def restore(
    place: Annotated[
        str, Argument(metavar="FROM", help="folder or URL of the backups, as for `backup`")
    ],
    *,
    store: Annotated[str, Option("--store", metavar="URL", help="empty store of the new cluster")],
    until: Annotated[
        str | None,
        Option(
            "--at",
            metavar="TIME",
            help="restore the commits up to this time: an ISO time, or -2h for two hours before "
            "now (default: the newest backup)",
        ),
    ] = None,
    cluster_id: Annotated[
        str | None,
        Option(
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
    refuse_memory(place, store)
    at_ms = None if until is None else int(moment(until, now()).timestamp() * 1000)
    s3 = StoreOptions(store, s3_endpoint, s3_region).settings(warn).s3

    async def work(progress: Progress) -> "Restored":
        from tidelog.compaction.backups.restore import restore as run
        from tidelog.storage.store.read_only import open_to_read

        copies = await open_to_read(place, s3)
        target = await open_store(store, s3=s3)
        try:
            return await run(
                copies, target, SystemClock(), at_ms=at_ms, cluster_id=cluster_id, on_bytes=progress
            )
        finally:
            await target.close()
            await copies.close()

    with command_errors():
        restored = asyncio.run(with_progress("restoring", work))
    warn_of_doubts(restored.doubts)
    line = (
        f"cluster {restored.cluster_id} up to entry {restored.seq} "
        f"({time_text(restored.time_ms)}): "
        f"{plural(restored.objects, 'object')}, {restored.size:,} bytes"
    )
    fields = {
        "bytes" if name == "size" else name: value for name, value in restored._asdict().items()
    }
    result = Done(fields, lambda: show_line(line), bool(restored.doubts))
    ChangeOptions(True, as_json).finish(result)
