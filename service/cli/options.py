"""How commands declare their options, and the options that many commands have.

A parameter whose type is a NamedTuple stands for the options that are the fields of the NamedTuple.
So options that go together are declared once, and reach the code of a command as one value.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import typer
from typer import Option
from typer.core import TyperCommand

from tidelog.service.cli.errors import BadUsage
from tidelog.service.settings.fields import BOOLEANS

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., None])


class GlobalOptions(NamedTuple):
    """Values of the options that precede the command's name. Typer keeps them in `ctx.obj`."""

    key_file: Annotated[
        str | None,
        Option(
            "--key-file",
            metavar="FILE",
            help="file with the key for a broker with security=keys (default: the variable "
            "TIDELOG_KEY: its value is the key, or @ and the name of such a file)",
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        Option(
            "--ca-file",
            metavar="FILE",
            help="file with the CA of the broker's certificate (default: the variable "
            "TIDELOG_CA_FILE, else well-known CAs)",
        ),
    ] = None
    server: Annotated[
        str | None,
        Option(
            "--server",
            metavar="URL",
            help="URL of the broker, for commands that take --server; also after the command",
        ),
    ] = None


class Commands(typer.Typer):
    """The application, or a group of its commands."""

    def __init__(self, *, add_completion: bool = False, **options: Any) -> None:
        super().__init__(
            add_completion=add_completion,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,  # rich's panels have only 20 columns for the text of a setting
            **options,
        )

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunction], CommandFunction]:
        add = super().command(name, cls=_Command, **options)
        return lambda function: add(with_options_of_fields(function))


def with_options_of_fields(function: CommandFunction) -> CommandFunction:
    """Return a function with a parameter for each field of a parameter that is a NamedTuple."""
    signature = inspect.signature(function)
    tuples = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if hasattr(parameter.annotation, "_fields")
    }
    if not tuples:
        return function

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for name, kind in tuples.items():
            values[name] = kind(**{field: values.pop(field) for field in kind._fields})
        function(**values)

    parameters = [
        option for parameter in signature.parameters.values() for option in _options(parameter)
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return cast(CommandFunction, run)


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the parameter, or a parameter for each field of its NamedTuple."""
    kind = parameter.annotation
    if not hasattr(kind, "_fields"):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    for name in kind._fields:
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=kind._field_defaults.get(name, inspect.Parameter.empty),
            annotation=kind.__annotations__[name],
        )


class _Command(TyperCommand):
    """A command whose usage line shows a required argument as NAME instead of typer's {NAME}.

    A switch with a value is an error: the value would become an argument, such as a topic's name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {
            name: switch
            for switch in self.params
            if getattr(switch, "is_flag", False)
            for name in (*switch.opts, *switch.secondary_opts)
        }
        for word, following in pairwise([*args, ""]):
            if word == "--":
                break
            name, has_value, value = word.partition("=")
            if (switch := switches.get(name)) is not None:
                _check_switch(switch, name, value if has_value else following, bool(has_value))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


def _check_switch(switch: Any, name: str, value: str, is_joined: bool) -> None:
    """Raise BadUsage if the text after a switch is a value for it, such as `true`.

    After a switch that has no `--no-` form, 0 and 1 may be arguments.
    """
    words = BOOLEANS if switch.secondary_opts else BOOLEANS.keys() - {"0", "1"}
    if is_joined or value.lower() in words:
        forms = " or ".join((*switch.opts[:1], *switch.secondary_opts))
        hint = "" if is_joined else f" (an argument {value!r} goes before the options)"
        raise BadUsage(f"{name} takes no value: give {forms} without {value!r}{hint}")


# -- options of many commands


def given_server(ctx: typer.Context, value: str | None) -> str | None:
    """Return the value of `--server` after the command's name, else the one before it."""
    return value if value is not None or ctx.obj is None else ctx.obj.server


ServerOption = Annotated[
    str | None,
    Option(
        "--server",
        metavar="URL",
        callback=given_server,
        help="URL of the broker, or HOST:PORT, or several with commas: after a failure, the next "
        "one gets the requests; also before the command (default http://127.0.0.1:8082; "
        "TIDELOG_URL)",
    ),
]
JsonOption = Annotated[bool, Option("--json", help="print JSON")]
YesOption = Annotated[bool, Option("--yes", "-y", help="do not ask for confirmation")]
