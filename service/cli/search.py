"""`tidelog search`: the records of a topic that have a text, newest first, without a broker.

The records are printed as `tidelog consume` prints them: the same encoder makes their JSON, and the
same printer their lines.
"""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from typer import Argument, Option

from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.errors import BadUsage, command_errors
from tidelog.service.cli.output import SlowProgress, warn, write_out
from tidelog.service.cli.output_lines import LineForm, LinePrinter, joined, read_format
from tidelog.service.cli.positions import moment, now
from tidelog.service.cli.store_commands import StoreOptions, default_store_hint
from tidelog.service.client.records import PartitionPage
from tidelog.storage.core.errors import UnknownPartition
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.runtime.clock import SystemClock

if TYPE_CHECKING:
    from tidelog.storage.read.search import Match, Search
    from tidelog.storage.store.blocking_store import OpenedStore

COUNT_MAX = 100


class SearchOptions(NamedTuple):
    """Options that choose the records."""

    regex: Annotated[
        bool, Option("--regex", "-r", help="TEXT is a regular expression, in the syntax of RE2")
    ] = False
    part: Annotated[
        Literal["all", "key", "value", "headers"],
        Option("--in", help="the part of a record that has the text; headers: a name or a value"),
    ] = "all"
    count_max: Annotated[
        int, Option("--max", "-n", min=1, max=100_000, help="maximum number of records")
    ] = COUNT_MAX
    since: Annotated[
        str | None,
        Option(
            "--since",
            metavar="TIME",
            help="only records at or after this time (@2026-01-31T12:00:00Z, or -1h for one hour "
            "before now)",
        ),
    ] = None
    partition: Annotated[
        list[int] | None,
        Option(
            "--partition", "-p", min=0, metavar="N", help="partition (default: all); repeatable"
        ),
    ] = None

    def search(self, text: str) -> "Search":
        """Return the search for a text. Raises BadUsage, InvalidRequest."""
        from tidelog.storage.read.search import PARTS, Needle, Search

        if not text:
            raise BadUsage("TEXT is empty: every record has it")
        since = None if self.since is None else moment(self.since, now())
        since_ms = None if since is None else max(0, int(since.timestamp() * 1000))
        needle = Needle(text, self.regex, PARTS if self.part == "all" else (self.part,))
        needle.check()
        return Search(needle, self.count_max, since_ms, self.partition or [])


def search(
    topic: TopicArgument,
    text: Annotated[str, Argument(metavar="TEXT", show_default=False, help="the text to find")],
    *,
    store: StoreOptions,
    options: SearchOptions,
    key_separator: Annotated[
        str | None,
        Option(metavar="TEXT", help="print the key and this separator before each value"),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="print records as JSON objects, one a line")
    ] = False,
) -> None:
    """Print the records of a topic that have a text, the newest first.

    The command needs no broker. It reads the records that are not sealed yet, too, and prints each
    record as soon as no newer one can be found. Bytes that are no UTF-8 text are printed as escapes
    such as \\xff, and with --json in base64.

    Example: tidelog search events '"order": 4711' --in value --since -1d --json
    """
    if as_json and key_separator is not None:
        raise BadUsage(
            "--key-separator and --json exclude each other: the JSON objects have the keys"
        )
    settings = store.settings(warn)
    with command_errors(default_store_hint(settings)):
        from tidelog.storage.store.blocking_store import OpenedStore

        record_search = options.search(text)
        form = LineForm("text", as_json, key_separator)
        printer = LinePrinter(form, "raw" if as_json else "escape")
        with OpenedStore(settings.store, settings.s3) as opened_store:
            for match in matches(opened_store, topic, record_search):
                show(topic, match, printer)


def matches(opened_store: "OpenedStore", topic: str, record_search: "Search") -> "Iterator[Match]":
    """Yield the records that are found, and show progress. Raises LogError."""
    from tidelog.storage.read.offline_log import open_snapshot

    snapshot = opened_store.run(open_snapshot(opened_store.store, SystemClock(), [topic]))
    parts = snapshot.topics[topic].partitions
    for number in record_search.partitions:
        if number >= len(parts):
            raise UnknownPartition(topic, number, len(parts))
    rows = 0
    total = snapshot.topics[topic].rows_max
    with SlowProgress(f"searching {topic}", total) as progress:

        def on_rows(count: int) -> None:
            nonlocal rows
            rows += count
            progress.show(rows)

        yield from record_search.run(opened_store, snapshot.topics[topic], on_rows)


def show(topic: str, match: "Match", printer: LinePrinter) -> None:
    """Print one record."""
    from tidelog.service.formats.record_pages import encode_page

    where = TopicPartition(topic, match.partition)
    page = encode_page(
        [match.batch], *where, "text", is_json=[False], framing="ndjson", on_error="raw"
    )
    records = read_format("text").decode_fetch(page.body)
    shown = asyncio.run(printer.shown(PartitionPage(where, records, match.offset + 1), None))
    write_out(joined(shown.lines))
