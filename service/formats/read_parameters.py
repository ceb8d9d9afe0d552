"""Parameters of all reads (formats, `on_error`, `reset`), documentation of a record. Pure."""

from typing import Any

import msgspec

from tidelog.service.formats import json_out
from tidelog.service.formats.record_pages import ON_ERROR, OnError
from tidelog.service.http.media_types import (
    ARROW,
    EMBEDDED,
    EVENT_STREAM,
    JSON_V2,
    NDJSON,
    SCHEMA_FORMATS,
    media_type,
    not_acceptable,
    types_of_formats,
)
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.route import Answer, Content, Parameter
from tidelog.storage.codec.chunk import RECORDS_MAX

RESETS = ("none", "earliest", "latest")
READ_FORMATS = (*EMBEDDED, *SCHEMA_FORMATS)
"""Formats of answers that are a JSON array."""
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
    **types_of_formats(READ_FORMATS),
}
OFFERED = (
    "application/vnd.kafka.json.v2+json (keys and values as JSON), the same with .text or .binary "
    "(base64) in place of .json, application/vnd.apache.arrow.stream, application/x-ndjson or "
    "text/event-stream"
)
"""The usual types, for the message of a refusal; the formats of schema registries are not named."""
FRAMINGS: dict[str, json_out.Framing] = {"ndjson": "ndjson", "sse": "sse"}
"""Framings of the formats that are not JSON arrays."""
MEDIA_TYPES: dict[str, bytes] = {
    **{name: f"application/vnd.kafka.{name}.v2+json".encode() for name in READ_FORMATS},
    "arrow": ARROW,
    "ndjson": NDJSON,
    "sse": EVENT_STREAM,
}


def format_of_accept(accept: bytes) -> str:
    """Return the format of the answer for an `Accept`. Raises NotAcceptable."""
    for part in accept.split(b",") if b"," in accept else (accept,):
        format_name = FETCH_FORMATS.get(media_type(part))
        if format_name is not None:
            return format_name
    raise not_acceptable(accept, OFFERED)


def embedded_format(query: dict[str, str], format_name: str) -> str:
    """Return the format of keys and values.

    For lines and events, it is the parameter `format`. For a JSON array, it is the format of the
    answer. Raises InvalidParameter.
    """
    if format_name in READ_FORMATS:
        return format_name
    embedded = query.get("format", "json")
    if embedded not in EMBEDDED:
        raise InvalidParameter(f"parameter format={embedded!r} must be json, binary or text")
    return embedded


def on_error_of(query: dict[str, str]) -> OnError | None:
    """Return the parameter `on_error`. If it is not given, return None. Raises InvalidParameter."""
    text = query.get("on_error")
    if text is None or text in ON_ERROR:
        return text
    raise InvalidParameter(
        f"parameter on_error={text[:SHOWN_MAX]!r} must be {', '.join(ON_ERROR[:-1])} or "
        f"{ON_ERROR[-1]}"
    )


def reset_of(query: dict[str, str]) -> str:
    """Return the parameter `reset`. Raises InvalidParameter."""
    text = query.get("reset", "none")
    if text not in RESETS:
        raise InvalidParameter(
            f"parameter reset={text[:SHOWN_MAX]!r} must be one of {', '.join(RESETS)}"
        )
    return text


# -- documentation

ON_ERROR_PARAMETER = Parameter(
    "on_error",
    "what to do with a record that does not decode: `stop` before it, `skip` it, or return it "
    "`raw` (base64 in a field of its own)",
    {"type": "string", "enum": list(ON_ERROR), "default": "stop"},
)
RESET_PARAMETER = Parameter(
    "reset",
    "what to do if the offset of a stream (events, or lines with `follow`) is out of range: with "
    "`earliest` or `latest`, send an event `reset` and continue there; with `none`, answer with an "
    "error",
    {"type": "string", "enum": list(RESETS), "default": "none"},
)
FORMAT_PARAMETER = Parameter(
    "format",
    "format of keys and values in lines and events: json, binary or text",
    {"type": "string", "default": "json"},
)
MAX_BYTES_PARAMETER = Parameter(
    "max_bytes",
    "maximum bytes of the returned records: key, value, headers, and 24 for each record. The first "
    "record is returned even if it is larger. If they have more than 1 MiB, the answer ends before "
    "it may have more than `fetch_bytes_max` bytes",
    {"type": "integer"},
)
MAX_RECORDS_PARAMETER = Parameter(
    "max_records",
    "maximum records in the answer",
    {"type": "integer", "default": RECORDS_MAX, "maximum": RECORDS_MAX},
)
ON_ERROR_HEADERS = (
    "If records do not decode, the answer has headers. With `skip`, `Tidelog-Skipped` is the "
    "number of skipped records, and `Tidelog-First-Skipped` is the first of them "
    "(`TOPIC-PARTITION@OFFSET`). With `stop`, `Tidelog-Undecodable` is a record that does not "
    "decode. The answer has the records of its partition before it, and no later ones."
)


class FetchedRecord(msgspec.Struct):
    """One record.

    `key` and `value` are JSON, or strings with base64 or text. In formats avro, jsonschema and
    protobuf, `key` is base64 or null, and `value` is null.

    In format json, `key_format` is `text` if the key is text but not JSON. With `on_error=raw`, a
    key or value that does not decode is null, and `key_base64` or `value_base64` has its bytes.
    """

    topic: str
    key: Any
    value: Any
    partition: int
    offset: int
    timestamp: int
    headers: list[dict[str, str | None]] = []
    key_format: str | None = None
    key_base64: str | None = None
    value_base64: str | None = None


def records_answer(description: str) -> Answer:
    """Return the documentation of a response with records, in every format."""
    example = {
        "topic": "flights",
        "key": "N14228",
        "value": {"delay": 2},
        "partition": 0,
        "offset": 42,
        "timestamp": 1357034400000,
    }
    json_types = tuple(MEDIA_TYPES[name] for name in READ_FORMATS)
    return Answer(
        description,
        (
            Content(json_types, (list[FetchedRecord],), [example]),
            Content((ARROW, NDJSON, EVENT_STREAM)),
        ),
    )
