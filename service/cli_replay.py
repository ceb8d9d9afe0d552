"""`tidelog replay`: a topic's records from the store to files, by Spark, without a broker."""

import datetime as dt
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

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
from service.settings import BadSettings, Settings, load, set_worker_python
from storage.errors import LogError, StoreUnfit, Unavailable, UnknownPartition, UnknownTopic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POSITIONS = (
    'beginning, end, @ an ISO time, or JSON that names every partition: \'{"0": 17, "1": -1}\', '
    "where -2 is the beginning, -1 the end"
)


class FileFormat(StrEnum):
    """What Spark writes."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"


def replay(  # noqa: PLR0913 - a command's options are its arguments
    topic: TopicArgument,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="folder or URL to write to")],
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="that of `tidelog serve` (TIDELOG_STORE)"),
    ] = None,
    file_format: Annotated[
        FileFormat, typer.Option("--as", help="json and csv: key and value as text")
    ] = FileFormat.PARQUET,
    start: Annotated[
        str, typer.Option("--from", metavar="POSITION", help=POSITIONS)
    ] = "beginning",
    until: Annotated[
        str, typer.Option("--until", metavar="POSITION", help="the same: the first left out")
    ] = "end",
    master: Annotated[str, typer.Option(metavar="URL", help="Spark master")] = "local[*]",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace what is in the folder")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a topic's records to files, with Spark, from the store alone.

    No broker takes part. What is sealed is read as Parquet, the tail from the WAL, as of now.
    """
    options = _positions(topic, start, until)
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
    master: str,
    *,
    overwrite: bool,
) -> int:
    set_worker_python(sys.executable)
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from storage.spark_native import read_topic
    except ImportError as error:
        raise CommandError(f"no Spark here: pip install 'tidelog[spark]' ({error})") from None
    if settings.s3_endpoint:
        options["endpoint"] = settings.s3_endpoint
    if settings.s3_region:
        options["region"] = settings.s3_region
    if settings.s3.path_style is not None:
        options["pathStyle"] = str(settings.s3.path_style)
    if file_format is not FileFormat.CSV:
        options["includeHeaders"] = "true"
    try:
        spark = _session(master)
        try:
            frame = read_topic(spark, settings.store, topic, **options)
            return _write(frame, to, file_format, overwrite=overwrite)
        finally:
            spark.stop()
    except (UnknownTopic, UnknownPartition) as error:
        raise NotThere(str(error)) from None
    except (StoreUnfit, Unavailable) as error:
        raise NotReachable(str(error)) from None
    except LogError as error:
        raise CommandError(str(error)) from None
    except (PySparkException, Py4JError) as error:
        raise CommandError(f"Spark: {_first_line(error)}") from None


def _session(master: str) -> "SparkSession":
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(master)
        .appName("tidelog replay")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _write(frame: "DataFrame", to: str, file_format: FileFormat, *, overwrite: bool) -> int:
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
        .options(**({"header": "true"} if file_format is FileFormat.CSV else {}))
        .save(to)
    )
    return int(written.get["records"])


def _positions(topic: str, start: str, until: str) -> dict[str, str]:
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
        options[f"{prefix}Offsets"] = json.dumps(
            offsets if topic in offsets else {topic: offsets}
        )
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
