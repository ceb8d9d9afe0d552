"""`tidelog delete-records`: it deletes the oldest records of partitions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.output import Progress, show_table
from tidelog.service.cli.positions import BEGINNING, END, Form, PartitionOffsets, position
from tidelog.service.cli.retain import retained_rows
from tidelog.service.cli.store_commands import (
    BrokerOption,
    ChangeOptions,
    Done,
    StoreOptions,
    skipped_topics,
)
from tidelog.service.client.connection import quoted

if TYPE_CHECKING:
    from tidelog.compaction.maintenance_session import MaintenanceSession


def delete_records(
    ctx: typer.Context,
    topic: TopicArgument,
    before: Annotated[
        list[str],
        Argument(metavar="PARTITION:OFFSET", help=f"first offset to keep; {END} keeps none"),
    ],
    *,
    store: StoreOptions,
    server: BrokerOption = None,
    change: ChangeOptions,
) -> None:
    """Delete the records of a topic before given offsets.

    Sealed records are removed immediately, other records at the first retention after their seal.
    With --server, a broker deletes the records for clients immediately, and its retention removes
    them from the table within minutes; the key needs the right DELETE on the topic. Older versions
    of the table keep the removed records until collection. Backups keep them, too.

    Example: tidelog delete-records events 0:1000 1:end --yes
    """
    offsets = _offsets(before)
    if store.is_replaced_by(server):
        change.finish(_deleted_at_broker(ClientCommand(ctx, server), topic, offsets, change))
        return

    async def work(cluster: "MaintenanceSession", _: Progress) -> Done:
        from tidelog.compaction.delete_records import delete_records as run

        results = await run(cluster, topic, offsets, is_dry=not change.yes)
        return retained_rows(results, skipped_topics(cluster))

    change.finish(store.run("deleting", work, is_reading=not change.yes))


def _offsets(texts: Sequence[str]) -> dict[int, int]:
    """Return the first offsets to keep, by partition; -1 stands for the end."""
    place = position(",".join(texts), (Form.PARTITIONS,))
    assert isinstance(place, PartitionOffsets)
    if any(offset == BEGINNING for _, offset in place.of):
        raise BadUsage(f"nothing is before the {BEGINNING}: give an offset or {END}")
    return {number: offset if isinstance(offset, int) else -1 for number, offset in place.of}


def _deleted_at_broker(
    command: ClientCommand, topic: str, offsets: Mapping[int, int], change: ChangeOptions
) -> Done:
    """Delete the records before the offsets, by partition; -1 is the end."""
    partitions = [{"partition_id": number, "offset": end} for number, end in offsets.items()]
    path = f"/tidelog/v1/topics/{quoted(topic)}/records:delete"
    body = {"partitions": partitions, "validate_only": not change.yes}
    rows = [
        {
            "topic": topic,
            "partition": partition["partition_id"],
            "was": partition["was"],
            "log_start_offset": partition["log_start_offset"],
        }
        for partition in command.request("POST", path, json=body)["partitions"]
    ]
    columns = ("topic", "partition", "log start", "moves to")
    return Done({"moved": rows}, lambda: show_table(columns, [row.values() for row in rows]))
