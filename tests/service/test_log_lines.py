"""Log lines: for people, or one JSON event a line whatever is in it."""

import json
import logging
import sys
from typing import Any

import pytest

from tests.support.broker import tidelog
from tidelog.service.server.log_lines import JsonFormatter


def event(message: str, *args: object, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("tidelog.x", logging.WARNING, "f", 1, message, args, exc_info)
    record.created = 1_700_000_000.1234
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return dict(json.loads(line))


def test_event_has_time_level_and_message() -> None:
    said = event("%s of %d", "one", 2)
    assert said.pop("process") > 0
    assert said == {
        "time": "2023-11-14T22:13:20.123Z",
        "level": "warning",
        "logger": "tidelog.x",
        "message": "one of 2",
    }


@pytest.mark.parametrize("text", ["two\nlines", 'a "quote"', "\ud800 half", "\x00\x1b[31m"])
def test_whatever_message_holds_is_one_line(text: str) -> None:
    assert event("%s", text)["message"] == text.replace("\ud800", "?")


def test_fields_of_request_are_fields_of_its_event() -> None:
    record = logging.LogRecord("tidelog.http", logging.ERROR, "f", 1, "it failed", (), None)
    record.fields = {"request_id": "r-17", "topic": "\ud800t", "status": 503}
    said = json.loads(JsonFormatter().format(record))
    assert (said["request_id"], said["topic"], said["status"]) == ("r-17", "?t", 503)
    assert said["message"] == "it failed"


def test_traceback_is_part_of_its_event() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        said = event("bug", exc_info=sys.exc_info())
    assert said["exception"].startswith("Traceback")
    assert "two\nlines" in said["exception"]


def test_start_that_fails_is_event_too() -> None:
    done = tidelog("serve", "/dev/null/none", "--log-format", "json", "--port", "0", status=3)
    (line,) = done.stderr.decode().splitlines()
    said = json.loads(line)
    assert said["level"] == "critical"
    assert "/dev/null/none cannot be written" in said["message"]
