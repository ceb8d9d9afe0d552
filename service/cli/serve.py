"""`tidelog serve`: runs a broker. Each setting is an option."""

import dataclasses
import inspect
import logging
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tidelog.service.cli.errors import BadUsage
from tidelog.service.server.log_lines import log_to_stderr
from tidelog.service.settings.settings import PREFIX, RENAMED, Settings, load


def serve(**values: Any) -> None:
    """Run a broker until SIGTERM or SIGINT.

    A flag overrides a variable, a variable overrides the default.

    Example: tidelog serve s3://bucket/prefix --port 8082
    """
    url = values.pop("store_url")
    flags = {
        name: ("true" if value else "false") if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }
    if url is not None:
        if "store" in flags:
            raise BadUsage("the store is given twice: remove the argument or --store")
        flags["store"] = url
    warnings: list[str] = []
    settings = load(flags, warn=warnings.append)
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
    option = Option(
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
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "store_url",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, Argument(metavar="STORE", help="URL of the object store, as --store")
            ],
        ),
        *map(_setting_option, _FIELDS.values()),
        *(_setting_option(_FIELDS[new], old) for old, new in RENAMED.items()),
    ]
)
