"""The formats of answers with records, as requests name them: `Accept`, `format=`, `on_error=`."""

from tidelog.service.formats.pages import ON_ERROR, OnError
from tidelog.service.http.media_types import (
    ARROW,
    EMBEDDED,
    EVENT_STREAM,
    JSON_V2,
    NDJSON,
    NotAcceptable,
    media_type,
    types_of_formats,
)
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter

FETCH_FORMATS: dict[bytes, str] = {
    b"": "binary",
    b"*/*": "binary",
    b"application/*": "binary",
    JSON_V2: "binary",
    b"application/json": "binary",
    b"application/vnd.kafka.v1+json": "binary",
    b"application/vnd.kafka+json": "binary",
    ARROW: "arrow",
    NDJSON: "ndjson",
    EVENT_STREAM: "sse",
    **types_of_formats(EMBEDDED),
}
MEDIA_TYPES: dict[str, bytes] = {
    **{name: f"application/vnd.kafka.{name}.v2+json".encode() for name in EMBEDDED},
    "arrow": ARROW,
    "ndjson": NDJSON,
    "sse": EVENT_STREAM,
}


def format_of_accept(accept: bytes) -> str:
    """Return the format of an answer with records. Raises NotAcceptable."""
    for part in accept.split(b",") if b"," in accept else (accept,):
        found = FETCH_FORMATS.get(media_type(part))
        if found is not None:
            return found
    raise NotAcceptable(f"HTTP 406 Not Acceptable: {accept.decode('latin-1')}")


def embedded_format(query: dict[str, str], format_name: str) -> str:
    """Return the format of keys and values: the format itself, or `format=` for lines and events.
    Raises InvalidParameter."""
    if format_name in EMBEDDED:
        return format_name
    embedded = query.get("format", "json")
    if embedded not in EMBEDDED:
        raise InvalidParameter(f"parameter format={embedded!r} must be json, binary or text")
    return embedded


def on_error_of(query: dict[str, str]) -> OnError | None:
    """Return the parameter `on_error`; None if it is not given. Raises InvalidParameter."""
    text = query.get("on_error")
    if text is None or text in ON_ERROR:
        return text
    raise InvalidParameter(
        f"parameter on_error={text[:SHOWN_MAX]!r} must be {', '.join(ON_ERROR[:-1])} or "
        f"{ON_ERROR[-1]}"
    )
