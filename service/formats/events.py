"""Lines and events of followers, beside the records: server-sent events (`sse`) and NDJSON."""

import msgspec

from tidelog.service.formats.pages import Page
from tidelog.storage.core.errors import OffsetOutOfRange

KEEPALIVE = {"sse": b": keep-alive\n\n", "ndjson": b"\n"}
"""Signs of life. JSON's readers of lines pass an empty one."""
RETRY_MS = 500
"""How soon an EventSource connects again. Its own pause is some seconds."""
START = "start"
"""The event id before offset 0: an id cannot be negative."""


def beginning(offset: int) -> bytes:
    """Return the first event of a stream: an id without data. A client that loses the connection
    before the first record continues at this offset, not at what is `latest` then."""
    return b"retry: %d\nid: %b\n\n" % (RETRY_MS, _id_before(offset))


def reset(format_name: str, error: OffsetOutOfRange, where: str) -> tuple[int, bytes]:
    """Return where a follower continues whose offset is out of range, and the event for that.
    `where`: earliest or latest."""
    offset = error.log_start_offset if where == "earliest" else error.high_watermark
    data = {"type": "reset", "requested_offset": error.offset, "offset": offset}
    body = msgspec.json.encode(data)
    if format_name == "sse":
        return offset, b"id: %b\nevent: reset\ndata: %b\n\n" % (_id_before(offset), body)
    return offset, body + b"\n"


def skipped(format_name: str, next_offset: int, page: Page) -> bytes:
    """Return the event behind a page whose records did not all decode (`on_error=skip`)."""
    body = msgspec.json.encode({"skipped": page.skipped, "first_skipped_offset": page.first_wrong})
    if format_name == "sse":
        return b"id: %d\nevent: skipped\ndata: %b\n\n" % (next_offset - 1, body)
    return body + b"\n"


def _id_before(offset: int) -> bytes:
    """Return the event id of a client that continues with this offset."""
    return b"%d" % (offset - 1) if offset else START.encode()
