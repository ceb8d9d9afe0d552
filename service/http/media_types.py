"""Media types of bodies and answers, the formats inside JSON, and the refusals of other types."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from tidelog.storage.core.errors import InvalidRequest

JSON_V2 = b"application/vnd.kafka.v2+json"
JSON = b"application/json"
JSON_V2_TYPES = (JSON_V2, b"application/vnd.kafka.v1+json", b"application/vnd.kafka+json", JSON)
"""The types of an `Accept` that JSON_V2 answers."""
ARROW = b"application/vnd.apache.arrow.stream"
NDJSON = b"application/x-ndjson"
EVENT_STREAM = b"text/event-stream"
EMBEDDED = ("json", "binary", "text")
"""Formats of keys and values inside JSON."""
SCHEMA_FORMATS = ("avro", "jsonschema", "protobuf")
"""Formats of keys and values that a schema registry describes. tidelog has no registry."""


class UnsupportedMediaType(InvalidRequest):
    """The route does not accept this Content-Type."""

    status = 415
    code = 415


class NotAcceptable(InvalidRequest):
    """The route produces no media type that the Accept header names."""

    status = 406
    code = 40601


def not_acceptable(accept: bytes, offered: str) -> NotAcceptable:
    """Return the error for an `Accept` that names none of the `offered` types."""
    return NotAcceptable(
        f"HTTP 406 Not Acceptable: ask for {offered}, not {accept.decode('latin-1')[:200]!r}"
    )


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


_ANY = (b"", b"*/*", b"application/*")


@lru_cache(maxsize=1024)
def is_served(accept: bytes, served: tuple[bytes, ...]) -> bool:
    """Whether an `Accept` names one of the `served` types."""
    return any(_is_served(part, served) for part in accept.split(b","))


def _is_served(part: bytes, served: tuple[bytes, ...]) -> bool:
    quality = part.replace(b" ", b"").lower().partition(b";q=")[2]
    if quality.rstrip(b"0.") == b"" and quality:
        return False
    kind = media_type(part)
    return kind in _ANY or kind in served


def check_instance_type(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType for a Content-Type that consumer instances do not take."""
    sent = headers.get(b"content-type", b"")
    if sent in (JSON_V2, b"", b"application/json"):
        return
    kind = media_type(sent)
    is_kafka = kind.startswith(b"application/vnd.kafka") and kind.endswith(b"json")
    if not is_kafka and kind not in (b"application/json", b"application/octet-stream"):
        raise UnsupportedMediaType(
            f"HTTP 415 Unsupported Media Type: send {JSON_V2.decode()}, "
            f"not {sent.decode('latin-1')!r}"
        )
