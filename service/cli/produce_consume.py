"""`tidelog produce` and `tidelog consume`: options, checked before slow modules are imported."""

import datetime as dt
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidelog.service.cli.positions import (
    BEGINNING,
    Form,
    Last,
    PartitionOffsets,
    at_time,
    forms_in_words,
    position,
)
from tidelog.service.cli.requests import JsonOption, ServerOption, now
from tidelog.service.cli.results import BadUsage, show
from tidelog.service.cli.topics import TopicArgument

RETRY_FOR_S = 60.0
SESSION_TIMEOUT_MS = 30_000
CLIENT_ID = "tidelog"

RetryOption = Annotated[
    float | None,
    typer.Option(
        "--retry-s",
        min=0,
        metavar="SECONDS",
        help="how long to retry a request if the broker cannot be reached or answers 429, 502, 503 "
        "or 504. By default, the first request is not repeated, so that a wrong URL fails at once, "
        f"and later requests are repeated for {RETRY_FOR_S:.0f} s. After the first answer, "
        "`consume --follow` retries without end",
    ),
]


FROM = (Form.EDGES, Form.OFFSET, Form.LAST, Form.TIME, Form.PARTITIONS)
UNTIL = (Form.EDGES, Form.OFFSET, Form.TIME)


class LineFormat(StrEnum):
    """Format of a line of input."""

    TEXT = "text"
    NDJSON = "ndjson"


class Embedded(StrEnum):
    """Form of keys and values inside JSON."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"


class OutputFormat(StrEnum):
    """Format of the output."""

    TEXT = "text"
    JSON = "json"
    BINARY = "binary"
    NDJSON = "ndjson"


class OnErrorName(StrEnum):
    """Values of `--on-error`."""

    STOP = "stop"
    SKIP = "skip"
    RAW = "raw"
    ESCAPE = "escape"


class AcksName(StrEnum):
    """Values of `--acks`."""

    ALL = "all"
    LOCAL = "1"
    NONE = "0"


def _place(
    text: str, forms: tuple[Form, ...]
) -> "str | int | dt.datetime | Last | PartitionOffsets":
    """Return the position in the text. A time before now becomes a time. Raises BadUsage."""
    return at_time(position(text, forms), now())


def produce(  # noqa: PLR0913 - a command's options are its arguments
    ctx: typer.Context,
    topic: TopicArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="file with lines; - for stdin", show_default=False)
    ] = "-",
    line_format: Annotated[
        LineFormat,
        typer.Option(
            "--format",
            "-f",
            help="text: a line is a value, byte for byte; ndjson: a line is a JSON object with "
            "key, value, partition, timestamp (ms), headers: an object of texts, or a list as "
            "`consume --json` prints it, with values in base64",
        ),
    ] = LineFormat.TEXT,
    values: Annotated[
        bool, typer.Option("--values", help="with ndjson: a line is only a value, of any JSON type")
    ] = False,
    embedded: Annotated[
        Embedded,
        typer.Option(help="with ndjson: form of keys and values (binary: base64)"),
    ] = Embedded.JSON,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="with text: separator of key and value"),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option("--partition", "-p", min=0, help="partition for records without a partition"),
    ] = None,
    ignore_partition: Annotated[
        bool,
        typer.Option(
            "--ignore-partition",
            help="with ndjson: ignore the partition in a line, so that --partition or the key "
            "chooses it, for example for a copy to a topic with another number of partitions",
        ),
    ] = False,
    acks: Annotated[
        AcksName,
        typer.Option(
            help="the broker answers when the records are in the object store (all), are on the "
            "broker's disk (1), or are validated (0)"
        ),
    ] = AcksName.ALL,
    batch_records: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="maximum records of a request")
    ] = 10_000,
    batch_bytes: Annotated[
        int, typer.Option(min=1, help="approximate maximum bytes of a request")
    ] = 1024 * 1024,
    in_flight: Annotated[
        int,
        typer.Option(
            min=1, max=256, help="maximum requests in flight; no two have the same partition"
        ),
    ] = 4,
    linger_ms: Annotated[
        int, typer.Option(min=0, max=60_000, help="how many ms a batch waits for more lines")
    ] = 50,
    crlf: Annotated[
        bool, typer.Option("--crlf", help="with text: remove a carriage return at a line's end")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="store in this file how many lines are in the topic, and begin after them: each "
            "line is produced once, also if this command is killed and run again with the same "
            "input. Sends one request at a time",
        ),
    ] = None,
    retry_s: RetryOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Produce the lines of a file or stdin.

    Retries neither lose nor duplicate records, because each request has an Idempotency-Key. The
    records of a partition keep the order of the input, because at most one request for the
    partition is in flight.

    Example: tidelog produce events records.ndjson --format ndjson

    A line of ndjson: {"key": "k1", "value": {"n": 1}, "headers": {"source": "shop"}}
    """
    if ignore_partition and line_format is not LineFormat.NDJSON:
        raise BadUsage("--ignore-partition needs --format ndjson")
    if values and line_format is not LineFormat.NDJSON:
        raise BadUsage("--values needs --format ndjson")
    if key_separator is not None and line_format is not LineFormat.TEXT:
        raise BadUsage("--key-separator needs --format text")
    if crlf and line_format is not LineFormat.TEXT:
        raise BadUsage("--crlf needs --format text")
    if state is not None and acks is AcksName.NONE:
        raise BadUsage("--state needs --acks all or 1: with 0, no line is known to be in the topic")
    if key_separator == "":
        raise BadUsage("--key-separator is empty")

    from tidelog.service.cli.client import connection_of, run_until_signal
    from tidelog.service.cli.records import lines, resumable
    from tidelog.service.cli.records import produce as cli_produce

    if line_format is LineFormat.TEXT:
        parse = lines.text_parser(key_separator, is_crlf=crlf)
    else:
        parse = lines.json_parser(
            embedded.value, is_values=values, has_partitions=not ignore_partition
        )
    options = cli_produce.ProduceOptions(
        parse=parse,
        media_type=f"application/vnd.kafka.{parse.embedded}.v2+json",
        partition=partition,
        acks=acks.value,
        batch_records=batch_records,
        batch_bytes=batch_bytes,
        in_flight=in_flight,
        linger_s=linger_ms / 1000,
        retry_s=RETRY_FOR_S if retry_s is None else retry_s,
    )
    connection = connection_of(ctx, server, retry_s=retry_s or 0.0)
    with lines.opened(file) as source:
        if state is None:
            work = cli_produce.produce(connection, topic, source, options)
        else:
            work = resumable.produce_with_state(connection, topic, source, options, state)
        report = run_until_signal(work)
    show(report.as_json(), report.as_text(), as_json=as_json)


def consume(  # noqa: PLR0913 - as above
    ctx: typer.Context,
    topic: TopicArgument,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, metavar="N", help="partition (default: all); repeatable"
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="read as a member of this consumer group: start at the group's committed offsets "
            "(or, without them, at --from), and commit the offsets of the printed records",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option("--from", metavar="POSITION", help=forms_in_words(FROM)),
    ] = "beginning",
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            min=0,
            metavar="N",
            help="print the last N records of each partition, as --from -N",
        ),
    ] = None,
    until: Annotated[
        str,
        typer.Option(
            "--until",
            metavar="POSITION",
            help="stop before this position; end is the end offset when the command starts. "
            f"{forms_in_words(UNTIL)}",
        ),
    ] = "end",
    count: Annotated[
        int | None, typer.Option("--max", "-n", min=0, help="maximum number of records")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="wait for new records at the end, up to --until or --max"),
    ] = False,
    shown: Annotated[
        OutputFormat | None,
        typer.Option(
            "--format",
            "-f",
            help="values as text (default), json or binary (base64); ndjson is the same as --json. "
            "With --json: form of keys and values (default json)",
            show_default=False,
        ),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="print the key and this separator before each value"),
    ] = None,
    on_error: Annotated[
        OnErrorName,
        typer.Option(
            help="what to do with a record that does not decode in the format. stop: end its "
            "partition before it, print the other partitions, then fail. skip: omit it. raw: print "
            "its bytes in base64. escape: print escapes such as \\xff for bytes that are not UTF-8"
        ),
    ] = OnErrorName.STOP,
    dead_letter: Annotated[
        str | None,
        typer.Option(
            "--dead-letter",
            metavar="TOPIC",
            help="send records that do not decode to this topic, byte for byte, and go on",
        ),
    ] = None,
    session_timeout_ms: Annotated[
        int,
        typer.Option(
            min=10_000,
            max=45_000,
            help="with --group: how long the group waits for this member after a crash, before "
            "other members get its partitions. A member that is ended by SIGINT or SIGTERM leaves "
            "at once",
        ),
    ] = SESSION_TIMEOUT_MS,
    client_id: Annotated[
        str,
        typer.Option(
            "--client-id",
            metavar="NAME",
            help="with --group: name of this client. If members with one name on one machine join "
            "and end often, the broker delays their joins: then give each a name of its own",
        ),
    ] = CLIENT_ID,
    fetch_bytes: Annotated[int, typer.Option(min=1, help="approximate bytes of a response")] = 1024
    * 1024,
    retry_s: RetryOption = None,
    server: ServerOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print records as JSON objects, one a line")
    ] = False,
) -> None:
    """Print the records of a topic, one a line.

    The records of a partition keep their order, but the output mixes partitions. A null value is
    printed as null. With --follow the command runs until it is interrupted.

    Example: tidelog consume events --from @2026-01-31T12:00:00Z --max 10 --json
    """
    is_ndjson = as_json or shown is OutputFormat.NDJSON
    if shown is None or shown is OutputFormat.NDJSON:
        embedded = OutputFormat.JSON if is_ndjson else OutputFormat.TEXT
    else:
        embedded = shown
    if is_ndjson and key_separator is not None:
        raise BadUsage(
            "--key-separator and --json exclude each other: the JSON objects have the keys"
        )

    if last is not None:
        if start != BEGINNING:
            raise BadUsage("--last and --from exclude each other")
        start = f"-{last}"
    begin = _place(start, FROM)
    if isinstance(begin, PartitionOffsets):
        if partition:
            raise BadUsage(f"--from {start} names the partitions: remove --partition")
        partition = [number for number, _ in begin.of]
    if group is not None and (partition or until != "end" or start not in {"beginning", "end"}):
        raise BadUsage(
            "--group excludes --partition, --until, and --from other than beginning or end"
        )
    if group is None and (session_timeout_ms != SESSION_TIMEOUT_MS or client_id != CLIENT_ID):
        raise BadUsage("--session-timeout-ms and --client-id need --group")
    if dead_letter is not None and on_error is not OnErrorName.STOP:
        raise BadUsage("--dead-letter and --on-error exclude each other")
    if dead_letter == topic:
        raise BadUsage(f"--dead-letter {topic}: the command would read its own dead letters")
    end = None if follow and until == "end" else _place(until, UNTIL)
    if follow and isinstance(end, dt.datetime):
        raise BadUsage(
            "--follow excludes --until with a time, because a later record may have an earlier "
            "timestamp: give an offset"
        )

    from tidelog.service.cli.client import connection_of, run_until_signal
    from tidelog.service.cli.records import consume as cli_consume
    from tidelog.service.cli.records import group_consume

    options = cli_consume.ConsumeOptions(
        partitions=partition or [],
        start=begin,
        until=end,
        count_max=count,
        follow=follow,
        embedded=embedded.value,
        is_ndjson=is_ndjson,
        key_separator=key_separator,
        fetch_bytes=fetch_bytes,
        retry_s=RETRY_FOR_S if retry_s is None else retry_s,
        on_error=on_error.value,
        dead_letter=dead_letter,
        session_timeout_ms=session_timeout_ms,
        client_id=client_id,
    )
    connection = connection_of(ctx, server, retry_s=retry_s or 0.0)
    if group is None:
        run_until_signal(cli_consume.consume(connection, topic, options))
    else:
        run_until_signal(group_consume.consume_as_member(connection, topic, group, options))
