"""`tidelog groups ...`: clients of the v3 routes."""

import datetime as dt
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.completion import GroupArgument
from tidelog.service.cli.errors import BadUsage, NotThere, Unreachable
from tidelog.service.cli.options import Commands, ServerOption, YesOption
from tidelog.service.cli.output import age, confirm, show_json, show_line, show_table, warn
from tidelog.service.cli.positions import Ago, Form, forms_in_words, in_words, now, position
from tidelog.service.client.connection import Connection, quoted

RESET_TO = (Form.EDGES, Form.OFFSET, Form.TIME)

groups = Commands(no_args_is_help=True, help="List, describe, reset, delete consumer groups.")


def _path_of(group: str) -> str:
    return f"{{cluster}}/consumer-groups/{quoted(group)}"


@groups.command("list")
def list_groups(
    *,
    watch: Annotated[
        float | None,
        Option(
            "--watch",
            "-w",
            min=0.1,
            max=86_400,
            metavar="SECONDS",
            help="list again after each interval",
        ),
    ] = None,
    command: ClientCommand,
) -> None:
    """List the groups that have members or committed offsets, with their lag.

    `oldest` is the age of the oldest record that a group has not read.

    Example: tidelog groups list --watch 5
    """
    while True:
        try:
            listed = command.request("GET", "/tidelog/v1/groups")["data"]
        except Unreachable as error:
            if watch is None:
                raise
            warn(str(error))
        else:
            _show_groups(command, [_group(group) for group in listed])
        if watch is None:
            return
        time.sleep(watch)
        if not command.as_json:
            show_line("")


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


def _show_groups(command: ClientCommand, listed: list[dict[str, Any]]) -> None:
    columns = ("group", "state", "members", "lag", "oldest", "generation", "assignor", "topics")
    rows = []
    for group in listed:
        shown = {**group, "oldest": age(group["lag_seconds"]), "topics": " ".join(group["topics"])}
        rows.append([shown[name] for name in columns])
    command.show_rows(listed, columns, rows)


@groups.command("describe")
def describe_group(group: GroupArgument, command: ClientCommand) -> None:
    """Show the members of a group with their partitions, and the clients whose joins must wait."""
    description = command.run(lambda connection: _description(connection, group))
    if command.as_json:
        show_json(description)
        return
    state, generation = description["state"], description["generation"]
    coordinator = f"coordinator broker {description['coordinator']}"
    line = f"{group}: {state}, generation {generation}, {description['assignor']}, {coordinator}"
    show_line(line)
    _show_members(description["members"])
    if description["positions"]:
        show_line("")
        _show_lags(description["positions"])
    for member in description["held"]:
        client = f", client {member['client_id']}" if member["client_id"] else ""
        host = f", at {member['host']}" if member["host"] else ""
        show_line(
            f"held: {member['instance_id'] or member['consumer_id']}{client}{host}: "
            f"{member['short_lives']} members ended soon after they joined; it may join again "
            f"in {member['retry_after_ms'] / 1000:.0f} s"
        )


def _show_members(members: Sequence[dict[str, Any]]) -> None:
    rows = []
    for member in members:
        texts = {"instance": member["instance"] or "", "partitions": " ".join(member["partitions"])}
        rows.append({**member, **texts}.values())
    if rows:
        show_table(("consumer", "instance", "client", "host", "partitions"), rows)
    else:
        show_line("no members")


async def _description(connection: Connection, group: str) -> dict[str, Any]:
    path = f"{await connection.cluster()}/consumer-groups/{quoted(group)}"
    answer = await connection.get_json(path)
    consumers = (await connection.get_json(f"{path}/consumers"))["data"]
    members = [await _member(connection, path, consumer) for consumer in consumers]
    lags = (await connection.get_json(f"{path}/lags"))["data"]
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


async def _member(connection: Connection, path: str, consumer: dict[str, Any]) -> dict[str, Any]:
    name = consumer["consumer_id"]
    below = f"{path}/consumers/{quoted(name)}/assignments"
    assignments = (await connection.get_json(below))["data"]
    return {
        "consumer": name,
        "instance": consumer["instance_id"],
        "client": consumer["client_id"],
        "host": consumer["host"],
        "partitions": [
            f"{assignment['topic_name']}-{assignment['partition_id']}" for assignment in assignments
        ],
    }


@groups.command("lag")
def show_lag(group: GroupArgument, command: ClientCommand) -> None:
    """Show the lag of a group for each partition."""
    answer = command.request("GET", f"{_path_of(group)}/lags")
    rows = [_lag(lag) for lag in answer["data"]]
    if command.as_json:
        show_json({"group": group, "lag": sum(row["lag"] for row in rows), "partitions": rows})
    else:
        _show_lags(rows)


def _lag(data: dict[str, Any]) -> dict[str, Any]:
    """Return the lag in a partition with the field names of this command.

    `offset` is the committed offset or, without one, the offset at which the member starts;
    `committed` is None then.
    """
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
    shown = []
    for row in rows:
        committed = "none" if row["committed"] is None else str(row["committed"])
        texts = {"committed": committed, "lag_seconds": age(row["lag_seconds"])}
        shown.append({**row, **texts}.values())
    columns = ("topic", "partition", "position", "committed", "end", "lag", "oldest", "consumer")
    show_table(columns, shown)


class ResetOptions(NamedTuple):
    """Where the committed offsets go: one of --to, --by and --file."""

    to: Annotated[str | None, Option("--to", metavar="POSITION", help=forms_in_words(RESET_TO))] = (
        None
    )
    by: Annotated[
        int | None,
        Option("--by", metavar="N", help="add N to each committed offset: -100 reads again"),
    ] = None
    file: Annotated[
        Path | None, Option("--file", metavar="FILE", help="the offsets of `groups export`")
    ] = None
    topic: Annotated[
        str | None, Option("--topic", "-t", help="default: all topics with committed offsets")
    ] = None
    partition: Annotated[
        list[int] | None,
        Option("--partition", "-p", min=0, metavar="N", help="partition of the topic; repeatable"),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the fields of the request. Raises BadUsage."""
        if sum(option is not None for option in (self.to, self.by, self.file)) != 1:
            raise BadUsage("give one of --to, --by and --file")
        if self.partition and self.topic is None:
            raise BadUsage("--partition needs --topic")
        if self.file is not None:
            if self.topic is not None:
                raise BadUsage("--file names the topics: it does not go with --topic")
            return {"to": "OFFSETS", "offsets": _exported(self.file)}
        fields = {"to": "SHIFT", "shift_by": self.by} if self.to is None else _target(self.to)
        if self.topic is not None:
            fields |= {"topic_name": self.topic, "partition_ids": self.partition or None}
        return fields


@groups.command("reset")
def reset_group(
    group: GroupArgument,
    *,
    options: ResetOptions,
    dry_run: Annotated[
        bool, Option("--dry-run", help="show the new offsets, do not commit them")
    ] = False,
    command: ClientCommand,
) -> None:
    """Set committed offsets of a group that has no members: all or none.

    \b
    Examples:
      tidelog groups reset billing --topic events --to -6h --dry-run
      tidelog groups reset billing --topic events -p 3 --by -100
    """
    body = {"validate_only": dry_run, **options.body()}
    target = None if options.to is None else position(options.to, RESET_TO)
    wanted_words = "" if target is None else in_words(target, now())
    missing, is_new = "", False
    if options.topic is None and options.file is None:
        missing = f"group {group!r} has no committed offsets: name a topic with --topic"
    else:
        is_new = _is_new(command, group)
    path = f"{_path_of(group)}/offsets:reset"
    rows = [
        {
            "topic": new_offset["topic_name"],
            "partition": new_offset["partition_id"],
            "offset": new_offset["offset"],
        }
        for new_offset in command.request("POST", path, json=body, missing=missing)["data"]
    ]
    if command.as_json:
        show_json({"group": group, "is_dry_run": dry_run, "partitions": rows})
    else:
        command.show_rows(rows, ("topic", "partition", "offset"))
        if target is not None:
            subject = f"{group} {'would go' if dry_run else 'goes'}"
            is_met = not isinstance(target, int) or all(row["offset"] == target for row in rows)
            nearest = "" if is_met else ", or to the nearest offset of a partition without it"
            show_line(f"{subject} to {wanted_words}{nearest}")
    if is_new:
        warn(f"group {group!r} is new: it had no members and no committed offsets")


def _is_new(command: ClientCommand, group: str) -> bool:
    try:
        command.request("GET", _path_of(group))
    except NotThere:
        return True
    return False


def _target(text: str) -> dict[str, Any]:
    target = position(text, RESET_TO)
    if isinstance(target, Ago):
        return {"to": "DURATION", "duration_ms": target.ms}
    if isinstance(target, int):
        return {"to": "OFFSET", "offset": target}
    if isinstance(target, dt.datetime):
        return {"to": "TIMESTAMP", "timestamp": target.isoformat()}
    return {"to": "EARLIEST" if target == "beginning" else "LATEST"}


@groups.command("export")
def export_group(ctx: typer.Context, group: GroupArgument, *, server: ServerOption = None) -> None:
    """Print the committed offsets of a group as JSON, for `groups reset --file`.

    Example: tidelog groups export billing > billing.json
    """
    fields = ("topic_name", "partition_id", "offset")
    rows = ClientCommand(ctx, server).request("GET", f"{_path_of(group)}/offsets")["data"]
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


@groups.command("delete")
def delete_group(group: GroupArgument, *, yes: YesOption = False, command: ClientCommand) -> None:
    """Delete a group that has no members, with its committed offsets."""
    confirm("deleting", group, f"Delete group {group} and its committed offsets?", yes=yes)
    command.request("DELETE", _path_of(group), missing=f"group {group} does not exist")
    command.show({"group": group, "deleted": True}, f"deleted {group}")
