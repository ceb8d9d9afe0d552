"""Log lines on stderr: text, or one JSON event a line. Exit statuses of a broker.

An event has `time` (RFC 3339, UTC, ms), `level`, `logger`, `message` and `process`. An event of an
exception has `exception`, the traceback as one text; one of the audit log has `audit`. Each line of
stderr is exactly one event.

Clients and a store that fails can cause any number of lines, so lines of one kind are bounded: a
disk must not be full of them. The next line of the kind has the count of the others.
"""

import datetime as dt
import logging
import sys
import traceback

import orjson

from tidelog.storage.core.errors import StoreUnfit, Unavailable

HUMAN = "%(asctime)s %(levelname)s %(name)s %(message)s"
FORMATS = ("human", "json")

LINES_MAX, WINDOW_S = 20, 10.0
"""Lines of one kind in so many seconds."""
KINDS_MAX = 1_000

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
        if (audit := getattr(record, "audit", None)) is not None:
            event |= {"message": audit["event"], "audit": audit}
        if record.exc_info:
            event["exception"] = _whole("".join(traceback.format_exception(*record.exc_info)))
        return orjson.dumps(event).decode()


def _whole(text: str) -> str:
    """Replace lone surrogates, which a client may have sent: JSON must be valid UTF-8."""
    return text.encode("utf-8", "replace").decode()


class Bounded(logging.Filter):
    """Lets LINES_MAX lines of one kind pass in WINDOW_S; a kind is a logger and a message without
    its values. Errors with a traceback pass, and the audit log, which has a bound of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, object], list[float]] = {}
        """Start of the window, lines that passed in it, lines left out since the last one."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or hasattr(record, "audit"):
            return True
        now_s, kind = record.created, (record.name, record.msg)
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        seen = self._kinds.setdefault(kind, [now_s, 0, 0])
        if not 0 <= now_s - seen[0] < WINDOW_S:
            seen[0], seen[1] = now_s, 0
        seen[1] += 1
        if seen[1] > LINES_MAX:
            seen[2] += 1
            return False
        if seen[2]:
            text = f"{record.getMessage()} ({seen[2]:.0f} more lines of this kind were left out)"
            record.msg, record.args, seen[2] = text, (), 0
        return True


def log_to_stderr(level: str, form: str = "human") -> None:
    """Log tidelog at `level`, libraries at WARNING: at INFO the AWS SDK logs each credential
    source, and each of the two servers of a broker its start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Bounded())
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
