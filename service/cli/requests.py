"""Options of client commands, and the one request that most of these commands send."""

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

from tidelog.service.cli.results import BadUsage, NotThere
from tidelog.service.settings.fields import BOOLEANS
from tidelog.storage.runtime.clock import SystemClock


class _Command(TyperCommand):
    """A command whose usage line shows a required argument as NAME instead of typer's {NAME}. A
    switch with a value is an error: the value would become an argument, such as a topic's name."""

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
    """Raise BadUsage if the text after a switch is a value for it, such as `true`. After a switch
    that has no `--no-` form, 0 and 1 may be arguments."""
    words = BOOLEANS if switch.secondary_opts else BOOLEANS.keys() - {"0", "1"}
    if is_joined or value.lower() in words:
        forms = " or ".join((*switch.opts[:1], *switch.secondary_opts))
        before = "" if is_joined else f" (an argument {value!r} goes before the options)"
        raise BadUsage(f"{name} takes no value: give {forms} without {value!r}{before}")


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
    from tidelog.service.cli.client import CommandConnection, with_client

    async def work(client: CommandConnection) -> Any:
        url = path
        if "{cluster}" in url:
            url = url.replace("{cluster}", await client.cluster())
        with missing_is(missing):
            answer = await client.call(method, url, json=json, params=params)
        body = client.json_of(answer) if answer.content or method == "GET" else None
        if method == "GET":
            await client.add_pages(body, url, params=params)
        return body

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
