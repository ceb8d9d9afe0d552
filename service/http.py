"""What a hot handler needs of HTTP and no more: a call's headers, query and body, and its
answer."""

import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from storage.errors import InvalidRequest, RecordTooLarge

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON_V2 = b"application/vnd.kafka.v2+json"
JSON = b"application/json"
ARROW = b"application/vnd.apache.arrow.stream"
NDJSON = b"application/x-ndjson"
EVENT_STREAM = b"text/event-stream"
SHOWN_MAX = 100
"""Characters of a refused parameter that the refusal shows."""
DIGITS_MAX = 18
"""Of a length: `int` takes its time for thousands, and then raises."""
_INTEGER = re.compile(r"-?[0-9]{1,19}")
"""What `int` takes beyond that (`1_0`, blanks, other scripts' digits) is nobody's intention."""


class InvalidParameter(InvalidRequest):
    """A query parameter or header that cannot be used."""

    status = 400
    code = 40002


class UnsupportedMediaType(InvalidRequest):
    """The Content-Type is none that this route takes."""

    status = 415
    code = 415


class NotAcceptable(InvalidRequest):
    """The Accept header names nothing that this route gives."""

    status = 406
    code = 40601


class IncompleteBody(InvalidRequest):
    """The client went away in the middle of its body: what came is not what it meant."""

    status = 400
    code = 400


class Answer(NamedTuple):
    """A whole response."""

    status: int
    body: bytes
    media_type: bytes = JSON_V2
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Call:
    """One request being served."""

    __slots__ = ("body_bytes", "headers", "receive", "scope", "send", "status", "waited_s")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.body_bytes = 0
        self.status = 0
        self.waited_s = 0.0
        """For new records, or in a stream: not counted as time that an answer took."""

    def query(self) -> dict[str, str]:
        """The query's parameters; the last of a repeated one wins."""
        raw: bytes = self.scope["query_string"]
        if not raw:
            return {}
        text = raw.decode("latin-1")
        if "%" in text or "+" in text:
            return dict(parse_qsl(text, keep_blank_values=True))
        parts = (part.partition("=") for part in text.split("&") if part)
        return {name: value for name, _, value in parts}

    async def body(self, bytes_max: int) -> bytes:
        """The whole body. Raises RecordTooLarge without reading more than the bound (I10), and
        IncompleteBody: the first half of an Arrow stream is a stream, too."""
        declared = self.headers.get(b"content-length")
        if declared is not None and declared.isdigit():
            size = int(declared) if len(declared) <= DIGITS_MAX else sys.maxsize
            if size > bytes_max:
                raise _too_large(size, bytes_max)
        message = await self.receive()
        body = _piece(message)
        if message.get("more_body"):
            parts = [body]
            size = len(body)
            while message.get("more_body"):
                message = await self.receive()
                parts.append(_piece(message))
                size += len(parts[-1])
                if size > bytes_max:
                    raise _too_large(size, bytes_max)
            body = b"".join(parts)
        elif len(body) > bytes_max:
            raise _too_large(len(body), bytes_max)
        self.body_bytes = len(body)
        return body

    async def answer(self, answer: Answer) -> None:
        self.status = answer.status
        headers = list(answer.headers)
        if answer.status != HTTPStatus.NO_CONTENT:
            headers.append((b"content-type", answer.media_type))
            headers.append((b"content-length", b"%d" % len(answer.body)))
        await self.send(
            {"type": "http.response.start", "status": answer.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": answer.body})

    async def until_delivered(self) -> None:
        """Whoever has sent an answer here has sent it to the client; elsewhere see
        service.group_forwarding."""

    async def start_stream(
        self, media_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Begin a response of unknown length; `chunk` continues and `end` ends it."""
        self.status = 200
        start = [(b"content-type", media_type), (b"cache-control", b"no-store"), *headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": start})

    async def chunk(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


def integer(name: str, text: str, low: int, high: int) -> int:
    """A query parameter's whole number; raises InvalidParameter that says what would be right."""
    if not _INTEGER.fullmatch(text):
        raise InvalidParameter(f"parameter {name}={text[:SHOWN_MAX]!r} is not a whole number")
    value = int(text)
    if not low <= value <= high:
        raise InvalidParameter(f"parameter {name}={value} must be {low} to {high}")
    return value


def media_type(header: bytes) -> bytes:
    """The media type without parameters, lower case."""
    return header.partition(b";")[0].strip().lower()


def _piece(message: MutableMapping[str, Any]) -> bytes:
    """The bytes of the body that a message brings."""
    if message["type"] == "http.disconnect":
        raise IncompleteBody("the client went away before its request was whole")
    piece: bytes = message.get("body", b"")
    return piece


def _too_large(size: int, bytes_max: int) -> RecordTooLarge:
    return RecordTooLarge(f"request body of {size} bytes or more is over the limit of {bytes_max}")
