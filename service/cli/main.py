"""`tidelog`: the application of the command line, with the command `serve`, which runs a broker.

The other modules have the other commands. To start fast, a command imports HTTP, Arrow, uvicorn or
Spark only when it runs. A command that fails raises CommandError; `main` prints its message as one
line and returns the exit status.
Client commands need no extra of the distribution. Other commands need the extra `server`. If it is
not installed, the error names it.
"""

import dataclasses
import errno
import inspect
import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tidelog.service.cli import (
    access,
    clients,
    defaults,
    groups,
    other_words,
    produce_consume,
    status,
    topics,
)
from tidelog.service.cli.dev.command import dev
from tidelog.service.cli.requests import Commands
from tidelog.service.cli.results import (
    BadUsage,
    BrokenOutput,
    CommandError,
    GlobalOptions,
    Terminated,
    show_line,
    warn,
)
from tidelog.service.cli.stores import maintenance, repair, replay, scrub, upkeep
from tidelog.service.cli.stores.store_options import load_settings
from tidelog.service.exit_status import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STATUSES,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from tidelog.service.secret_files import PRIVATE_UMASK
from tidelog.service.server.log_lines import log_to_stderr
from tidelog.service.settings.settings import PREFIX, RENAMED, Settings

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The base class of click's usage errors. It comes from typer, because newer versions of typer
contain their own copy of click."""

_STATUSES = "\n".join(f"  {code:>3}  {text}" for code, text in EXIT_STATUSES.items())
EPILOG = f"\b\nExit status:\n{_STATUSES}"


class _Root(TyperGroup):
    """The commands of `tidelog`. If a command needs a missing extra, its error names the extra."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if (error.name or "tidelog").partition(".")[0] == "tidelog":
                raise
            raise CommandError(
                f"tidelog {ctx.invoked_subcommand} needs the extra 'server' ({error.name} is not "
                "installed): pip install 'tidelog[server]'"
            ) from None


app = Commands(
    name="tidelog",
    cls=_Root,
    help="""Run and use tidelog, a log service on object storage.

\b
Examples:
  tidelog dev                               run a broker with live data, to try it
  tidelog serve s3://bucket/prefix          run a broker
  tidelog topics create events -p 8         create a topic
  tidelog produce events lines.txt          produce lines of a file
  tidelog consume events --follow           print records as they arrive""",
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by all sub-commands
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's panels have only 20 columns for the text of a setting
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import importlib.metadata  # slow to import

        show_line(importlib.metadata.version("tidelog"))
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    key_file: Annotated[
        str | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="file with the key for a broker with security=keys (default: the variable "
            "TIDELOG_KEY: its value is the key, or @ and the name of such a file)",
        ),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(
            "--ca-file",
            metavar="FILE",
            help="file with the CA of the broker's certificate (default: the variable "
            "TIDELOG_CA_FILE, else well-known CAs)",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="URL of the broker, for commands that take --server; also after the command",
        ),
    ] = None,
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Run and use tidelog, a log service on object storage."""
    ctx.obj = GlobalOptions(key_file, ca_file, server)


def main() -> int:
    os.umask(PRIVATE_UMASK)
    try:
        code = app(standalone_mode=False, prog_name="tidelog")
    except CommandError as error:
        warn(str(error))
        return error.status
    except USAGE_ERROR as error:
        return _wrong_usage(error)
    except OSError as error:
        return _full_disk(error)
    except BrokenOutput:
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Terminated:
        return EXIT_TERMINATED
    return code if isinstance(code, int) else EXIT_OK


def _full_disk(error: OSError) -> int:
    """Print which file has no space. Raise the error again if it has another reason."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        raise error
    if error.filename is None:
        # Python flushes stdout again at exit, so stdout needs a target that accepts the bytes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warn(f"cannot write to {error.filename or 'stdout'}: {error.strerror}")
    return EXIT_FAILED


def _wrong_usage(error: Any) -> int:
    message = _plain(error)
    if "\n" in message:  # no command was given: print the help
        sys.stdout.write(message + "\n")
        return EXIT_USAGE
    command = "tidelog" if error.ctx is None else error.ctx.command_path
    if hint := other_words.hint_of(command, message):
        warn(f"{message.partition(' (')[0].partition('. ')[0]}: {hint}")
    else:
        warn(f"{message} (see `{command} --help`)")
    return EXIT_USAGE


def _plain(error: Any) -> str:
    """Return a usage error's message, without the words of pydantic. Newer versions of typer use
    pydantic, whose texts begin with `Value error,`, or with `Input` instead of the value."""
    message: str = error.format_message().removesuffix(".").replace(": Value error, ", ": ")
    if (validation := getattr(error.__cause__, "errors", None)) is not None:
        message = message.replace(": Input should", f": {validation()[0]['input']!r} should")
    return message.partition(", unable to parse string")[0]


# -- the broker


def _serve(**given: Any) -> None:
    """Run a broker until SIGTERM or SIGINT.

    A flag overrides a variable, a variable overrides the default.

    Example: tidelog serve s3://bucket/prefix --port 8082
    """
    url = given.pop("store_url")
    flags = {
        name: ("true" if value else "false") if isinstance(value, bool) else value
        for name, value in given.items()
    }
    if url is not None:
        if flags["store"] is not None:
            raise BadUsage("the store is given twice: remove the argument or --store")
        flags["store"] = url
    warnings: list[str] = []
    settings = load_settings(flags, warnings.append)
    if warnings:
        log_to_stderr(settings)
    for text in warnings:
        logging.getLogger("tidelog").warning("%s", text)

    if settings.workers > 1:
        from tidelog.service.server.workers import supervise

        raise typer.Exit(supervise(settings))
    from tidelog.service.server.serve import leave, run

    leave(run(settings))


def _setting_option(field: "dataclasses.Field[Any]", old_name: str = "") -> inspect.Parameter:
    """Return a setting as a flag of `serve`. The flag of an old name is hidden."""
    name = old_name or field.name
    flag = name.replace("_", "-")
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
        hidden=bool(old_name),
    )
    kind = bool | None if field.type is bool else str | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
_serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "store_url",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Argument(metavar="STORE", help="URL of the object store, as --store"),
            ],
        ),
        *map(_setting_option, _FIELDS.values()),
        *(_setting_option(_FIELDS[new], old) for old, new in RENAMED.items()),
    ]
)
app.command("serve")(_serve)
app.command("dev")(dev)


# -- clients of a broker

app.add_typer(topics.app, name="topics")
app.add_typer(defaults.app, name="defaults")
app.add_typer(groups.app, name="groups")
app.add_typer(access.keys, name="keys")
app.add_typer(access.acls, name="acls")
app.add_typer(access.quotas, name="quotas")
app.command("produce")(produce_consume.produce)
app.command("consume")(produce_consume.consume)
app.command("seal")(topics.seal)
app.command("clients")(clients.show_clients)
app.command("status")(status.show_status)
app.command("replay")(replay.replay)

# -- maintenance of the store

app.command("retain")(maintenance.retain)
app.command("delete-records")(maintenance.delete_records)
app.command("compact")(maintenance.compact)
app.command("compactions")(upkeep.list_compactions)
app.command("collect")(maintenance.collect)
app.command("scrub")(scrub.scrub)
app.command("maintain")(maintenance.maintain)
app.command("backup")(repair.backup)
app.command("restore")(repair.restore)
app.command("repair")(repair.repair)
app.command("upgrade")(repair.upgrade)
app.command("bounds")(repair.bounds)


if __name__ == "__main__":
    sys.exit(main())
