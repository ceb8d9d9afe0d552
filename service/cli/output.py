"""The output of commands: lines, JSON, tables, progress bars, questions that ask to confirm.

Each run of `tidelog` loads this module, so it imports nothing slow. It imports rich only to show a
table or a progress bar, and asyncio only for work with progress.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tidelog.service.cli.errors import BadUsage, BrokenOutput, CommandError
from tidelog.service.quantities import rounded

if TYPE_CHECKING:
    import rich.progress

WorkResult = TypeVar("WorkResult")
Progress = Callable[[int], None]
PROGRESS_AFTER_S = 2.0
PROGRESS_TICK_S = 0.2
PIPE_COLUMNS = 1000


def write_out(octets: bytes) -> None:
    """Write to stdout and flush. Raises BrokenOutput, CommandError."""
    try:
        sys.stdout.buffer.write(octets)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise output_error(error) from None


def output_error(error: OSError) -> BrokenOutput | CommandError:
    """Return the error of a command that could not write to stdout.

    From now on, stdout accepts what Python flushes at exit.
    """
    discard_stdout()
    if isinstance(error, BrokenPipeError):
        return BrokenOutput()
    return CommandError(f"cannot write to stdout: {error.strerror}")


def discard_stdout() -> None:
    """Give stdout a target that accepts the bytes that Python flushes again at exit."""
    with contextlib.suppress(OSError):  # an embedding program has replaced stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(value: object) -> None:
    show_line(json.dumps(value, ensure_ascii=False))


def show_line(text: str) -> None:
    write_out(f"{text}\n".encode())


def warn(text: str) -> None:
    """Print one line on stderr. If that fails, nothing can be said, and the exit status counts."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"tidelog: {' '.join(text.split())}\n")
        sys.stderr.flush()


def show_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table.

    Columns of numbers are right-aligned. In a pipe, only a line of more than PIPE_COLUMNS
    characters is wrapped.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table_rows = [list(row) for row in rows]
    for index, name in enumerate(columns):
        is_numbers = bool(table_rows) and all(isinstance(row[index], int) for row in table_rows)
        table.add_column(name, justify="right" if is_numbers else "left", overflow="fold")
    for row in table_rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else PIPE_COLUMNS, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    write_out("".join(f"{line.rstrip()}\n" for line in lines).encode())


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 record`, `2,000 records`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(seconds: float | None) -> str:
    """Return a duration in its largest units, or `unknown`."""
    return "unknown" if seconds is None else rounded(seconds)


def confirm(deed: str, name: str, question: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `--yes` is given.

    `deed` names the action, such as `deleting`. Raises BadUsage if stdin is no terminal, and
    CommandError if the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadUsage(f"{deed} {name} cannot be undone: confirm with --yes")
    if not typer.confirm(question, err=True):
        raise CommandError(f"{deed} {name} was not confirmed: nothing is changed")


class SlowProgress:
    """A progress bar on stderr. It appears after two seconds, and only if stderr is a terminal."""

    def __init__(self, title: str, total: int | None = None, *, is_wanted: bool = True) -> None:
        self._what = title
        self._total = total
        self._is_wanted = is_wanted and sys.stderr.isatty()
        self._started = time.perf_counter()
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> "SlowProgress":
        return self

    def show(self, done_count: int) -> None:
        """Update the bar; `done_count` has the unit of `total`."""
        if not self._is_wanted or time.perf_counter() - self._started < PROGRESS_AFTER_S:
            return
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done_count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


async def with_progress(
    title: str, work: Callable[[Progress], Coroutine[Any, Any, WorkResult]]
) -> WorkResult:
    """Do the work, and show how much of it is done."""
    import asyncio

    done_count = 0

    def progress(count: int) -> None:
        nonlocal done_count
        done_count = count

    task = asyncio.create_task(work(progress))
    try:
        with SlowProgress(title) as bar:
            while not (await asyncio.wait({task}, timeout=PROGRESS_TICK_S))[0]:
                bar.show(done_count)
            return task.result()
    finally:
        if task.cancel():  # interrupted: end the work before its store or connection is closed
            await asyncio.wait({task})
