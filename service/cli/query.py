"""`tidelog query`: SQL over the topics in a store, by DuckDB in this process, without a broker.

All topics that a query names are datasets of one snapshot (storage/read/log_dataset.py), so a join
sees them at one entry of the WAL. DuckDB pushes columns and filters into them. Its memory has a
bound, above which it writes to a temporary folder.
"""

import contextlib
import datetime as dt
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import orjson
from typer import Argument, Option

from tidelog.service.cli.errors import BadUsage, CommandError, command_errors
from tidelog.service.cli.option_units import size_bytes
from tidelog.service.cli.output import (
    SlowProgress,
    output_error,
    plural,
    show_table,
    warn,
    write_out,
)
from tidelog.service.cli.positions import moment, now
from tidelog.service.cli.store_commands import StoreOptions, default_store_hint
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from tidelog.storage.read.log_snapshot import LogSnapshot, TopicSnapshot
    from tidelog.storage.store.blocking_store import OpenedStore

NO_DUCKDB = "DuckDB is not installed: pip install 'tidelog[query]'"
BATCH_ROWS = 8192
TABLE_ROWS_MAX = 10_000
"""Rows of a printed table, whose columns get their widths from all of its rows."""
MEMORY_BYTES = 1 << 30
NAMES_SHOWN = 5

OutputFormat: TypeAlias = Literal["table", "csv", "json", "arrow", "parquet"]
BINARY = {"arrow", "parquet"}


def query(
    sql: Annotated[str, Argument(metavar="SQL", show_default=False, help="one statement")],
    *,
    store: StoreOptions,
    file_format: Annotated[
        OutputFormat,
        Option(
            "--format",
            "-f",
            help="json: an object for each row, one a line; arrow: an IPC stream. In table, csv "
            "and json, bytes are UTF-8 text, with escapes such as \\xff for other bytes",
        ),
    ] = "table",
    as_of: Annotated[
        str | None,
        Option(
            "--as-of",
            metavar="TIME",
            help="the log at this time (@2026-01-31T12:00:00Z, or -10m for ten minutes ago). It is "
            "refused if the records of that time are not known: they are for an hour or longer, "
            "unless retention, delete-records or compaction has removed some",
        ),
    ] = None,
    memory: Annotated[
        int,
        Option(
            "--memory",
            parser=size_bytes(16 << 20),
            metavar="SIZE",
            help="memory of DuckDB; it writes what is more to a temporary folder",
        ),
    ] = MEMORY_BYTES,
) -> None:
    """Run a SQL query over the topics in a store, with DuckDB.

    The command needs no broker. Each topic is a table of all its records, sealed or not:
    `"events$sealed"` has those of its Delta table, `"events$tail"` the others. Quote names that
    have other characters than letters, digits and _. Columns are "offset", timestamp, key, value,
    headers and partition; decode(value) is the value as text.

    Example: tidelog query "SELECT decode(key), count(*) FROM events GROUP BY ALL ORDER BY 2 DESC"
    """
    if file_format in BINARY and sys.stdout.isatty():
        raise BadUsage(f"--format {file_format} is not for a terminal: redirect it to a file")
    as_of_time = None if as_of is None else moment(as_of, now())
    settings = store.settings(warn)
    with duckdb_errors(), command_errors(default_store_hint(settings)):
        run(settings, sql, file_format, as_of_time, memory)


@contextlib.contextmanager
def duckdb_errors() -> Iterator[None]:
    """Raise errors of DuckDB as CommandErrors of one line."""
    try:
        import duckdb
    except ImportError as error:
        raise CommandError(f"{NO_DUCKDB} ({error})") from None
    try:
        yield
    except duckdb.Error as error:
        raise CommandError(f"SQL: {str(error).splitlines()[0]}") from None


def run(
    settings: Settings,
    sql: str,
    file_format: OutputFormat,
    as_of: dt.datetime | None,
    memory_bytes: int,
) -> None:
    """Run one statement, and print its rows. Raises LogError, duckdb.Error, CommandError."""
    from tidelog.storage.store.blocking_store import OpenedStore

    with (
        tempfile.TemporaryDirectory(prefix="tidelog-query-") as folder,
        OpenedStore(settings.store, settings.s3) as opened_store,
        contextlib.closing(connect(memory_bytes, folder)) as connection,
    ):
        snapshot = snapshot_of(opened_store, sql, as_of)
        tables = Tables(opened_store, snapshot)
        is_shown = file_format == "table" or not sys.stdout.isatty()
        with SlowProgress("reading", tables.rows_max, is_wanted=is_shown) as progress:
            tables.register_in(connection, progress)
            with tables.errors():
                reader = result_of(connection, sql)
                if reader is not None:
                    with contextlib.closing(reader):
                        writer_of(file_format, progress)(reader)


def connect(memory_bytes: int, folder: str) -> "duckdb.DuckDBPyConnection":
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_bytes}B",
        "temp_directory": folder,
        "autoinstall_known_extensions": "false",  # a query downloads nothing
        "python_enable_replacements": "false",  # a table is a topic, never a local variable
    }
    connection = duckdb.connect(config=settings)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def result_of(connection: "duckdb.DuckDBPyConnection", sql: str) -> "pa.RecordBatchReader | None":
    """Start a statement, and return its rows. Raises CommandError for several statements."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise BadUsage(f"one statement is expected, not {len(statements)}")
    relation: Any = connection.sql(sql)  # None: the statement has no rows
    return None if relation is None else relation.to_arrow_reader(BATCH_ROWS)


def snapshot_of(opened_store: "OpenedStore", sql: str, as_of: dt.datetime | None) -> "LogSnapshot":
    """Return the topics that the query names; if it names none, all topics. Raises CommandError."""
    from tidelog.storage.read.offline_log import OfflineLog

    view = opened_store.run(OfflineLog.open(opened_store.store, SystemClock()))
    try:
        topics = list(view.offsets(None).topics)
        names = named_topics(sql, topics) or topics
        if as_of is None:
            return opened_store.run(view.snapshot(names))
        return opened_store.run(view.snapshot_at(names, int(as_of.timestamp() * 1000)))
    finally:
        opened_store.run(view.close())


def named_topics(sql: str, topics: Iterable[str]) -> list[str]:
    """Return the topics whose names are in the text of a query, also those in other words of it.

    DuckDB does not distinguish names by case. Raises CommandError if it could take one topic for
    another.
    """
    by_folded_name: dict[str, list[str]] = {}
    for topic in topics:
        if re.search(rf"(?<![\w.-]){re.escape(topic)}(?![\w.-])", sql, re.IGNORECASE):
            by_folded_name.setdefault(topic.lower(), []).append(topic)
    names = []
    for alike in by_folded_name.values():
        exact = alike if len(alike) == 1 else [topic for topic in alike if topic in sql]
        if len(exact) != 1:
            raise CommandError(
                f"topics {' and '.join(alike)} differ in case only, which SQL does not distinguish:"
                " name one of them in its own case"
            )
        names += exact
    return names


class Tables:
    """The topics of a snapshot as tables and views of DuckDB."""

    def __init__(self, opened_store: "OpenedStore", snapshot: "LogSnapshot") -> None:
        self._opened_store = opened_store
        self._topics = snapshot.topics
        self._rows = 0
        self._failure: LogError | None = None

    @property
    def rows_max(self) -> int:
        return sum(topic.rows_max for topic in self._topics.values())

    def register_in(self, connection: "duckdb.DuckDBPyConnection", progress: SlowProgress) -> None:
        from tidelog.storage.read.log_dataset import ALL, SEALED, TAIL

        for name, topic in self._topics.items():
            for suffix, side in (("", ALL), ("$sealed", SEALED), ("$tail", TAIL)):
                dataset = self._dataset(side.of(topic), progress)
                connection.register(f"{name}{suffix}", dataset)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise the error of the log instead of DuckDB's error about it.

        If a table is missing, name the topics.
        """
        import duckdb

        try:
            yield
        except duckdb.CatalogException as error:
            names = [f'"{name}"' for name in islice(self._topics, NAMES_SHOWN)]
            if "Table with name" not in str(error):
                raise
            raise CommandError(
                f"SQL: {str(error).splitlines()[0]} Topics are tables: {', '.join(names) or 'none'}"
            ) from None
        except (duckdb.Error, OSError):
            if self._failure is not None:
                raise self._failure from None
            raise

    def _dataset(self, topic: "TopicSnapshot", progress: SlowProgress) -> Any:
        from tidelog.storage.read.log_dataset import LogDataset

        def on_rows(count: int) -> None:
            self._rows += count
            progress.show(self._rows)

        return LogDataset(
            topic,
            lambda: contextlib.nullcontext(self._opened_store),
            on_rows=on_rows,
            on_failure=self._fail,
        )

    def _fail(self, failure: LogError) -> None:
        self._failure = self._failure or failure


# -- output


def _show_table(progress: SlowProgress, reader: "pa.RecordBatchReader") -> None:
    rows: list[list[object]] = []
    is_cut = False
    for batch in reader:
        rows += map(list, zip(*(_cells(column) for column in batch.columns), strict=True))
        if is_cut := len(rows) > TABLE_ROWS_MAX:
            break
    progress.__exit__()
    show_table(reader.schema.names, rows[:TABLE_ROWS_MAX])
    if is_cut:
        limit = plural(TABLE_ROWS_MAX, "row")
        warn(f"the table has only the first {limit}: --format csv or json prints all")


def _cells(column: "pa.Array") -> list[object]:
    return [_cell(value) for value in column.to_pylist()]


def _cell(value: Any) -> object:
    """Return a value for a cell of a table or a CSV file: a number, or text."""
    plain = _plain(value)
    if plain is None:
        return ""
    if isinstance(plain, (dict, list, bool)):
        return orjson.dumps(plain).decode()
    return plain


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    match value:
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case dt.datetime():
            return value.isoformat()
        case Decimal():
            return _number(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def _number(value: Decimal) -> int | float | str:
    """Return a decimal as a number. Where a float is not exact, return it as text."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _write_csv(reader: "pa.RecordBatchReader") -> None:
    import csv
    import io

    for index, batch in enumerate(_batches(reader)):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if index == 0:
            writer.writerow(reader.schema.names)
        writer.writerows(zip(*(_cells(column) for column in batch.columns), strict=True))
        write_out(text.getvalue().encode())


def _write_json(reader: "pa.RecordBatchReader") -> None:
    for batch in reader:
        lines = [_json_line(_plain(row)) for row in batch.to_pylist()]
        write_out(b"".join(lines))


def _json_line(row: Any) -> bytes:
    """Return a line. SQL's numbers may be larger than those of the fast encoder."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        import json

        return f"{json.dumps(row, ensure_ascii=False)}\n".encode()


def _write_arrow(reader: "pa.RecordBatchReader") -> None:
    import pyarrow as pa

    with _stdout_errors(), pa.ipc.new_stream(_stdout(), reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def _write_parquet(reader: "pa.RecordBatchReader") -> None:
    import pyarrow.parquet as pq

    with _stdout_errors(), pq.ParquetWriter(_stdout(), reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def _stdout() -> Any:
    return sys.stdout.buffer


@contextlib.contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
        sys.stdout.buffer.flush()
    except OSError as error:
        raise output_error(error) from None


def _batches(reader: "pa.RecordBatchReader") -> "Iterator[pa.RecordBatch]":
    """Yield the batches; without rows, one without rows."""
    import pyarrow as pa

    is_empty = True
    for batch in reader:
        is_empty = False
        yield batch
    if is_empty:
        yield pa.RecordBatch.from_pylist([], schema=reader.schema)


def writer_of(
    file_format: OutputFormat, progress: SlowProgress
) -> "Callable[[pa.RecordBatchReader], None]":
    return WRITERS.get(file_format) or partial(_show_table, progress)


WRITERS: "dict[str, Callable[[pa.RecordBatchReader], None]]" = {
    "csv": _write_csv,
    "json": _write_json,
    "arrow": _write_arrow,
    "parquet": _write_parquet,
}
