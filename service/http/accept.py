"""The Accept header of requests that change something.

If no answer in a requested type can be served, a request is refused with 406 before it acts. A GET
with an unknown Accept is served, as RFC 9110 allows. Only routes with several formats refuse it.
"""

from functools import lru_cache

from tidelog.service.http.media_types import (
    ARROW,
    EVENT_STREAM,
    JSON,
    NDJSON,
    NotAcceptable,
    media_type,
)

_SERVED = frozenset({b"", b"*/*", b"application/*", JSON, ARROW, NDJSON, EVENT_STREAM})


def check_accept(accept: bytes) -> None:
    """Raise NotAcceptable unless some route serves one of the types. Any route counts, because a
    client of Arrow or NDJSON may send its Accept with every request."""
    if not is_served(accept):
        raise NotAcceptable(f"HTTP 406 Not Acceptable: {accept.decode('latin-1')[:200]}")


@lru_cache(maxsize=1024)
def is_served(accept: bytes) -> bool:
    return any(_is_served(part) for part in accept.split(b","))


def _is_served(part: bytes) -> bool:
    kind = media_type(part)
    quality = part.replace(b" ", b"").lower().partition(b";q=")[2]
    if quality.rstrip(b"0.") == b"" and quality:
        return False
    return kind in _SERVED or (kind.startswith(b"application/vnd.kafka") and kind.endswith(b"json"))
