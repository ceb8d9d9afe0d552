"""The connection of a command: a Connection with the command's options, whose errors have the exit
statuses and the advice of the command line."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
import typer

from tidelog.service.cli.results import (
    BadUsage,
    CommandError,
    GlobalOptions,
    NotThere,
    Terminated,
    Unreachable,
)
from tidelog.service.client import errors
from tidelog.service.client.connection import Connection
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import client_ca_file, client_key, console_server

Result = TypeVar("Result")

SECURITY_IS_OFF = "SecurityDisabledException:"
"""The beginning of a broker's message if its security is off. This is Kafka's text, which other
clients know."""
ADVICE = {
    "server": "; start a broker (tidelog serve), or name one with --server or TIDELOG_URL",
    "ca": ": name its CA with --ca-file or TIDELOG_CA_FILE",
    "key": " (set TIDELOG_KEY or --key-file)",
}


def command_error(error: errors.ClientError) -> CommandError:
    """Return the error of a command for an error of the client."""
    message = error.message
    if message.startswith(SECURITY_IS_OFF):
        message = "security is off on this broker: start it with --security keys"
    message += ADVICE.get(error.advice, "")
    match error:
        case errors.BadArgument():
            return BadUsage(message)
        case errors.NotFound():
            return NotThere(message)
        case errors.NotReachable():
            return Unreachable(message)
        case _:
            return CommandError(message)


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Raise errors of the client as CommandErrors."""
    try:
        yield
    except errors.ClientError as error:
        raise command_error(error) from None


class CommandConnection(Connection):
    """A connection whose requests raise CommandErrors."""

    @property
    def server(self) -> str:
        return self.servers.current

    async def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        with client_errors():
            return await super().call(method, path, **request)

    def json_of(self, answer: httpx.Response) -> Any:
        with client_errors():
            return super().json_of(answer)


def connection_of(
    ctx: typer.Context,
    server: str | None,
    *,
    retry_s: float = 0.0,
    kind: type[Connection] = Connection,
) -> Connection:
    """Return a connection to `--server` with the key of `--key-file` and the CAs of `--ca-file`.
    Raises BadUsage."""
    options: GlobalOptions = ctx.obj
    try:
        key = client_key(options.key_file)
    except BadSettings as error:
        raise BadUsage(str(error)) from None
    ca_file = options.ca_file or client_ca_file()
    with client_errors():
        return kind(server or console_server(), key=key, retry_s=retry_s, ca_file=ca_file)


def with_client(
    ctx: typer.Context, server: str | None, work: Callable[[CommandConnection], Awaitable[Result]]
) -> Result:
    """Run a command's work with a client that is closed at the end."""

    async def session() -> Result:
        client = connection_of(ctx, server, kind=CommandConnection)
        assert isinstance(client, CommandConnection)
        async with client:
            return await work(client)

    with client_errors():
        return asyncio.run(session())


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command that may take long. SIGTERM cancels the command, as SIGINT does, so that it can
    leave its group. Raises Terminated after SIGTERM."""
    is_terminated = False

    async def session() -> Result:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal is_terminated
            is_terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await work

    try:
        with client_errors():
            return asyncio.run(session())
    except asyncio.CancelledError:
        if is_terminated:
            raise Terminated from None
        raise
