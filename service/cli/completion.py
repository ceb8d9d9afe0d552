"""Names of topics and groups as arguments, and their completion in a shell.

The names come from the broker that the command line names.

`tidelog --install-completion` sets it up. A broker that does not answer soon gives no names, and no
error, because a shell would print the error into the command line.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from typer import Argument

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.errors import CommandError
from tidelog.service.cli.options import GlobalOptions
from tidelog.service.client.connection import Connection
from tidelog.service.settings.fields import BadSettings

ANSWER_S = 1.0


async def _topics(connection: Connection) -> list[str]:
    topics: list[str] = await connection.get_json("/topics")
    return topics


async def _groups(connection: Connection) -> list[str]:
    path = f"{await connection.cluster()}/consumer-groups"
    return [group["consumer_group_id"] for group in (await connection.get_json(path))["data"]]


def _completion(
    names: Callable[[Connection], Awaitable[list[str]]],
) -> Callable[[typer.Context, str], list[str]]:
    """Return a function that returns the names that begin with an incomplete name."""

    def completed(ctx: typer.Context, incomplete: str) -> list[str]:
        root = ctx.find_root().params  # a shell runs no command, so ctx.obj has no GlobalOptions
        ctx.obj = GlobalOptions(root.get("key_file"), root.get("ca_file"), root.get("server"))
        command = ClientCommand(ctx, ctx.params.get("server") or ctx.obj.server)
        try:
            all_names = command.run(
                lambda connection: asyncio.wait_for(names(connection), ANSWER_S)
            )
        except (CommandError, BadSettings, OSError, ValueError, LookupError, TimeoutError):
            return []
        return sorted(name for name in all_names if name.startswith(incomplete))

    return completed


TopicArgument = Annotated[
    str, Argument(metavar="TOPIC", show_default=False, autocompletion=_completion(_topics))
]
GroupArgument = Annotated[
    str, Argument(metavar="GROUP", show_default=False, autocompletion=_completion(_groups))
]
