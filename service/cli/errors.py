"""Errors that end a command, with their exit status. `main` prints the message as one line."""

import contextlib
from collections.abc import Iterator

from tidelog.service.exit_status import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    UNREACHABLE_ERRORS,
)
from tidelog.storage.core.errors import LogError, UnknownPartition, UnknownTopic


class CommandError(Exception):
    status = EXIT_FAILED


class BadUsage(CommandError):
    """A command line with invalid or contradictory options."""

    status = EXIT_USAGE


class Unreachable(CommandError):
    """The broker or the store cannot be reached or used, or the client should retry later."""

    status = EXIT_UNREACHABLE


class NotThere(CommandError):
    """A topic, partition, group or key that the command names does not exist."""

    status = EXIT_NOT_FOUND


class Terminated(Exception):
    """SIGTERM has ended the command, after its last request."""


class BrokenOutput(Exception):
    """The reader of stdout has closed the pipe (`| head`), so the command ends with success."""


@contextlib.contextmanager
def command_errors(store_hint: str = "") -> Iterator[None]:
    """Raise errors of the log as CommandErrors with the matching exit status.

    The message about a store that cannot be used ends with `store_hint`.
    """
    try:
        yield
    except (UnknownTopic, UnknownPartition) as error:
        raise NotThere(str(error)) from None
    except UNREACHABLE_ERRORS as error:
        raise Unreachable(f"{error}{store_hint}") from None
    except LogError as error:
        raise CommandError(str(error)) from None
