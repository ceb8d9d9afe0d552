"""`tidelog replay`: a topic's records from the store to files, by Spark, without a broker.

Spark comes last: what can be said without it (no such store, topic or position) is said at once.
"""

import contextlib
import datetime as dt
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from service.cli_results import (
    BadUsage,
    CommandError,
    NotReachable,
    NotThere,
    plural,
    show_json,
    show_line,
)
from service.cli_topics import JsonOption, TopicArgument
from service.settings import (
    BadSettings,
    Settings,
    is_submitted_to_spark,
    load,
    set_worker_python,
)
from storage.errors import LogError, StoreUnfit, Unavailable, UnknownPartition, UnknownTopic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POSITIONS = (
    "beginning, end, @ an ISO time, or JSON with an offset for every partition: "
    """'{"0": 17, "1": -2}', -2 for the beginning, -1 (in --until) for the end"""
)


StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="that of `tidelog serve` (TIDELOG_STORE)"),
]

MasterOption = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark master: local[*], or spark-submit's"),
]

_CSV_OPTIONS = {"header": "true", "escape": '"'}
"""Quotes doubled, as RFC 4180 and everybody but Spark has it."""


class FileFormat(StrEnum):
    """What Spark writes."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"


def replay(  # noqa: PLR0913 - a command's options are its arguments
    topic: TopicArgument,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="folder or URL to write to")],
    store: StoreOption = None,
    file_format: Annotated[
        FileFormat, typer.Option("--as", help="json and csv: key and value as text")
    ] = FileFormat.PARQUET,
    start: Annotated[str, typer.Option("--from", metavar="POSITION", help=POSITIONS)] = "beginning",
    until: Annotated[
        str, typer.Option("--until", metavar="POSITION", help="the same: the first left out")
    ] = "end",
    master: MasterOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace what is in the folder")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a topic's records to files, with Spark, from the store alone.

    No broker takes part. What is sealed is read as Parquet, the tail from the WAL, as of now.
    """
    options = positions(topic, start, until)
    try:
        settings = load({} if store is None else {"store": store})
    except BadSettings as error:
        raise BadUsage(str(error)) from None
    count = _replay(settings, topic, to, file_format, options, master, overwrite=overwrite)
    if as_json:
        show_json({"topic": topic, "records": count, "to": to, "as": file_format.value})
    else:
        show_line(f"replayed {plural(count, 'record')} of {topic} to {to}")


def _replay(
    settings: Settings,
    topic: str,
    to: str,
    file_format: FileFormat,
    options: dict[str, str],
    master: str | None,
    *,
    overwrite: bool,
) -> int:
    with _in_one_line():
        _check_topic(settings, topic)
        _check_target(to, overwrite=overwrite)
        with spark_session("tidelog replay", master) as spark:
            frame = frame_of(spark, settings, topic, file_format, options)
            return write(frame, to, file_format, overwrite=overwrite)


def frame_of(
    spark: "SparkSession",
    settings: Settings,
    topic: str,
    file_format: FileFormat,
    options: Mapping[str, str],
) -> "DataFrame":
    """The records that are to be written, of the positions in `options`."""
    from storage.spark_native import read_topic

    more = {"endpoint": settings.s3_endpoint, "region": settings.s3_region}
    if settings.s3.path_style is not None:
        more["pathStyle"] = str(settings.s3.path_style)
    if file_format is not FileFormat.CSV:
        more["includeHeaders"] = "true"
    given = {name: text for name, text in more.items() if text}
    return read_topic(spark, settings.store, topic, **options, **given)


def _check_topic(settings: Settings, topic: str) -> None:
    from storage.clock import SystemClock
    from storage.readonly import OpenedStore
    from storage.snapshot import open_snapshot

    with OpenedStore(settings.store, settings.s3) as opened:
        opened.run(open_snapshot(opened.store, SystemClock(), [topic]))


def _check_target(to: str, *, overwrite: bool) -> None:
    parts = urlsplit(to)
    if parts.scheme in {"", "file"} and not overwrite and Path(unquote(parts.path)).exists():
        raise CommandError(f"{to} already exists: give another folder, or --overwrite")


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """What the log and Spark raise, as a command's failure."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise CommandError(f"no Spark here: pip install 'tidelog[spark]' ({error})") from None
    try:
        yield
    except (UnknownTopic, UnknownPartition) as error:
        raise NotThere(str(error)) from None
    except (StoreUnfit, Unavailable) as error:
        raise NotReachable(str(error)) from None
    except LogError as error:
        raise CommandError(str(error)) from None
    except (PySparkException, Py4JError) as error:
        raise CommandError(f"Spark: {_first_line(error)}") from None


@contextlib.contextmanager
def spark_session(
    name: str, master: str | None, settings: Mapping[str, str] | None = None
) -> Iterator["SparkSession"]:
    """A session that ends with the block, and says nothing where nobody looks. What is set here
    goes over what was said to spark-submit, so its master is left alone where none is given.

    Raises CommandError when Spark does not start: no Java, mostly.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    set_worker_python(sys.executable)
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    builder = SparkSession.builder.appName(name)
    if master is None and not is_submitted_to_spark():
        master = "local[*]"
    if master is not None:
        builder = builder.master(master)
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    if master is not None and master.startswith("local"):
        builder = builder.config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    is_watched = sys.stderr.isatty()
    builder = builder.config("spark.ui.showConsoleProgress", str(is_watched).lower())
    with tempfile.TemporaryFile() as said:
        try:
            with contextlib.nullcontext() if is_watched else _stderr_to(said.fileno()):
                spark = builder.getOrCreate()
        except PySparkException as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
            why = next((line for line in reversed(lines) if line.strip()), "")
            raise CommandError(f"Spark does not start: {_first_line(error)} {why}") from None
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """For processes that start inside, for as long as they live: a JVM greets with ten lines."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def write(frame: "DataFrame", to: str, file_format: FileFormat, *, overwrite: bool) -> int:
    """Write and count in one pass."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    if file_format is not FileFormat.PARQUET:
        for name in ("key", "value"):
            frame = frame.withColumn(name, F.col(name).cast("string"))
    written = Observation()
    (
        frame.observe(written, F.count(F.lit(1)).alias("records"))
        .write.mode("overwrite" if overwrite else "errorifexists")
        .format(file_format.value)
        .options(**(_CSV_OPTIONS if file_format is FileFormat.CSV else {}))
        .save(to)
    )
    return int(written.get["records"])


def positions(topic: str, start: str, until: str) -> dict[str, str]:
    """The Spark source's options for where to start and where to end."""
    options: dict[str, str] = {}
    for text, prefix, default in ((start, "starting", "beginning"), (until, "ending", "end")):
        if text == default:
            continue
        if text.startswith("@"):
            options[f"{prefix}Timestamp"] = str(_ms(text[1:]))
            options["startingOffsetsByTimestampStrategy"] = "latest"
            continue
        try:
            offsets: Any = json.loads(text)
        except ValueError:
            offsets = None
        if not isinstance(offsets, dict):
            raise BadUsage(f"position {text!r} is none of {POSITIONS}")
        options[f"{prefix}Offsets"] = json.dumps(offsets if topic in offsets else {topic: offsets})
    return options


def _ms(text: str) -> int:
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        raise BadUsage(f"{text!r} is not an ISO 8601 time: 2013-01-31T12:00:00Z") from None
    when = when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)
    return max(0, int(when.timestamp() * 1000))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
