"""`tidelog produce` and `tidelog consume`: their options, checked before anything slow loads."""

import asyncio
import datetime as dt
from enum import StrEnum
from typing import Annotated

import typer

from service.cli_results import BadUsage, show_json, show_line
from service.cli_topics import JsonOption, ServerOption, TopicArgument

RETRY_S = 60.0

RetryOption = Annotated[
    float,
    typer.Option(
        "--retry-s",
        min=0,
        metavar="SECONDS",
        help="how long to repeat what may succeed later: no connection, 429, 502, 503, 504",
    ),
]


class LineFormat(StrEnum):
    """What a line of input is."""

    TEXT = "text"
    NDJSON = "ndjson"


class Embedded(StrEnum):
    """How keys and values appear inside JSON."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"


class Shown(StrEnum):
    """How records are printed."""

    TEXT = "text"
    JSON = "json"
    BINARY = "binary"
    NDJSON = "ndjson"


class Acks(StrEnum):
    """What an acknowledgement means."""

    ALL = "all"
    LOCAL = "1"
    NONE = "0"


def produce(  # noqa: PLR0913 - a command's options are its arguments
    topic: TopicArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="file of lines; - is stdin", show_default=False)
    ] = "-",
    line_format: Annotated[
        LineFormat,
        typer.Option(
            "--format",
            "-f",
            help="text: a line is a value, byte for byte; ndjson: a line is a record, an object "
            "of key, value, partition, timestamp (ms), headers",
        ),
    ] = LineFormat.TEXT,
    values: Annotated[
        bool, typer.Option("--values", help="with ndjson: a line is a value, any JSON, without key")
    ] = False,
    embedded: Annotated[
        Embedded,
        typer.Option(help="with ndjson: what key and value are: JSON, strings or base64"),
    ] = Embedded.JSON,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="with text: what stands between key and value"),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="of records that name none")
    ] = None,
    acks: Annotated[
        Acks, typer.Option(help="all: in object storage; 1: on the broker's disk; 0: taken")
    ] = Acks.ALL,
    batch_records: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="records of one request at most")
    ] = 10_000,
    batch_bytes: Annotated[
        int, typer.Option(min=1, help="bytes of one request, about, at most")
    ] = 1024 * 1024,
    in_flight: Annotated[
        int, typer.Option(min=1, max=256, help="requests in flight at most, for other partitions")
    ] = 4,
    linger_ms: Annotated[
        int, typer.Option(min=0, max=60_000, help="how long a line waits for more of them")
    ] = 50,
    retry_s: RetryOption = RETRY_S,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Produce lines of a file or stdin.

    No record is lost or doubled by retries: each request has an Idempotency-Key. Records of one
    partition stay in the order of the input: one request at a time is in flight for it, and
    several for different partitions.
    """
    if values and line_format is not LineFormat.NDJSON:
        raise BadUsage("--values goes with --format ndjson")
    if key_separator is not None and line_format is not LineFormat.TEXT:
        raise BadUsage("--key-separator goes with --format text")
    if key_separator == "":
        raise BadUsage("--key-separator is empty")

    from service import cli_lines, cli_produce

    if line_format is LineFormat.TEXT:
        parse = cli_lines.text_parser(key_separator)
    else:
        parse = cli_lines.json_parser(embedded.value, is_values=values)
    options = cli_produce.Options(
        parse=parse,
        media_type=f"application/vnd.kafka.{parse.embedded}.v2+json",
        partition=partition,
        acks=acks.value,
        batch_records=batch_records,
        batch_bytes=batch_bytes,
        in_flight=in_flight,
        linger_s=linger_ms / 1000,
        retry_s=retry_s,
    )
    with cli_lines.opened(file) as source:
        report = asyncio.run(cli_produce.produce(server, topic, source, options))
    if as_json:
        show_json(report.as_json())
    else:
        show_line(report.as_text())


def consume(  # noqa: PLR0913 - as above
    topic: TopicArgument,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="repeat for more; all when not given"),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="share the topic with this consumer group's other members, go on where it has "
            "read to, and commit what is printed; --from is for what it never read",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="POSITION", help="beginning, end, an offset, or @ an ISO time"
        ),
    ] = "beginning",
    until: Annotated[
        str,
        typer.Option(
            "--until",
            metavar="POSITION",
            help="end (as of now), an offset or @ an ISO time: the first not printed",
        ),
    ] = "end",
    count: Annotated[int | None, typer.Option("--max", "-n", min=0, help="records at most")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="go on at the end, with what is produced then")
    ] = False,
    shown: Annotated[
        Shown | None,
        typer.Option(
            "--format",
            "-f",
            help="how values are printed: text (default), json, binary (base64); ndjson is --json. "
            "With --json: how keys and values appear inside (default json)",
            show_default=False,
        ),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="print keys, and this between key and value")
    ] = None,
    fetch_bytes: Annotated[
        int, typer.Option(min=1, help="bytes of keys and values of one request, about")
    ] = 1024 * 1024,
    retry_s: RetryOption = RETRY_S,
    server: ServerOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print whole records, one JSON object a line")
    ] = False,
) -> None:
    """Print records, one a line.

    Records of one partition come in their order, those of different partitions as they are read. A
    null is printed as null. With --follow until interrupted.
    """
    is_ndjson = as_json or shown is Shown.NDJSON
    if shown is None or shown is Shown.NDJSON:
        embedded = Shown.JSON if is_ndjson else Shown.TEXT
    else:
        embedded = shown
    if is_ndjson and key_separator is not None:
        raise BadUsage("--key-separator does not go with --json: keys are in the records")

    if group is not None:
        if partition or until != "end" or start not in {"beginning", "end"}:
            raise BadUsage("--group goes with --from beginning or end, not -p or --until")
        from service import cli_group_reads

        chosen = cli_group_reads.GroupOptions(
            group=group,
            is_latest=start == "end",
            count_max=count,
            follow=follow,
            embedded=embedded.value,
            is_ndjson=is_ndjson,
            key_separator=key_separator,
            fetch_bytes=fetch_bytes,
            retry_s=retry_s,
        )
        asyncio.run(cli_group_reads.consume_as_member(server, topic, chosen))
        return
    end = None if follow and until == "end" else position(until)
    if follow and isinstance(end, dt.datetime):
        raise BadUsage(
            "--follow goes on for ever, or --until an offset: later times may come first"
        )

    from service import cli_consume

    options = cli_consume.Options(
        partitions=partition or [],
        start=position(start),
        until=end,
        count_max=count,
        follow=follow,
        embedded=embedded.value,
        is_ndjson=is_ndjson,
        key_separator=key_separator,
        fetch_bytes=fetch_bytes,
        retry_s=retry_s,
    )
    asyncio.run(cli_consume.consume(server, topic, options))


def position(text: str) -> "str | int | dt.datetime":
    """`beginning`, `end`, an offset, or a time (UTC where the text names no zone)."""
    if text in {"beginning", "end"}:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if text.startswith("@"):
        try:
            when = dt.datetime.fromisoformat(text[1:])
        except ValueError:
            raise BadUsage(
                f"{text!r} is not @ and an ISO 8601 time: @2013-01-31T12:00:00Z"
            ) from None
        return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)
    raise BadUsage(f"position {text!r} is none of beginning, end, an offset, @ an ISO time")
