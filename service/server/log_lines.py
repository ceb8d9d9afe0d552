"""Log lines on stderr: text, or one JSON event a line. Exit statuses of a broker.

An event has `time` (RFC 3339, UTC, ms), `level`, `logger`, `message` and `process`. An event of an
exception has `exception`, the traceback as one text. Each line of stderr is exactly one event.
"""

import datetime as dt
import logging
import sys
import traceback

import orjson

from tidelog.storage.core.errors import StoreUnfit, Unavailable

HUMAN = "%(asctime)s %(levelname)s %(name)s %(message)s"
FORMATS = ("human", "json")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
"""Exit statuses of a broker; `cli/results.py` adds those that only commands have."""
UNREACHABLE_ERRORS = (StoreUnfit, Unavailable)
"""Errors of the log with the status EXIT_UNREACHABLE, in a broker and in every command."""


class JsonFormatter(logging.Formatter):
    """Formatter that writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        event = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _whole(record.getMessage()),
            "process": record.process,
        }
        if record.exc_info:
            event["exception"] = _whole("".join(traceback.format_exception(*record.exc_info)))
        return orjson.dumps(event).decode()


def _whole(text: str) -> str:
    """Replace lone surrogates, which a client may have sent: JSON must be valid UTF-8."""
    return text.encode("utf-8", "replace").decode()


def log_to_stderr(level: str, form: str = "human") -> None:
    """Log tidelog at `level`, libraries at WARNING: at INFO the AWS SDK logs each credential
    source, and each of the two servers of a broker its start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(HUMAN))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(form == "json")
    logging.getLogger("tidelog").setLevel(level)


def last_words(message: str, form: str) -> None:
    """Write one line on stderr: the reason for the end of the process."""
    if form == "json":
        logging.getLogger("tidelog").critical("%s", message)
    else:
        sys.stderr.write(f"tidelog: {message}\n")
