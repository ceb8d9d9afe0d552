"""How a command ends: exit statuses, errors of one line, results as tables or JSON.

Loaded by every `tidelog`, so it imports nothing that is slow; rich comes with the first table.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4
EXIT_INTERRUPTED = 130

EXIT_STATUSES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed, or refused by the broker",
    EXIT_USAGE: "wrong usage",
    EXIT_UNREACHABLE: "the broker or its store cannot be reached",
    EXIT_NOT_FOUND: "no such topic or partition",
    EXIT_INTERRUPTED: "interrupted",
}

PROGRESS_AFTER_S = 2.0
PIPE_COLUMNS = 1000


class CommandError(Exception):
    """The command failed; the message is the line that the user sees."""

    status = EXIT_FAILED


class BadUsage(CommandError):
    """The command line says something that cannot be meant."""

    status = EXIT_USAGE


class NotReachable(CommandError):
    """Neither yes nor no: nobody answers, or who answers says try again."""

    status = EXIT_UNREACHABLE


class NotThere(CommandError):
    """What the command is about does not exist."""

    status = EXIT_NOT_FOUND


class NobodyReads(Exception):
    """Whoever read our output has enough of it (`| head`): there is nothing left to do."""


def write_out(octets: bytes) -> None:
    """To stdout, at once. Raises NobodyReads."""
    try:
        sys.stdout.buffer.write(octets)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # What Python flushes once more at exit must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise NobodyReads from None


def show_json(value: object) -> None:
    """One line that a program reads."""
    show_line(json.dumps(value, ensure_ascii=False))


def show_line(text: str) -> None:
    """One line that a person reads."""
    write_out(f"{text}\n".encode())


def warn(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"tidelog: {' '.join(text.split())}\n")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str | int]]) -> None:
    """Numbers to the right. In a pipe, lines are as long as they are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    held = [list(row) for row in rows]
    for index, name in enumerate(columns):
        is_numbers = bool(held) and all(isinstance(row[index], int) for row in held)
        table.add_column(name, justify="right" if is_numbers else "left", overflow="fold")
    for row in held:
        table.add_row(*(Text(str(cell)) for cell in row))
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else PIPE_COLUMNS, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    write_out("".join(f"{line.rstrip()}\n" for line in lines).encode())


def plural(count: int, noun: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def confirm(deed: str, name: str, question: str) -> None:
    """Ask before what cannot be undone. Raises BadUsage where nobody can be asked, CommandError
    after a no."""
    import typer

    if not sys.stdin.isatty():
        raise BadUsage(f"{deed} {name} cannot be undone: say --yes")
    if not typer.confirm(question, err=True):
        raise CommandError(f"{name} is not deleted")


class SlowProgress:
    """A bar on stderr for what takes longer than two seconds; none where stderr is no terminal."""

    def __init__(self, what: str, total: int | None = None, *, is_wanted: bool = True) -> None:
        self._what = what
        self._total = total
        self._is_wanted = is_wanted and sys.stderr.isatty()
        self._started = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> "SlowProgress":
        return self

    def show(self, done: int) -> None:
        """How far it is, in the units of `total`."""
        if not self._is_wanted or time.perf_counter() - self._started < PROGRESS_AFTER_S:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
