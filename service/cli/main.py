"""`tidelog`: its commands, the options before them, and the exit status.

`SUMMARIES` has the commands. The module of a command is imported when the command is called or
shows its help, so `tidelog --help` loads none of them. `serve`, `dev` and the commands on a store
import uvicorn, Arrow and Spark only when they run: their help needs no extra of the distribution.
If the extra `server` is not installed, the error of such a command names it.

A command that fails raises CommandError; `main` prints its message as one line and returns the exit
status.
"""

import errno
import fcntl
import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from tidelog.service.cli import hints
from tidelog.service.cli.errors import BrokenOutput, CommandError, Terminated
from tidelog.service.cli.options import Commands, GlobalOptions, with_options_of_fields
from tidelog.service.cli.output import output_error, show_line, warn
from tidelog.service.exit_status import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STATUSES,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from tidelog.service.secret_files import PRIVATE_UMASK
from tidelog.service.settings.fields import BadSettings

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The base class of click's usage errors. It comes from typer, because newer versions of typer
contain their own copy of click."""

sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
"""httpx imports its own command line, if it can, and with it rich and click: 0.1 s of CPU. No
command needs it. Python does not import a module that is None here."""

_STATUSES = "\n".join(f"  {code:>3}  {text}" for code, text in EXIT_STATUSES.items())
EPILOG = f"\b\nExit status:\n{_STATUSES}"

FULL = {errno.ENOSPC, errno.EDQUOT}
FILE_ERRORS = FULL | {errno.EFBIG, errno.EIO}
"""Errors of a full or damaged disk."""

SUMMARIES = {
    "serve": "Run a broker until SIGTERM or SIGINT.",
    "dev": "Run a broker with live data until Ctrl-C.",
    "produce": "Produce the lines of a file or stdin.",
    "consume": "Print the records of a topic, one a line.",
    "seal": "Move the tails of a topic into its table now.",
    "clients": "Show the Kafka clients that are connected to the brokers of the cluster.",
    "status": "Show whether the cluster is well: brokers, store, sealing, maintenance, groups.",
    "query": "Run a SQL query over the topics in a store, with DuckDB.",
    "search": "Print the records of a topic that have a text, the newest first.",
    "replay": "Write the records of a topic to files, with Spark.",
    "retain": "Delete the records that exceed retention.ms or retention.bytes.",
    "delete-records": "Delete the records of a topic before given offsets.",
    "compact": "Merge small segments, and compact by key.",
    "compactions": "List the last compactions that clients have started at the brokers.",
    "collect": "Delete objects that are no longer referenced.",
    "scrub": "Verify the log in the store.",
    "maintain": "Run retain, compact and collect, for example as a cron job.",
    "backup": "Copy a cluster to another store, while its brokers run.",
    "restore": "Make a new cluster in an empty store from a backup.",
    "repair": "Repair the WAL, tails, or tables in doubt.",
    "upgrade": "Raise the level of the log's format to the newest that this version knows.",
    "bounds": "Show or change the bounds that all brokers and commands of a cluster obey.",
    "topics": "Create, list, describe, alter, delete topics.",
    "defaults": "List and alter the cluster's defaults of topics.",
    "groups": "List, describe, reset, delete consumer groups.",
    "keys": "Create, list, delete API keys of principals.",
    "acls": "Add, list, remove access control lists (ACLs).",
    "quotas": "Set, list, remove quotas of principals.",
}
"""The first sentence of each command's help, in the order of `tidelog --help`."""


class _UnloadedCommand(TyperCommand):
    """A command whose module is imported when more than its summary is needed."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        return loaded_command(str(self.name)).make_context(*arguments, **options)


def loaded_command(name: str) -> Any:
    """Import the module of a command. Return the command or the group of commands."""
    name_in_code = name.replace("-", "_")
    commands = getattr(importlib.import_module(f"tidelog.service.cli.{name_in_code}"), name_in_code)
    if not isinstance(commands, Commands):
        function, commands = commands, Commands()
        commands.command(name)(function)
    return typer.main.get_command(commands)


class _Root(TyperGroup):
    """The commands of `tidelog`. If a command needs a missing extra, its error names the extra."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in SUMMARIES.items():
            self.add_command(_UnloadedCommand(name, help=summary))

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
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # inherited by all sub-commands
)


def loaded() -> Any:
    """Return `tidelog` with all its commands, of which the modules are imported."""
    root: Any = typer.main.get_command(app)
    for name in SUMMARIES:
        root.add_command(loaded_command(name), name)
    return root


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import importlib.metadata  # slow to import

        show_line(importlib.metadata.version("tidelog"))
        raise typer.Exit


@app.callback()
@with_options_of_fields
def _global_options(
    ctx: typer.Context,
    *,
    options: GlobalOptions,
    _: Annotated[
        bool,
        Option(
            "--version", is_eager=True, callback=_show_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Run and use tidelog, a log service on object storage."""
    ctx.obj = options


def main() -> int:
    os.umask(PRIVATE_UMASK)
    try:
        code = app(standalone_mode=False, prog_name="tidelog")
    except CommandError as error:
        warn(str(error))
        return error.status
    except BadSettings as error:
        warn(str(error))
        return EXIT_USAGE
    except USAGE_ERROR as error:
        return _wrong_usage(error)
    except UnicodeEncodeError as error:
        return _not_text(error)
    except OSError as error:
        return _unusable_file(error)
    except BrokenOutput:
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Terminated:
        return EXIT_TERMINATED
    return code if isinstance(code, int) else EXIT_OK


def _not_text(error: UnicodeEncodeError) -> int:
    """Print which argument is not UTF-8, and cannot be in a request.

    Raise the error again if it has another reason. Names of files may have any bytes.
    """
    for number, word in enumerate(sys.argv[1:], 1):
        if any("\udc80" <= character <= "\udcff" for character in word):
            warn(f"argument {number} is not UTF-8 text: {os.fsencode(word)!r}")
            return EXIT_USAGE
    raise error


def _unusable_file(error: OSError) -> int:
    """Print which file cannot be used. Raise the error again if no file or disk is the reason."""
    if error.filename is not None and error.errno in FILE_ERRORS:
        warn(f"cannot use {error.filename}: {error.strerror}")
    elif error.errno in FULL or (error.errno == errno.EBADF and _is_stdout_closed()):
        warn(str(output_error(error)))  # typer has written a help text
    else:
        raise error
    return EXIT_FAILED


def _is_stdout_closed() -> bool:
    """Whether stdout is closed, or was opened for those who have closed it (__main__)."""
    try:
        return fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    except OSError:
        return True


def _wrong_usage(error: Any) -> int:
    message = _plain(error)
    if "\n" in message:  # no command was given: print the help
        try:
            show_line(message)
        except CommandError as failed:
            warn(str(failed))
        except BrokenOutput:
            pass  # the reader has seen enough
        return EXIT_USAGE
    command = "tidelog" if error.ctx is None else error.ctx.command_path
    if hint := hints.hint_of(command, message):
        warn(f"{message.partition(' (')[0].partition('. ')[0]}: {hint}")
    else:
        warn(f"{message} (see `{command} --help`)")
    return EXIT_USAGE


def _plain(error: Any) -> str:
    """Return a usage error's message, without the words of pydantic.

    Newer versions of typer use pydantic, whose texts begin with `Value error,`, or with `Input`
    instead of the value.
    """
    message: str = error.format_message().removesuffix(".").replace(": Value error, ", ": ")
    if (validation := getattr(error.__cause__, "errors", None)) is not None:
        message = message.replace(": Input should", f": {validation()[0]['input']!r} should")
    return message.partition(", unable to parse string")[0]
