"""Completion of topics and groups in a shell, from the broker that the command line names.

`tidelog --install-completion` sets it up. A broker that does not answer soon gives no names, and no
error, because a shell would print the error into the command line.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import typer

from tidelog.service.cli.results import CommandError, GlobalOptions

if TYPE_CHECKING:
    from tidelog.service.cli.client import CommandConnection

ANSWER_S = 1.0


def topic_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the topics whose names begin with `incomplete`."""

    async def names(client: "CommandConnection") -> list[str]:
        topics: list[str] = await client.get_json("/topics")
        return topics

    return _names(ctx, incomplete, names)


def group_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups whose names begin with `incomplete`."""

    async def names(client: "CommandConnection") -> list[str]:
        path = f"{await client.cluster()}/consumer-groups"
        return [group["consumer_group_id"] for group in (await client.get_json(path))["data"]]

    return _names(ctx, incomplete, names)


def _names(
    ctx: typer.Context,
    incomplete: str,
    names: "Callable[[CommandConnection], Awaitable[list[str]]]",
) -> list[str]:
    from tidelog.service.cli.client import with_client

    root = ctx.find_root().params  # a shell runs no command, so its options are in no GlobalOptions
    ctx.obj = GlobalOptions(root.get("key_file"), root.get("ca_file"), root.get("server"))
    server = ctx.params.get("server") or ctx.obj.server
    try:
        all_names = with_client(
            ctx, server, lambda client: asyncio.wait_for(names(client), ANSWER_S)
        )
    except (CommandError, OSError, ValueError, LookupError, TimeoutError):
        return []
    return sorted(name for name in all_names if name.startswith(incomplete))
