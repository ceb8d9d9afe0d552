"""`tidelog replay`: write the records of a topic to files with Spark, without a broker.

The command checks positions, store and topic before it starts Spark, because the start takes
seconds.
"""

import contextlib
import datetime as dt
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from typer import Option

from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.errors import BadUsage, CommandError, command_errors
from tidelog.service.cli.options import JsonOption
from tidelog.service.cli.output import plural, show_json, show_line, warn
from tidelog.service.cli.positions import (
    BEGINNING,
    END,
    Form,
    PartitionOffsets,
    at_time,
    forms_in_words,
    now,
    position,
)
from tidelog.service.cli.store_commands import MasterOption, StoreOptions, default_store_hint
from tidelog.service.settings.settings import Settings, is_submitted_to_spark, set_worker_python
from tidelog.storage.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NO_SPARK = "Spark is not installed: pip install 'tidelog[spark]'"
FORMS = (Form.EDGES, Form.TIME, Form.PARTITIONS)
POSITIONS = (
    f"{forms_in_words(FORMS)}, or the same as JSON: "
    """'{"0": 17, "1": -2}' (-2: the beginning; -1, in --until: the end). Give each partition"""
)

_CSV_OPTIONS = {"header": "true", "escape": '"'}
"""A quote inside a value is doubled, as in RFC 4180. By default, Spark puts a backslash before the
quote."""

FileFormat: TypeAlias = Literal["parquet", "json", "csv"]


def replay(  # noqa: PLR0913 - a command's options are its arguments
    topic: TopicArgument,
    to: Annotated[str, Option("--to", metavar="DIR", help="target folder or URL")],
    *,
    store: StoreOptions,
    file_format: Annotated[
        FileFormat, Option("--as", help="in json and csv, keys and values are text")
    ] = "parquet",
    start: Annotated[str, Option("--from", metavar="POSITION", help=POSITIONS)] = "beginning",
    until: Annotated[
        str, Option("--until", metavar="POSITION", help="like --from; stop before this position")
    ] = "end",
    master: MasterOption = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="replace the content of the folder")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the records of a topic to files, with Spark.

    The command needs no broker. It reads sealed records from Parquet and the current tail from the
    WAL.

    Example: tidelog replay events --store s3://bucket/prefix --to out --as json
    """
    options = positions(topic, start, until)
    settings = store.settings(warn)
    with _spark_errors(default_store_hint(settings)):
        _check_topic(settings, topic)
        _check_target(to, overwrite=overwrite)
        with spark_session("tidelog replay", master) as spark:
            frame = frame_of(spark, settings, topic, file_format, options)
            with _target_errors(to):
                count = write(frame, to, file_format, overwrite=overwrite)
    if as_json:
        show_json({"topic": topic, "records": count, "to": to, "as": file_format})
    else:
        show_line(f"replayed {plural(count, 'record')} of {topic} to {to}")


def frame_of(
    spark: "SparkSession",
    settings: Settings,
    topic: str,
    file_format: FileFormat,
    options: Mapping[str, str],
) -> "DataFrame":
    """Return the records between the positions in `options`, in the columns of the format."""
    from tidelog.storage.spark.topic_frame import read_topic

    s3_options = {"endpoint": settings.s3_endpoint, "region": settings.s3_region}
    if settings.s3.path_style is not None:
        s3_options["pathStyle"] = str(settings.s3.path_style)
    if file_format != "csv":
        s3_options["includeHeaders"] = "true"
    more_options = {name: text for name, text in s3_options.items() if text}
    return read_topic(spark, settings.store, topic, **options, **more_options)


def _check_topic(settings: Settings, topic: str) -> None:
    from tidelog.storage.read.offline_log import open_snapshot
    from tidelog.storage.store.blocking_store import OpenedStore

    with OpenedStore(settings.store, settings.s3) as opened_store:
        opened_store.run(open_snapshot(opened_store.store, SystemClock(), [topic]))


def _check_target(to: str, *, overwrite: bool) -> None:
    parts = urlsplit(to)
    if parts.scheme in {"", "file"} and not overwrite and Path(unquote(parts.path)).exists():
        raise CommandError(f"{to} already exists: give another folder, or --overwrite")


@contextlib.contextmanager
def _spark_errors(store_hint: str) -> Iterator[None]:
    """Raise errors of the log and of Spark as CommandErrors of one line."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise CommandError(f"{NO_SPARK} ({error})") from None
    try:
        with command_errors(store_hint):
            yield
    except (PySparkException, Py4JError) as error:
        raise CommandError(f"Spark: {_first_line(error)}") from None


@contextlib.contextmanager
def _target_errors(to: str) -> Iterator[None]:
    """Raise errors of Spark's JVM as CommandErrors that name the target and the root cause."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        raise CommandError(f"{to} cannot be written: {root_cause(str(error))}") from None


def root_cause(text: str) -> str:
    """Return the innermost cause in the text of a Java exception, without its class."""
    lines = [line.strip() for line in text.splitlines()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    inner = causes[-1].removeprefix("Caused by: ") if causes else "".join(lines[1:2])
    name, _, why = inner.removeprefix(": ").partition(": ")
    return why or name or lines[0]


@contextlib.contextmanager
def spark_session(
    name: str, master: str | None, settings: Mapping[str, str] | None = None
) -> Iterator["SparkSession"]:
    """Start a Spark session, and stop it at the end of the block.

    Raises CommandError if Spark does not start, usually because Java is missing.

    If stderr is no terminal, the session prints nothing. Without `master`, the session keeps the
    master of spark-submit, or, if spark-submit has not started the process, uses `local[*]`.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    set_worker_python(sys.executable)
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    if master is None and not is_submitted_to_spark():
        master = "local[*]"
    is_watched = sys.stderr.isatty()
    configs = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(is_watched).lower(),
        "spark.sql.session.timeZone": "UTC",
    }
    if master is not None and master.startswith("local"):
        configs |= dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1")
    builder = SparkSession.builder.appName(name).config(map={**configs, **(settings or {})})
    if master is not None:
        builder = builder.master(master)
    with tempfile.TemporaryFile() as printed:
        try:
            with contextlib.nullcontext() if is_watched else _stderr_to(printed.fileno()):
                spark = builder.getOrCreate()
        except PySparkException as error:
            printed.seek(0)
            lines = printed.read().decode(errors="replace").split("\n")
            why = next((line for line in reversed(lines) if line.strip()), "")
            raise CommandError(f"Spark does not start: {_first_line(error)} {why}") from None
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """Redirect stderr inside the block.

    A JVM that starts in the block keeps the redirected stderr. So the JVM's ten lines of start
    messages, and its later messages, do not reach the caller's stderr.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def write(frame: "DataFrame", to: str, file_format: FileFormat, *, overwrite: bool) -> int:
    """Write the records, count them in the same pass, and return the count."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    if file_format != "parquet":
        for name in ("key", "value"):
            frame = frame.withColumn(name, F.col(name).cast("string"))
    written = Observation()
    (
        frame.observe(written, F.count(F.lit(1)).alias("records"))
        .write.mode("overwrite" if overwrite else "errorifexists")
        .format(file_format)
        .options(**(_CSV_OPTIONS if file_format == "csv" else {}))
        .save(to)
    )
    return int(written.get["records"])


def positions(topic: str, start: str, until: str) -> dict[str, str]:
    """Return the options of the Spark source for the start and the end positions."""
    options: dict[str, str] = {}
    for text, prefix, default in ((start, "starting", "beginning"), (until, "ending", "end")):
        if text == default:
            continue
        place = text if text.startswith("{") else at_time(position(text, FORMS), now())
        if isinstance(place, dt.datetime):
            options[f"{prefix}Timestamp"] = str(max(0, int(place.timestamp() * 1000)))
            options["startingOffsetsByTimestampStrategy"] = "latest"
            continue
        if isinstance(place, PartitionOffsets):
            edges = {BEGINNING: -2, END: -1}
            offsets: Any = {
                str(number): offset if isinstance(offset, int) else edges[offset]
                for number, offset in place.of
            }
        else:
            offsets = _json_object(text)
        if not isinstance(offsets, dict):
            raise BadUsage(f"position {text!r}: expected {POSITIONS}")
        options[f"{prefix}Offsets"] = json.dumps(offsets if topic in offsets else {topic: offsets})
    return options


def _json_object(text: str) -> Any:
    """Return the value of the text as JSON, None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
