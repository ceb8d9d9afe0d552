"""`tidelog`: a broker (`serve`) and a client for the rest.

What every run loads is kept small: a command imports HTTP, Arrow, uvicorn or Spark when it runs.
A command that fails raises CommandError; `main` turns whatever happened into one line and a status.
"""

import dataclasses
import inspect
import sys
from typing import Annotated, Any

import typer

from service import cli_access, cli_care, cli_groups, cli_records, cli_replay, cli_topics
from service.cli_results import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STATUSES,
    EXIT_USAGE,
    BadUsage,
    CommandError,
    NobodyReads,
    NotReachable,
    show_json,
    show_line,
    warn,
)
from service.cli_topics import JsonOption, ServerOption
from service.settings import PREFIX, BadSettings, Settings, load, use_key_file

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""What click raises for a wrong command line; typer carries its own click in newer versions."""

_STATUSES = "\n".join(f"  {code:>3}  {text}" for code, text in EXIT_STATUSES.items())
EPILOG = f"\b\nExit status:\n{_STATUSES}"

app = typer.Typer(
    name="tidelog",
    help="A log service on object storage: its broker, and a client.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels leave 20 columns for what 40 settings mean
)


@app.callback()
def _global_options(
    key_file: Annotated[
        str | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="has the key that commands show to the broker, where its security is on; else "
            "TIDELOG_KEY has it",
        ),
    ] = None,
) -> None:
    """A log service on object storage: its broker, and a client."""
    if key_file is not None:
        use_key_file(key_file)


def main() -> int:
    """Run the command line; its exit status."""
    try:
        status = app(standalone_mode=False, prog_name="tidelog")
    except CommandError as error:
        warn(str(error))
        return error.status
    except USAGE_ERROR as error:
        return _wrong_usage(error)
    except NobodyReads:
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else EXIT_OK


def _wrong_usage(error: Any) -> int:
    message = error.format_message()
    if "\n" in message:  # no command at all: the help says more than any line
        sys.stdout.write(message + "\n")
        return EXIT_USAGE
    command = "tidelog" if error.ctx is None else error.ctx.command_path
    warn(f"{message.removesuffix('.')} (see `{command} --help`)")
    return EXIT_USAGE


# -- a broker


def _serve(**given: Any) -> None:
    """Run one broker until SIGTERM or SIGINT.

    Flags win over variables, variables over defaults.
    """
    url = given.pop("store_url")
    flags = {
        name: ("true" if value else "false") if isinstance(value, bool) else value
        for name, value in given.items()
        if value is not None
    }
    if url is not None:
        if "store" in flags:
            raise BadUsage("the store is given twice: as an argument and with --store")
        flags["store"] = url
    try:
        settings = load(flags)
    except BadSettings as error:
        raise BadUsage(str(error)) from None

    if settings.workers > 1:
        from service.workers import supervise

        raise typer.Exit(supervise(settings))
    from service.main import leave, run

    leave(run(settings))


def _setting_option(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """A setting as a flag: the dataclass has its name, its default and its meaning."""
    flag = field.name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if field.type is bool else f"--{flag}"
    default = "empty" if field.default == "" else field.default
    if field.type is bool:
        default = "yes" if field.default else "no"
    words = field.metadata["words"]
    option = typer.Option(
        names,
        help=f"{field.metadata['doc']} (default {default}; {PREFIX}{field.name.upper()})",
        metavar="|".join(words) or ("N" if field.type is int else None),
        show_default=False,
    )
    kind = bool | None if field.type is bool else str | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "store_url",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Argument(metavar="STORE", help="the same as --store")
            ],
        ),
        *map(_setting_option, dataclasses.fields(Settings)),
    ]
)
app.command("serve")(_serve)


# -- a client

app.add_typer(cli_topics.app, name="topics")
app.add_typer(cli_groups.app, name="groups")
app.add_typer(cli_access.keys, name="keys")
app.add_typer(cli_access.acls, name="acls")
app.add_typer(cli_access.quotas, name="quotas")
app.command("produce")(cli_records.produce)
app.command("consume")(cli_records.consume)
app.command("seal")(cli_topics.seal)
app.command("replay")(cli_replay.replay)

# -- the care of what is written

app.command("retain")(cli_care.retain)
app.command("delete-records")(cli_care.delete_records)
app.command("compact")(cli_care.compact)
app.command("collect")(cli_care.collect)
app.command("scrub")(cli_care.scrub)
app.command("maintain")(cli_care.maintain)


@app.command("status")
def show_status(server: ServerOption = None, as_json: JsonOption = False) -> None:
    """Show whether the broker is ready, and of which cluster it is."""
    from service.cli_client import Client, with_client

    async def work(client: Client) -> dict[str, Any]:
        clusters = (await client.get_json("/v3/clusters"))["data"]
        told = {
            "server": client.server,
            "cluster_id": clusters[0]["cluster_id"],
            "brokers": (await client.get_json("/brokers"))["brokers"],
            "is_ready": True,
            "why_not": None,
        }
        try:
            await client.get("/ready")
        except NotReachable as error:
            told |= {"is_ready": False, "why_not": str(error)}
        return told

    told = with_client(server, work)
    if as_json:
        show_json(told)
    else:
        brokers = ", ".join(map(str, told["brokers"]))
        show_line(f"{told['server']}: cluster {told['cluster_id']}, brokers {brokers}")
    if not told["is_ready"]:
        raise NotReachable(f"not ready: {told['why_not']}")
    if not as_json:
        show_line("ready")


if __name__ == "__main__":
    sys.exit(main())
