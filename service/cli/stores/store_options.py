"""Options of the commands that work on a store without a broker (`--store`, `--s3-endpoint`,
`--s3-region`, `--master`), and the settings that follow from them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import typer

from tidelog.service.cli.requests import given_server
from tidelog.service.cli.results import BadUsage
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings, load


class StoreFlags(NamedTuple):
    """The store of a command, as far as its options name it. The rest are variables."""

    store: str | None = None
    s3_endpoint: str | None = None
    s3_region: str | None = None

    @property
    def is_given(self) -> bool:
        return self != NO_FLAGS


NO_FLAGS = StoreFlags()

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="URL of the store, as for `tidelog serve` (TIDELOG_STORE)"
    ),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--s3-endpoint",
        metavar="URL",
        help="URL of an S3 server other than AWS (TIDELOG_S3_ENDPOINT)",
    ),
]
RegionOption = Annotated[
    str | None,
    typer.Option("--s3-region", metavar="REGION", help="region of the bucket (TIDELOG_S3_REGION)"),
]
OPTIONS_OF_STORE = dict(
    zip(StoreFlags._fields, (StoreOption, EndpointOption, RegionOption), strict=True)
)
"""The options of a command that has a parameter of type StoreFlags."""

BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        callback=given_server,
        help="let this broker do it, not this process: needs no rights on the store (default: work "
        "on the store)",
    ),
]

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])"
    ),
]


def with_store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with options in place of its parameter `store`, which has their values."""
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "store":
            parameters.append(parameter)
            continue
        parameters += (
            inspect.Parameter(name, parameter.kind, default=None, annotation=option)
            for name, option in OPTIONS_OF_STORE.items()
        )

    @functools.wraps(command)
    def run(**arguments: object) -> None:
        flags = StoreFlags(*(arguments.pop(name) for name in OPTIONS_OF_STORE))  # type: ignore[arg-type]
        command(store=flags, **arguments)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def settings_of(
    store: StoreFlags, on_old_name: Callable[[str], object] = lambda _: None
) -> Settings:
    """Return the settings of the environment and the store's options. Raises BadUsage."""
    return load_settings(store._asdict(), on_old_name)


def load_settings(
    flags: Mapping[str, str | None], on_old_name: Callable[[str], object] = lambda _: None
) -> Settings:
    """Return the settings of the environment and those flags that are given. Raises BadUsage."""
    try:
        given_flags = {name: text for name, text in flags.items() if text is not None}
        return load(given_flags, warn=on_old_name)
    except BadSettings as error:
        raise BadUsage(str(error)) from None


def at_broker(server: str | None, store: StoreFlags) -> bool:
    """Whether a broker does the work. Raises BadUsage if both a broker and a store are given."""
    if server is not None and store.is_given:
        raise BadUsage("--server and --store exclude each other: a broker has its own store")
    return server is not None


def default_store_hint(settings: Settings) -> str:
    """Return the end of a message about the store. If the store is not the default, it is empty."""
    is_default = settings.store == Settings.store
    return "; this is the default: name another with --store" if is_default else ""
