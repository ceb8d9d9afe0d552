"""`tidelog defaults ...`: the cluster's defaults of topics, a client of the v3 routes."""

from typing import Annotated

from typer import Option

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.options import Commands, YesOption
from tidelog.service.cli.topics import changes_in_words, confirm_expiry, parsed_changes, source_of
from tidelog.service.client.admin import config_changes

PATH = "{cluster}/broker-configs"

defaults = Commands(
    no_args_is_help=True,
    help="List and alter the cluster's defaults of topics. Topics that do not set a config have "
    "its default.",
)


@defaults.command("list")
def list_defaults(command: ClientCommand) -> None:
    """List the defaults in effect, with the source of each value.

    The source is the cluster, a setting of the broker that answers, or built-in.
    """
    rows = [
        {"name": default["name"], "value": default["value"], "source": source_of(default)}
        for default in command.request("GET", PATH)["data"]
    ]
    command.show_rows(rows, ("default", "value", "source"))


@defaults.command("alter")
def alter_defaults(
    *,
    config: Annotated[
        list[str] | None,
        Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="a default, for example log.retention.ms=7d; repeatable",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        Option("--unset", "-u", metavar="KEY", help="remove a default of the cluster; repeatable"),
    ] = None,
    yes: YesOption = False,
    command: ClientCommand,
) -> None:
    """Set and remove defaults of the cluster.

    A default is in effect at once, for existing topics, too. Either all these defaults change, or
    none of them. If retention would then delete records that it keeps now, says how many, and asks.

    Example: tidelog defaults alter -c log.retention.ms=7d -u num.partitions
    """
    changes = parsed_changes(config, unset)
    if not changes:
        raise BadUsage("nothing to alter: give --config or --unset")
    if not yes:
        confirm_expiry(command, "defaults", "all topics", changes)
    command.request("POST", f"{PATH}:alter", json=config_changes(changes))
    text = f"altered the cluster's defaults: {changes_in_words(changes)}"
    command.show({"configs": changes}, text)
