"""CORS: pages of other origins that may use the API, by the setting `cors_origins`.

No answer allows credentials such as cookies. So a page of another origin cannot use the console's
session, and must send a key of its own. Pure, except `exposing`.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from tidelog.service.http.request import Send

ANY = "*"
MAX_AGE_S = 600
_HEADERS = (
    b"Accept, Authorization, Content-Encoding, Content-Type, Idempotency-Key, Last-Event-ID, "
    b"Linger, X-Request-Id"
)
"""Allowed headers of a request. `Tidelog-Console` is left out, because it proves that the page is
of this broker's own origin."""


class Cors:
    """The allowed origins of one broker. A broker without allowed origins has no Cors object."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in origins)

    def allows(self, origin: bytes) -> bool:
        """Return whether pages of this origin (the header's value) may use the API."""
        return origin in self._origins or ANY.encode() in self._origins

    def origin(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the origin of the page that sends the request if it is allowed, else nothing."""
        origin = headers.get(b"origin", b"")
        return origin if origin and self.allows(origin) else b""

    def preflight(self, origin: bytes, methods: Iterable[str]) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of the answer to a preflight request for a path."""
        return (
            *_allowed(origin),
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        )


def exposing(send: Send, origin: bytes) -> Send:
    """Return a `send` whose answers a page of this origin may read."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *_allowed(origin)]
            headers.append((b"access-control-expose-headers", b"*"))
            message = {**message, "headers": headers}
        await send(message)

    return sending


def _allowed(origin: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return (b"access-control-allow-origin", origin), (b"vary", b"Origin")
