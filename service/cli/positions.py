"""Parse the positions and times that options of commands give as text."""

import datetime as dt

from tidelog.service.cli.results import BadUsage


def position(text: str) -> "str | int | dt.datetime":
    """Parse `beginning`, `end`, an offset, or `@` and a time."""
    if text in {"beginning", "end"}:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if text.startswith("@"):
        return parse_time(text)
    raise BadUsage(f"position {text!r}: expected beginning, end, an offset, or @ and an ISO time")


def parse_time(text: str) -> dt.datetime:
    """Parse `@` and an ISO time. A time without a zone is UTC. Raises BadUsage."""
    try:
        when = dt.datetime.fromisoformat(text[1:])
    except ValueError:
        raise BadUsage(
            f"{text!r} is not @ and an ISO 8601 time, for example @2026-01-31T12:00:00Z"
        ) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)
