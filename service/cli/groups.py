"""`tidelog groups ...`: clients of the v3 routes."""

import datetime as dt
import json
import time
from pathlib import Path
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
    NotThere,
    Unreachable,
    age,
    confirm,
    show,
    show_json,
    show_line,
    show_rows,
    show_table,
    warn,
)

GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", show_default=False, autocompletion=group_names)
]
RESET_TO = (Form.EDGES, Form.OFFSET, Form.TIME)

app = Commands(no_args_is_help=True, help="List, describe, reset, delete consumer groups.")


@app.command("list")
def list_groups(
    ctx: typer.Context,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", "-w", min=0.1, metavar="SECONDS", help="list again after each interval"
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the groups that have members or committed offsets, with their lag.

    `oldest` is the age of the oldest record that a group has not read.

    Example: tidelog groups list --watch 5
    """
    while True:
        try:
            listed = request(ctx, server, "GET", "/tidelog/v1/groups")["data"]
        except Unreachable as error:
            if watch is None:
                raise
            warn(str(error))
        else:
            _show_groups([_group(group) for group in listed], as_json=as_json)
        if watch is None:
            return
        time.sleep(watch)
        if not as_json:
            show_line("")


def _show_groups(groups: list[dict[str, Any]], *, as_json: bool) -> None:
    columns = ("group", "state", "members", "lag", "oldest", "generation", "assignor", "topics")
    rows = [
        tuple(
            age(group["lag_seconds"])
            if name == "oldest"
            else " ".join(group["topics"])
            if name == "topics"
            else group[name]
            for name in columns
        )
        for group in groups
    ]
    show_rows(groups, columns, rows, as_json=as_json)


@app.command("describe")
def describe_group(
    ctx: typer.Context,
    group: GroupArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the members of a group with their partitions, and the clients whose joins must wait."""
    from tidelog.service.cli.client import CommandConnection, with_client

    async def work(client: CommandConnection) -> dict[str, Any]:
        path = f"{await client.cluster()}/consumer-groups/{quoted(group)}"
        answer = await client.get_json(path)
        members = []
        for consumer in (await client.get_json(f"{path}/consumers"))["data"]:
            name = consumer["consumer_id"]
            below = f"{path}/consumers/{quoted(name)}/assignments"
            assigned = (await client.get_json(below))["data"]
            members.append(
                {
                    "consumer": name,
                    "instance": consumer["instance_id"],
                    "client": consumer["client_id"],
                    "host": consumer["host"],
                    "partitions": [
                        f"{assignment['topic_name']}-{assignment['partition_id']}"
                        for assignment in assigned
                    ],
                }
            )
        lags = (await client.get_json(f"{path}/lags"))["data"]
        return {
            "group": answer["consumer_group_id"],
            "state": answer["state"],
            "generation": answer["generation"],
            "assignor": answer["partition_assignor"],
            "coordinator": answer["coordinator"]["related"].rpartition("/")[2],
            "members": members,
            "held": answer.get("held_members") or [],
            "positions": [_lag(lag) for lag in lags],
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
            member["consumer"],
            member["instance"] or "",
            member["client"],
            member["host"],
            " ".join(member["partitions"]),
        )
        for member in description["members"]
    ]
    if rows:
        show_table(("consumer", "instance", "client", "host", "partitions"), rows)
    else:
        show_line("no members")
    if description["positions"]:
        show_line("")
        _show_lags(description["positions"])
    for member in description["held"]:
        show_line(
            f"held: {member['instance_id'] or member['consumer_id']}"
            + (f", client {member['client_id']}" if member["client_id"] else "")
            + (f", at {member['host']}" if member["host"] else "")
            + f": {member['short_lives']} members ended soon after they joined; it may join again "
            f"in {member['retry_after_ms'] / 1000:.0f} s"
        )


@app.command("lag")
def show_lag(
    ctx: typer.Context,
    group: GroupArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lag of a group for each partition."""
    answer = request(ctx, server, "GET", f"{{cluster}}/consumer-groups/{quoted(group)}/lags")
    rows = [_lag(lag) for lag in answer["data"]]
    if as_json:
        show_json({"group": group, "lag": sum(row["lag"] for row in rows), "partitions": rows})
    else:
        _show_lags(rows)


def _lag(data: dict[str, Any]) -> dict[str, Any]:
    """Return the lag in a partition with the field names of this command. `offset` is the committed
    offset or, without one, the offset at which the member starts; `committed` is None then."""
    return {
        "topic": data["topic_name"],
        "partition": data["partition_id"],
        "offset": data["current_offset"],
        "committed": data["current_offset"] if data["is_committed"] else None,
        "end": data["log_end_offset"],
        "lag": data["lag"],
        "lag_seconds": data.get("lag_seconds"),
        "consumer": data["consumer_id"],
    }


def _show_lags(rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            row["topic"],
            row["partition"],
            row["offset"],
            "none" if row["committed"] is None else str(row["committed"]),
            row["end"],
            row["lag"],
            age(row["lag_seconds"]),
            row["consumer"],
        )
        for row in rows
    ]
    columns = ("topic", "partition", "position", "committed", "end", "lag", "oldest", "consumer")
    show_table(columns, shown)


@app.command("reset")
def reset_group(  # noqa: PLR0913 - the options of the command
    ctx: typer.Context,
    group: GroupArgument,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="POSITION",
            help=forms_in_words(RESET_TO),
        ),
    ] = None,
    by: Annotated[
        int | None,
        typer.Option("--by", metavar="N", help="add N to each committed offset: -100 reads again"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="the offsets of `groups export`"),
    ] = None,
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
    """Set committed offsets of a group that has no members: all or none.

    \b
    Examples:
      tidelog groups reset billing --topic events --to -6h --dry-run
      tidelog groups reset billing --topic events -p 3 --by -100
    """
    if sum(option is not None for option in (to, by, file)) != 1:
        raise BadUsage("give one of --to, --by and --file")
    if partition and topic is None:
        raise BadUsage("--partition needs --topic")
    if file is not None and topic is not None:
        raise BadUsage("--file names the topics: it does not go with --topic")
    body: dict[str, Any] = {"validate_only": dry_run}
    if topic is not None:
        body |= {"topic_name": topic, "partition_ids": partition or None}
    if file is not None:
        body |= {"to": "OFFSETS", "offsets": _exported(file)}
    else:
        body |= {"to": "SHIFT", "shift_by": by} if to is None else _target(to)
    path = f"{{cluster}}/consumer-groups/{quoted(group)}/offsets:reset"
    missing, is_new = "", False
    if topic is None and file is None:
        missing = f"group {group!r} has no committed offsets: name a topic with --topic"
    else:
        is_new = _is_new(ctx, server, group)
    rows = [
        {
            "topic": new_offset["topic_name"],
            "partition": new_offset["partition_id"],
            "offset": new_offset["offset"],
        }
        for new_offset in request(ctx, server, "POST", path, json=body, missing=missing)["data"]
    ]
    if as_json:
        show_json({"group": group, "is_dry_run": dry_run, "partitions": rows})
    else:
        show_rows(rows, ("topic", "partition", "offset"), as_json=False)
        if to is not None:
            what = f"{group} {'would go' if dry_run else 'goes'}"
            asked = position(to, RESET_TO)
            is_met = not isinstance(asked, int) or all(row["offset"] == asked for row in rows)
            nearest = "" if is_met else ", or to the nearest offset of a partition without it"
            show_line(f"{what} to {in_words(asked, now())}{nearest}")
    if is_new:
        warn(f"group {group!r} is new: it had no members and no committed offsets")


def _is_new(ctx: typer.Context, server: str | None, group: str) -> bool:
    try:
        request(ctx, server, "GET", f"{{cluster}}/consumer-groups/{quoted(group)}")
    except NotThere:
        return True
    return False


@app.command("export")
def export_group(ctx: typer.Context, group: GroupArgument, server: ServerOption = None) -> None:
    """Print the committed offsets of a group as JSON, for `groups reset --file`.

    Example: tidelog groups export billing > billing.json
    """
    path = f"{{cluster}}/consumer-groups/{quoted(group)}/offsets"
    fields = ("topic_name", "partition_id", "offset")
    rows = request(ctx, server, "GET", path)["data"]
    show_json({"group": group, "offsets": [{name: row[name] for name in fields} for row in rows]})


def _exported(file: Path) -> list[dict[str, Any]]:
    """Return the offsets in a file of `groups export`. Raises BadUsage."""
    try:
        offsets: list[dict[str, Any]] = json.loads(file.read_bytes())["offsets"]
    except OSError as error:
        raise BadUsage(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise BadUsage(f"{file} is not the output of `tidelog groups export`") from None
    return offsets


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
        "members": data["members"],
        "lag": data["total_lag"],
        "lag_seconds": data.get("lag_seconds"),
        "topics": data["topics"],
    }


def _target(text: str) -> dict[str, Any]:
    target = position(text, RESET_TO)
    if isinstance(target, Ago):
        return {"to": "DURATION", "duration_ms": target.ms}
    if isinstance(target, int):
        return {"to": "OFFSET", "offset": target}
    if isinstance(target, dt.datetime):
        return {"to": "TIMESTAMP", "timestamp": target.isoformat()}
    return {"to": "EARLIEST" if target == "beginning" else "LATEST"}
