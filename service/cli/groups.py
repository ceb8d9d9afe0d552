"""`tidelog groups ...`: clients of the v3 routes."""

import datetime as dt
from typing import Annotated, Any

import typer

from tidelog.service.cli.completion import group_names
from tidelog.service.cli.positions import (
    Ago,
    Form,
    forms_in_words,
    in_words,
    position,
)
from tidelog.service.cli.requests import (
    Commands,
    JsonOption,
    ServerOption,
    YesOption,
    now,
    quoted,
    request,
)
from tidelog.service.cli.results import (
    BadUsage,
    confirm,
    show,
    show_json,
    show_line,
    show_rows,
    show_table,
)

GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", show_default=False, autocompletion=group_names)
]
RESET_TO = (Form.EDGES, Form.OFFSET, Form.TIME)

app = Commands(no_args_is_help=True, help="List, describe, reset, delete consumer groups.")


@app.command("list")
def list_groups(
    ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the groups that have members or committed offsets."""
    listed = request(ctx, server, "GET", "{cluster}/consumer-groups")["data"]
    groups = [_group(each) for each in listed]
    show_rows(groups, ("group", "state", "generation", "assignor"), as_json=as_json)


@app.command("describe")
def describe_group(
    ctx: typer.Context,
    group: GroupArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the members of a group with their partitions, and the clients whose joins must wait."""
    from tidelog.service.cli.client import Client, with_client

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
                    "host": each["host"],
                    "partitions": [
                        f"{one['topic_name']}-{one['partition_id']}" for one in assigned
                    ],
                }
            )
        return {
            **_group(held),
            "coordinator": held["coordinator"]["related"].rpartition("/")[2],
            "members": members,
            "held": held.get("held_members") or [],
        }

    description = with_client(ctx, server, work)
    if as_json:
        show_json(description)
        return
    state, generation = description["state"], description["generation"]
    coordinator = f"coordinator broker {description['coordinator']}"
    line = f"{group}: {state}, generation {generation}, {description['assignor']}, {coordinator}"
    show_line(line)
    rows = [
        (
            each["consumer"],
            each["instance"] or "",
            each["client"],
            each["host"],
            " ".join(each["partitions"]),
        )
        for each in description["members"]
    ]
    if rows:
        show_table(("consumer", "instance", "client", "host", "partitions"), rows)
    else:
        show_line(f"no members; its committed offsets: tidelog groups lag {group}")
    for each in description["held"]:
        show_line(
            f"held: {each['instance_id'] or each['consumer_id']}"
            + (f", client {each['client_id']}" if each["client_id"] else "")
            + (f", at {each['host']}" if each["host"] else "")
            + f": {each['short_lives']} short lives, it may join again in "
            f"{each['retry_after_ms'] / 1000:.0f} s"
        )


@app.command("lag")
def show_lag(
    ctx: typer.Context,
    group: GroupArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lag of a group for each partition."""
    found = request(ctx, server, "GET", f"{{cluster}}/consumer-groups/{quoted(group)}/lags")
    fields = {
        "topic": "topic_name",
        "partition": "partition_id",
        "offset": "current_offset",
        "end": "log_end_offset",
        "lag": "lag",
        "consumer": "consumer_id",
    }
    rows = [{name: each[field] for name, field in fields.items()} for each in found["data"]]
    if as_json:
        show_json({"group": group, "lag": sum(each["lag"] for each in rows), "partitions": rows})
    else:
        show_rows(rows, tuple(fields), as_json=False)


@app.command("reset")
def reset_group(
    ctx: typer.Context,
    group: GroupArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="POSITION",
            help=forms_in_words(RESET_TO),
        ),
    ],
    topic: Annotated[
        str | None,
        typer.Option("--topic", "-t", help="default: all topics with committed offsets"),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, metavar="N", help="partition of the topic; repeatable"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the new offsets, do not commit them")
    ] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set committed offsets of a group that has no members.

    Example: tidelog groups reset billing --topic events --to -6h --dry-run
    """
    if partition and topic is None:
        raise BadUsage("--partition needs --topic")
    body = {"topic_name": topic, "partition_ids": partition, "validate_only": dry_run}
    body |= _target(to)
    path = f"{{cluster}}/consumer-groups/{quoted(group)}/offsets:reset"
    rows = [
        {"topic": each["topic_name"], "partition": each["partition_id"], "offset": each["offset"]}
        for each in request(ctx, server, "POST", path, json=body)["data"]
    ]
    if as_json:
        show_json({"group": group, "is_dry_run": dry_run, "partitions": rows})
    else:
        show_rows(rows, ("topic", "partition", "offset"), as_json=False)
        what = f"{group} {'would go' if dry_run else 'goes'}"
        show_line(f"{what} to {in_words(position(to, RESET_TO), now())}")


@app.command("delete")
def delete_group(
    ctx: typer.Context,
    group: GroupArgument,
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a group that has no members, with its committed offsets."""
    confirm("deleting", group, f"Delete group {group} and its committed offsets?", yes=yes)
    path = f"{{cluster}}/consumer-groups/{quoted(group)}"
    request(ctx, server, "DELETE", path, missing=f"group {group} does not exist")
    show({"group": group, "deleted": True}, f"deleted {group}", as_json=as_json)


def _group(data: dict[str, Any]) -> dict[str, Any]:
    """Return a group with the field names of this command."""
    return {
        "group": data["consumer_group_id"],
        "state": data["state"],
        "generation": data["generation"],
        "assignor": data["partition_assignor"],
    }


def _target(text: str) -> dict[str, Any]:
    found = position(text, RESET_TO)
    if isinstance(found, Ago):
        return {"to": "DURATION", "duration_ms": found.ms}
    if isinstance(found, int):
        return {"to": "OFFSET", "offset": found}
    if isinstance(found, dt.datetime):
        return {"to": "TIMESTAMP", "timestamp": found.isoformat()}
    return {"to": "EARLIEST" if found == "beginning" else "LATEST"}
