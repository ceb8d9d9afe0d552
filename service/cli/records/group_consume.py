"""`tidelog consume --group`: print the records of a topic as a member of a consumer group.

The command commits exactly the printed records. The group reads again the records that the command
fetched and did not print. At the end, and at SIGINT and SIGTERM, the command deletes its instance,
so that other members continue at once. AsyncConsumer continues after rebalances, expiry and
restarts of brokers. After an expiry, the group reads the last printed records again.
"""

import asyncio
import math

from tidelog.service.cli.records.consume import ConsumeOptions, line_printer
from tidelog.service.cli.records.output import Output
from tidelog.service.cli.records.undecodable import LinePrinter, ShownLines, joined, read_format
from tidelog.service.client.connection import Connection
from tidelog.service.client.consumer import POLL_S, AsyncConsumer
from tidelog.service.client.records import PartitionPage

WAIT_S = 2.0
"""Timeout of a read without --follow; an empty response means the end of this member's
partitions."""


async def consume_as_member(
    connection: Connection, topic: str, group: str, options: ConsumeOptions
) -> None:
    """Print the records of this member's partitions. Raises CommandError, ClientError."""
    async with connection:
        # A subscription to a missing topic would wait for the topic, so fail here.
        _ = await connection.partitions(topic)
        connection.retry_s = math.inf if options.follow else options.retry_s
        consumer = AsyncConsumer(
            connection,
            topic,
            group,
            auto_offset_reset="latest" if options.start == "end" else "earliest",
            read_format=read_format(options.embedded),
            fetch_bytes=options.fetch_bytes,
            session_timeout_ms=options.session_timeout_ms,
            client_id=options.client_id,
        )
        printer = line_printer(connection, options)
        try:
            await _print_all(consumer, printer, options)
        finally:
            await consumer.close()
            printer.show_skipped()


async def _print_all(
    consumer: AsyncConsumer, printer: LinePrinter, options: ConsumeOptions
) -> None:
    """Print records until `count_max` or the end."""
    loop = asyncio.get_running_loop()
    output = Output()
    printed = 0
    wait_s = POLL_S if options.follow else WAIT_S
    while options.count_max is None or printed < options.count_max:
        started_s = loop.time()
        pages = await consumer.poll_pages(wait_s)
        if not pages:
            # A read also ends early, without records, when the group has a new generation.
            if not options.follow and loop.time() - started_s >= wait_s * 0.9:
                return
            continue
        shown = await _print(consumer, printer, output, pages, options.count_max, printed)
        printed += sum(len(shown_page.lines) for shown_page in shown)
        failure = next(
            (shown_page.failure for shown_page in shown if shown_page.failure is not None), None
        )
        if failure is not None:
            raise failure


async def _print(
    consumer: AsyncConsumer,
    printer: LinePrinter,
    output: Output,
    pages: list[PartitionPage],
    count_max: int | None,
    printed: int,
) -> list[ShownLines]:
    """Print pages. The printed records are done, so the next read commits them. If a record does
    not decode, print the other pages, too."""
    done = {}
    shown_pages = []
    for page in pages:
        rest = None if count_max is None else count_max - printed
        shown = await printer.shown(page, rest)
        printed += len(shown.lines)
        if shown.next_offset > page.records[0].offset:
            done[page.where] = shown.next_offset
        shown_pages.append(shown)
    try:
        await output.write(joined([line for shown in shown_pages for line in shown.lines]))
    finally:
        if output.is_written:
            consumer.done(done)
    return shown_pages
