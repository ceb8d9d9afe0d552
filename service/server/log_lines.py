"""Log lines on stderr: text, or one JSON event per line.

A JSON event has `time` (RFC 3339, UTC, ms), `level`, `logger`, `message` and `process`. An event of
an exception also has `exception`, the traceback as one text. An event of the audit log also has
`audit`. A line about a request has its fields (service.http.errors, service.kafka.api_context):
`request_id`, `topic`, `error_code` and others. In JSON, each line of stderr is exactly one event.

Clients and a failing store can cause any number of lines. Lines of one kind are bounded, so that
they do not fill a disk. The next line of the kind has the number of lines that were left out.
"""

import datetime as dt
import logging
import sys
import traceback

import orjson

from tidelog.service.settings.telemetry import TelemetrySettings

HUMAN = "%(asctime)s %(levelname)s %(name)s %(message)s"

LINES_MAX, WINDOW_S = 20, 10.0
"""LINES_MAX lines of one kind pass in WINDOW_S seconds."""
KINDS_MAX = 1_000


class JsonFormatter(logging.Formatter):
    """Formatter that writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        timestamp = dt.datetime.fromtimestamp(record.created, dt.UTC)
        event = {
            "time": timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _whole(record.getMessage()),
            "process": record.process,
        }
        if (fields := getattr(record, "fields", None)) is not None:
            texts = {
                name: _whole(value) for name, value in fields.items() if isinstance(value, str)
            }
            event |= fields | texts
        if (audit := getattr(record, "audit", None)) is not None:
            event |= {"message": audit["event"], "audit": audit}
        if record.exc_info:
            event["exception"] = _whole("".join(traceback.format_exception(*record.exc_info)))
        return orjson.dumps(event).decode()


def _whole(text: str) -> str:
    """Replace lone surrogates, which a client may have sent, because JSON must be valid UTF-8."""
    return text.encode("utf-8", "replace").decode()


class Bounded(logging.Filter):
    """A filter that lets LINES_MAX lines of one kind pass in WINDOW_S.

    A kind is a logger and a message without its values. Lines with a traceback always pass. Lines
    of the audit log do, too, because the audit log has its own bound.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, object], list[float]] = {}
        """For each kind: start of the window, lines in it, and lines left out since a line
        passed."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or hasattr(record, "audit"):
            return True
        now_s, kind = record.created, (record.name, record.msg)
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        counts = self._kinds.setdefault(kind, [now_s, 0, 0])
        if not 0 <= now_s - counts[0] < WINDOW_S:
            counts[0], counts[1] = now_s, 0
        counts[1] += 1
        if counts[1] > LINES_MAX:
            counts[2] += 1
            return False
        if counts[2]:
            text = f"{record.getMessage()} ({counts[2]:.0f} more lines of this kind were left out)"
            record.msg, record.args, counts[2] = text, (), 0
        return True


def log_to_stderr(settings: TelemetrySettings) -> None:
    """Log tidelog at `log_level`, and libraries at WARNING.

    At INFO, the AWS SDK logs each credential source, and the two servers of a broker log their
    start.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Bounded())
    is_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(HUMAN))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(is_json)
    logging.getLogger("tidelog").setLevel(settings.log_level.upper())


def log_failure(message: str, form: str) -> None:
    """Write to stderr, as one line, why the process ends."""
    if form == "json":
        logging.getLogger("tidelog").critical("%s", message)
    else:
        sys.stderr.write(f"tidelog: {message}\n")
