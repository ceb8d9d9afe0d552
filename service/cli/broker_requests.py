"""The requests of a command to a broker, and their errors in the words of the command line."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer import Option

from tidelog.service.cli.errors import BadUsage, CommandError, NotThere, Terminated, Unreachable
from tidelog.service.cli.options import GlobalOptions, JsonOption, ServerOption
from tidelog.service.cli.output import show_json, show_line, show_table
from tidelog.service.client import errors
from tidelog.service.client.connection import Connection
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


RETRY_FOR_S = 60.0
RetryOption = Annotated[
    float | None,
    Option(
        "--retry-s",
        min=0,
        metavar="SECONDS",
        help="how long to retry a request if the broker cannot be reached or answers 429, 502, 503 "
        "or 504. By default, the first request is not repeated, so that a wrong URL fails at once, "
        f"and later requests are repeated for {RETRY_FOR_S:.0f} s. After the first answer, "
        "`consume --follow` retries without end",
    ),
]


class ClientCommand(NamedTuple):
    """A run of a command that asks a broker, with the options of all such commands."""

    ctx: typer.Context
    server: ServerOption = None
    as_json: JsonOption = False

    def connection(self, retry_s: float = 0.0) -> Connection:
        """Return a connection with the options of this command.

        These are `--server`, the key of `--key-file` and the CAs of `--ca-file`. Raises
        BadSettings, BadUsage.
        """
        options: GlobalOptions = self.ctx.obj
        key = client_key(options.key_file)
        ca_file = options.ca_file or client_ca_file()
        with client_errors():
            server = console_server() if self.server is None else self.server
            return Connection(server, key=key, retry_s=retry_s, ca_file=ca_file)

    def run(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Run the work with a connection that is closed at the end."""

        async def session() -> Result:
            async with self.connection() as connection:
                return await work(connection)

        with client_errors():
            return asyncio.run(session())

    def request(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        params: Mapping[str, str] | None = None,
        missing: str = "",
    ) -> Any:
        """Send a request.

        Return the JSON of the response, or None if it has no body. If the JSON is the first page of
        a list, fetch the other pages and return the items of all pages.

        `{cluster}` in `path` stands for the path of the cluster. A 404 raises NotThere, with
        the message `missing` or, if `missing` is empty, with the broker's message.
        """

        async def work(connection: Connection) -> Any:
            url = path
            if "{cluster}" in url:
                url = url.replace("{cluster}", await connection.cluster())
            with missing_is(missing):
                answer = await connection.call(method, url, json=json, params=params)
            body = connection.json_of(answer) if answer.content or method == "GET" else None
            if method == "GET":
                await connection.add_pages(body, url, params=params)
            return body

        return self.run(work)

    def show(self, value: object, text: str) -> None:
        """Print a result, either the value as JSON or one line of text."""
        if self.as_json:
            show_json(value)
        else:
            show_line(text)

    def show_rows(
        self,
        objects: Sequence[Mapping[str, Any]],
        columns: Sequence[str],
        rows: Iterable[Iterable[object]] | None = None,
    ) -> None:
        """Print objects as JSON, or `rows` as a table.

        By default, `rows` are the objects' values.
        """
        if self.as_json:
            show_json(objects)
        else:
            values = [item.values() for item in objects]
            show_table(columns, values if rows is None else rows)


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command that may take long.

    SIGTERM cancels the command, as SIGINT does, so that it can leave its group. Raises Terminated
    after SIGTERM.
    """
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


@contextlib.contextmanager
def missing_is(message: str) -> Iterator[None]:
    """Raise NotThere with `message` if an object is missing. If it is empty, keep the error."""
    try:
        yield
    except errors.NotFound:
        if not message:
            raise
        raise NotThere(message) from None


def no_topic(name: str) -> str:
    """Return the message about a topic that does not exist.

    The broker sends the same text, except on routes of the topic itself, which send Kafka's
    message.
    """
    return f"topic {name!r} does not exist"
