"""Options of client commands, and the one request that most of these commands send."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tidelog.service.cli.results import NotThere

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of the broker (default http://127.0.0.1:8082; TIDELOG_URL)",
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
    """Send one request; return the JSON of the response, or None if it has no body.

    `{cluster}` in `path` is the path of the cluster. A 404 raises NotThere, with the message
    `missing` if it is given.
    """
    from tidelog.service.cli.client import Client, with_client

    async def work(client: Client) -> Any:
        url = path
        if "{cluster}" in url:
            url = url.replace("{cluster}", await client.cluster())
        try:
            answer = await client.call(method, url, json=json, params=params)
        except NotThere:
            if not missing:
                raise
            raise NotThere(missing) from None
        return client.json_of(answer) if answer.content or method == "GET" else None

    return with_client(ctx, server, work)


def quoted(name: str) -> str:
    """Return a name as one segment of a URL path."""
    return quote(name, safe="")
