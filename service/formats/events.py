"""Streams of followers: event ids, and the events (`sse`) and lines (NDJSON) that are no records.

The event id of a follower of one partition is the offset of the last record. The event id of a
follower of a topic is a vector with the offset of the last record of each partition, such as
`0:12,1:-1,2:7`. There, -1 means that the partition had no record.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tidelog.service.formats.json_text import Undecodable
from tidelog.service.formats.record_pages import RecordPage
from tidelog.storage.core.errors import LogError, OffsetOutOfRange
from tidelog.storage.core.model import OFFSET_MAX

KEEPALIVE = {"sse": b": keep-alive\n\n", "ndjson": b"\n"}
"""Messages that a stream sends while it has no records. Readers of NDJSON skip an empty line."""
RETRY_MS = 500
"""Time after which an EventSource connects again. The default of browsers is some seconds."""
START = "start"
"""The event id of a client that continues at offset 0, because an id cannot be -1."""
PIECE_BYTES = 64 * 1024
"""Approximate size of a piece. A page with vectors is built and sent in pieces (I10)."""
EVENT_BYTES_MIN = 80
"""Bytes of the smallest event of a record, without its id."""
VECTOR_PARTITIONS_MAX = 256
"""Maximum partitions in a vector, because proxies refuse a header `Last-Event-ID` of more than 8
KiB."""
VECTOR_CHARS_MAX = VECTOR_PARTITIONS_MAX * len(f"{VECTOR_PARTITIONS_MAX}:{OFFSET_MAX},")
"""Bound of the text of a vector. `parse_vector` refuses a longer text before it parses the text."""
_PAIR = re.compile(r"([0-9]{1,3}):(-1|[0-9]{1,19})")


def beginning(offset: int) -> bytes:
    """Return the first event of a stream: an id without data.

    A client that loses the connection before the first record continues at this offset. Without the
    id, the client would continue at the offset that is `latest` when it connects again.
    """
    return beginning_with(_id_before(offset))


def beginning_with(event_id: bytes) -> bytes:
    """Return the first event of a stream, with this id."""
    return b"retry: %d\nid: %b\n\n" % (RETRY_MS, event_id)


def reset(format_name: str, error: OffsetOutOfRange, reset_to: str) -> tuple[int, bytes]:
    """Return where a follower continues after OffsetOutOfRange, and the event that says so.

    `reset_to` is earliest or latest.
    """
    offset = error.log_start_offset if reset_to == "earliest" else error.high_watermark
    data = {"type": "reset", "requested_offset": error.offset, "offset": offset}
    return offset, notice(format_name, "reset", data, _id_before(offset))


def skipped(format_name: str, next_offset: int, page: RecordPage) -> bytes:
    """Return the event that follows a page with skipped records (`on_error=skip`)."""
    data = {"skipped": page.skipped, "first_skipped_offset": page.first_wrong}
    return notice(format_name, "skipped", data, b"%d" % (next_offset - 1))


def notice(format_name: str, kind: str, data: Any, event_id: bytes = b"") -> bytes:
    """Return an event, or a line, that is not a record.

    If the event has an id, a client that connects again with this id continues after the event.
    """
    body = msgspec.json.encode(data)
    if format_name != "sse":
        return body + b"\n"
    head = b"id: %b\n" % event_id if event_id else b""
    return b"%bevent: %b\ndata: %b\n\n" % (head, kind.encode(), body)


def failure(format_name: str, error: LogError, body: bytes, event_id: bytes = b"") -> bytes:
    """Return the last event, or the last line, of a stream that ends with an error.

    `body` is the body of the error. For an Undecodable, `event_id` is the id of the record that
    does not decode, so an EventSource that connects again continues after this record.
    """
    body = b'{"type":"error",' + body[1:]
    if format_name != "sse":
        return body + b"\n"
    if isinstance(error, Undecodable):
        return b"id: %b\nevent: undecodable\ndata: %b\n\n" % (event_id, body)
    # Not `error`, because a browser itself sends an event `error` when the connection ends.
    return b"event: tidelog-error\ndata: %b\n\n" % body


def _id_before(offset: int) -> bytes:
    """Return the event id of a client that continues with this offset."""
    return b"%d" % (offset - 1) if offset else START.encode()


# -- of a topic


def vector(offsets: Sequence[int]) -> bytes:
    """Return the event id of a client that continues with these offsets, one for each partition."""
    return b",".join(pairs(offsets))


def pairs(offsets: Sequence[int]) -> list[bytes]:
    """Return the parts of a vector, one for each partition."""
    return [pair(number, offset) for number, offset in enumerate(offsets)]


def pair(partition: int, offset: int) -> bytes:
    """Return the part of a vector for a partition whose next offset is `offset`."""
    return b"%d:%d" % (partition, offset - 1)


def parse_vector(text: str) -> dict[int, int] | None:
    """Return the next offset of each partition in an event id.

    If the text is not such an id, return None. This takes less than 1 ms for any text.
    """
    if len(text) > VECTOR_CHARS_MAX:
        return None
    offset_by_partition: dict[int, int] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part)
        if match is None:
            return None
        number, offset = int(match[1]), int(match[2]) + 1
        if number in offset_by_partition or offset > OFFSET_MAX:
            return None
        offset_by_partition[number] = offset
    return offset_by_partition


def with_vectors(body: bytes, vector: Sequence[bytes], partition: int) -> Iterator[bytes]:
    """Iterate over the events of a page of one partition, in pieces, with vectors as ids.

    `vector` has the parts of the vector before the page. In `body`, each event has one line with
    its id and one line with its record.
    """
    id_start = b",".join([*vector[:partition], b"%d:" % partition])
    id_end = b",".join([b"", *vector[partition + 1 :]])
    step = PIECE_BYTES * EVENT_BYTES_MIN // (EVENT_BYTES_MIN + len(id_start) + len(id_end))
    start = 0
    while start < len(body):
        end = body.find(b"\n\n", start + step) + 2
        end = end if end > 1 else len(body)
        piece = body[start:end].replace(b"\n\nid: ", b"\n\nid: " + id_start)
        piece = piece.replace(b"\ndata: ", id_end + b"\ndata: ")
        yield b"id: " + id_start + piece.removeprefix(b"id: ")
        start = end
