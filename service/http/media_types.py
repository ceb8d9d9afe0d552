"""Media types of bodies and answers, the formats inside JSON, and the refusals of other types."""

from collections.abc import Iterable

from tidelog.storage.core.errors import InvalidRequest

JSON_V2 = b"application/vnd.kafka.v2+json"
JSON = b"application/json"
ARROW = b"application/vnd.apache.arrow.stream"
NDJSON = b"application/x-ndjson"
EVENT_STREAM = b"text/event-stream"
EMBEDDED = ("json", "binary", "text")
"""Formats of keys and values inside JSON."""
SCHEMA_FORMATS = ("avro", "jsonschema", "protobuf")
"""Formats that need a schema registry, which no cluster has."""


class UnsupportedMediaType(InvalidRequest):
    """The route does not accept this Content-Type."""

    status = 415
    code = 415


class NotAcceptable(InvalidRequest):
    """The route produces no media type that the Accept header names."""

    status = 406
    code = 40601


def types_of_formats(formats: Iterable[str]) -> dict[bytes, str]:
    """Return the formats by their media types, in all versions."""
    return {
        f"application/vnd.kafka.{name}{version}+json".encode(): name
        for name in formats
        for version in (".v2", ".v1", "")
    }


def media_type(header: bytes) -> bytes:
    """Return the media type without parameters, in lower case."""
    return header.partition(b";")[0].strip().lower()
