"""Log lines on stderr: for people, or one JSON event a line for machines.

An event has `time` (RFC 3339, UTC, ms), `level`, `logger`, `message` and `process`, and where there
is one `exception`, the traceback as one text. Nothing else is ever on a line, nor any line without
an event.
"""

import datetime as dt
import logging
import sys
import traceback

import orjson

HUMAN = "%(asctime)s %(levelname)s %(name)s %(message)s"
FORMATS = ("human", "json")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

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
    """Without the halves of characters that a client may have sent."""
    return text.encode("utf-8", "replace").decode()


def log_to_stderr(level: str, form: str = "human") -> None:
    """Our lines at the level that is asked for; of the libraries (the SDK tells every credential
    that it finds) only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(HUMAN))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(form == "json")
    for name in ("tidelog", "uvicorn"):
        logging.getLogger(name).setLevel(level)


def last_words(message: str, form: str) -> None:
    """Why the process ends: one line, on stderr."""
    if form == "json":
        logging.getLogger("tidelog").critical("%s", message)
    else:
        sys.stderr.write(f"tidelog: {message}\n")
