"""Options of the commands that work on a store without a broker (`--store` and `--master`), and the
settings that follow from `--store`."""

from collections.abc import Callable
from typing import Annotated

import typer

from tidelog.service.cli.requests import given_server
from tidelog.service.cli.results import BadUsage
from tidelog.service.setting_fields import BadSettings
from tidelog.service.settings import Settings, load

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="URL of the store, as for `tidelog serve` (TIDELOG_STORE)"
    ),
]

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


def settings_of(
    store: str | None, on_old_name: Callable[[str], object] = lambda _: None
) -> Settings:
    """Return the settings of the environment and `--store`. Raises BadUsage."""
    try:
        return load({} if store is None else {"store": store}, warn=on_old_name)
    except BadSettings as error:
        raise BadUsage(str(error)) from None


def at_broker(server: str | None, store: str | None) -> bool:
    """Whether a broker does the work. Raises BadUsage if both a broker and a store are given."""
    if server is not None and store is not None:
        raise BadUsage("--server and --store exclude each other: a broker has its own store")
    return server is not None


def default_store_hint(settings: Settings) -> str:
    """Return the end of a message about the store. If the store is not the default, it is empty."""
    is_default = settings.store == Settings.store
    return "; this is the default: name another with --store" if is_default else ""
