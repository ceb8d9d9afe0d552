"""`tidelog groups ...`: a thin layer on the v3 routes."""

import datetime as dt
import re
from typing import Annotated, Any

import typer

from service.cli_records import position
from service.cli_results import BadUsage, NotThere, confirm, show_json, show_line, show_table
from service.cli_topics import JsonOption, ServerOption

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
_DURATION = re.compile(r"-(\d{1,9})(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

app = typer.Typer(
    no_args_is_help=True, help="List, describe, reset and delete consumer groups; show their lag."
)


@app.command("list")
def list_groups(server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List groups that have members or committed offsets."""
    from service.cli_client import Client, with_client

    async def work(client: Client) -> list[dict[str, Any]]:
        listed = (await client.get_json(f"{await client.cluster()}/consumer-groups"))["data"]
        return [
            {
                "group": each["consumer_group_id"],
                "state": each["state"],
                "generation": each["generation"],
                "assignor": each["partition_assignor"],
            }
            for each in listed
        ]

    groups = with_client(server, work)
    if as_json:
        show_json(groups)
    else:
        columns = ("group", "state", "generation", "assignor")
        show_table(columns, [tuple(each.values()) for each in groups])


@app.command("describe")
def describe_group(
    group: GroupArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show a group's members, and which partitions each reads."""
    from service.cli_client import Client, quoted, with_client

    async def work(client: Client) -> dict[str, Any]:
        path = f"{await client.cluster()}/consumer-groups/{quoted(group)}"
        held = await client.get_json(path)
        members = []
        for each in (await client.get_json(f"{path}/consumers"))["data"]:
            name = each["consumer_id"]
            below = f"{path}/consumers/{quoted(name)}/assignments"
            assigned = (await client.get_json(below))["data"]
            members.append(
                {
                    "consumer": name,
                    "instance": each["instance_id"],
                    "client": each["client_id"],
                    "partitions": [
                        f"{one['topic_name']}-{one['partition_id']}" for one in assigned
                    ],
                }
            )
        return {
            "group": group,
            "state": held["state"],
            "generation": held["generation"],
            "assignor": held["partition_assignor"],
            "members": members,
        }

    told = with_client(server, work)
    if as_json:
        show_json(told)
        return
    show_line(f"{group}: {told['state']}, generation {told['generation']}, {told['assignor']}")
    rows = [
        (
            each["consumer"],
            each["instance"] or "",
            each["client"],
            " ".join(each["partitions"]),
        )
        for each in told["members"]
    ]
    show_table(("consumer", "instance", "client", "partitions"), rows)


@app.command("lag")
def show_lag(
    group: GroupArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show how far a group is behind, partition by partition."""
    from service.cli_client import Client, quoted, with_client

    async def work(client: Client) -> list[dict[str, Any]]:
        path = f"{await client.cluster()}/consumer-groups/{quoted(group)}/lags"
        return [
            {
                "topic": each["topic_name"],
                "partition": each["partition_id"],
                "offset": each["current_offset"],
                "end": each["log_end_offset"],
                "lag": each["lag"],
                "consumer": each["consumer_id"],
            }
            for each in (await client.get_json(path))["data"]
        ]

    rows = with_client(server, work)
    if as_json:
        show_json({"group": group, "lag": sum(each["lag"] for each in rows), "partitions": rows})
    else:
        columns = ("topic", "partition", "offset", "end", "lag", "consumer")
        show_table(columns, [tuple(each.values()) for each in rows])


@app.command("reset")
def reset_group(
    group: GroupArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="POSITION",
            help="beginning, end, an offset, @ an ISO time, or so long ago: -90s, -15m, -6h, -2d",
        ),
    ],
    topic: Annotated[
        str | None,
        typer.Option("--topic", "-t", help="all that the group has committed when not given"),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="of the topic; repeat for more"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be, and leave it as it is")
    ] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a group that nobody reads for go on elsewhere."""
    from service.cli_client import Client, quoted, with_client

    if partition and topic is None:
        raise BadUsage("--partition goes with --topic")
    body = {"topic_name": topic, "partition_ids": partition, "validate_only": dry_run}
    body |= _target(to)

    async def work(client: Client) -> list[dict[str, Any]]:
        path = f"{await client.cluster()}/consumer-groups/{quoted(group)}/offsets:reset"
        data = (await client.post(path, json=body)).json()["data"]
        return [
            {"topic": one["topic_name"], "partition": one["partition_id"], "offset": one["offset"]}
            for one in data
        ]

    rows = with_client(server, work)
    if as_json:
        show_json({"group": group, "is_dry_run": dry_run, "partitions": rows})
    else:
        show_table(("topic", "partition", "offset"), [tuple(each.values()) for each in rows])


@app.command("delete")
def delete_group(
    group: GroupArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a group without members, and all that it has committed."""
    from service.cli_client import Client, quoted, with_client

    if not yes:
        confirm("forgetting", group, f"Forget group {group} and its offsets?")

    async def work(client: Client) -> None:
        path = f"{await client.cluster()}/consumer-groups/{quoted(group)}"
        try:
            await client.call("DELETE", path)
        except NotThere:
            raise NotThere(f"group {group} does not exist") from None

    with_client(server, work)
    if as_json:
        show_json({"group": group, "deleted": True})
    else:
        show_line(f"deleted {group}")


def _target(text: str) -> dict[str, Any]:
    ago = _DURATION.fullmatch(text)
    if ago is not None:
        return {"to": "DURATION", "duration_ms": int(ago[1]) * _UNIT_MS[ago[2]]}
    found = position(text)
    if isinstance(found, int):
        return {"to": "OFFSET", "offset": found}
    if isinstance(found, dt.datetime):
        return {"to": "TIMESTAMP", "timestamp": found.isoformat()}
    return {"to": "EARLIEST" if found == "beginning" else "LATEST"}
