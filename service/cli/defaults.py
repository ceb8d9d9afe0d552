"""`tidelog defaults ...`: the cluster's defaults of topics, a client of the v3 routes."""

from typing import Annotated

import typer

from tidelog.service.cli.requests import Commands, JsonOption, ServerOption, YesOption, request
from tidelog.service.cli.results import BadUsage, show, show_rows
from tidelog.service.cli.topics import changes_in_words, confirm_expiry, parsed_changes, source_of

PATH = "{cluster}/broker-configs"

app = Commands(
    no_args_is_help=True,
    help="List and alter the cluster's defaults of topics. Topics that do not set a config have "
    "its default.",
)


@app.command("list")
def list_defaults(
    ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the defaults in effect, with the source of each value.

    The source is the cluster, a setting of the broker that answers, or built-in.
    """
    listed = request(ctx, server, "GET", PATH)["data"]
    rows = [
        {"name": default["name"], "value": default["value"], "source": source_of(default)}
        for default in listed
    ]
    show_rows(rows, ("default", "value", "source"), as_json=as_json)


@app.command("alter")
def alter_defaults(
    ctx: typer.Context,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="a default, for example log.retention.ms=7d; repeatable",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            "--unset", "-u", metavar="KEY", help="remove a default of the cluster; repeatable"
        ),
    ] = None,
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set and remove defaults of the cluster.

    A default is in effect at once, for existing topics, too. Either all these defaults change, or
    none of them. If retention would then delete records that it keeps now, says how many, and asks.

    Example: tidelog defaults alter -c log.retention.ms=7d -u num.partitions
    """
    from tidelog.service.client.admin import config_changes

    changes = parsed_changes(config, unset)
    if not changes:
        raise BadUsage("nothing to alter: give --config or --unset")
    if not yes:
        confirm_expiry(ctx, server, "defaults", "all topics", changes)
    request(ctx, server, "POST", f"{PATH}:alter", json=config_changes(changes))
    text = f"altered the cluster's defaults: {changes_in_words(changes)}"
    show({"configs": changes}, text, as_json=as_json)
