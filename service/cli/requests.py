"""Options of client commands, and the one request that most of these commands send."""

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

from tidelog.service.cli.results import NotThere
from tidelog.storage.io.clock import SystemClock


class _Command(TyperCommand):
    """A command whose usage line shows a required argument as NAME instead of typer's {NAME}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class Commands(typer.Typer):
    """The application, or a group of its commands."""

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=_Command, **options)


def given_server(ctx: typer.Context, value: str | None) -> str | None:
    """Return the value of `--server` after the command's name, else the one before it."""
    return value if value is not None or ctx.obj is None else ctx.obj.server


ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        callback=given_server,
        help="URL of the broker, or HOST:PORT, or several with commas: after a failure, the next "
        "one gets the requests; also before the command (default http://127.0.0.1:8082; "
        "TIDELOG_URL)",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")]


def request(
    ctx: typer.Context,
    server: str | None,
    method: str,
    path: str,
    *,
    json: object = None,
    params: Mapping[str, str] | None = None,
    missing: str = "",
) -> Any:
    """Send a request. Return the JSON of the response, or None if it has no body. If the JSON
    is the first page of a list, fetch the other pages and return the items of all pages.

    `{cluster}` in `path` stands for the path of the cluster. A 404 raises NotThere, with
    the message `missing` or, if `missing` is empty, with the broker's message.
    """
    from tidelog.service.cli.client import Client, with_client

    async def work(client: Client) -> Any:
        url = path
        if "{cluster}" in url:
            url = url.replace("{cluster}", await client.cluster())
        with missing_is(missing):
            answer = await client.call(method, url, json=json, params=params)
        found = client.json_of(answer) if answer.content or method == "GET" else None
        if method == "GET":
            await client.add_pages(found, url, params=params)
        return found

    return with_client(ctx, server, work)


@contextlib.contextmanager
def missing_is(message: str) -> Iterator[None]:
    """Replace the broker's message in NotThere by `message`, unless `message` is empty."""
    try:
        yield
    except NotThere:
        if not message:
            raise
        raise NotThere(message) from None


def now() -> dt.datetime:
    """Return the time of this machine's clock."""
    return dt.datetime.fromtimestamp(SystemClock().now_ms() / 1000, dt.UTC)


def no_topic(name: str) -> str:
    """Return the message about a topic that does not exist. The broker sends the same text, except
    on routes of the topic itself, which send Kafka's message."""
    return f"topic {name!r} does not exist"


def quoted(name: str) -> str:
    """Return a name as one segment of a URL path. (`client.connection` has the same function, but
    imports httpx, which is slow.)"""
    return quote(name, safe="")
