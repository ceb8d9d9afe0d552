"""One table: our error, its HTTP status and its 5-digit code (REST.md section 1.0).

Every error body of every dialect is `{"error_code": int, "message": str}`. An error that carries
`status` and `code` itself (a dialect's own refusal) wins over the table. Nothing that is not ours
is ever told to a client: an exception that nobody foresaw is logged whole and answered as a bare
500.
"""

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from service.http import JSON, JSON_V2, InvalidParameter, media_type
from storage.errors import (
    AssignedOtherwise,
    CommitUnknown,
    Corrupt,
    IdempotencyMismatch,
    InvalidRequest,
    LogError,
    MemberExists,
    NotAssigned,
    OffsetMetadataTooLarge,
    OffsetOutOfRange,
    RecordTooLarge,
    StaleCommit,
    Throttled,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)

log = logging.getLogger("tidelog.http")

MESSAGE_CHARS_MAX = 2000
"""Messages quote what was sent; an answer is never larger than what is worth reading (I10)."""
VALIDATION_ERRORS_TOLD_MAX = 3
INTERNAL_ERROR = (500, 50002, "internal error: the broker's log has the details")

_TABLE: Mapping[type[LogError], tuple[int, int]] = {
    LogError: (500, 50002),
    Corrupt: (500, 50002),
    InvalidRequest: (400, 40002),  # TopicExists and InvalidConfig with it
    OffsetOutOfRange: (400, 40002),
    RecordTooLarge: (413, 413),
    IdempotencyMismatch: (422, 422),
    OffsetMetadataTooLarge: (422, 422),
    MemberExists: (409, 40902),
    NotAssigned: (409, 40903),
    AssignedOtherwise: (409, 40903),
    StaleCommit: (409, 40903),  # ProducerFenced, OutOfOrderSequence, IllegalGeneration with it
    UnknownTopic: (404, 40401),
    UnknownPartition: (404, 40402),
    Throttled: (429, 42901),
    Unavailable: (503, 50302),
    CommitUnknown: (504, 50003),
}


class ErrorBody(BaseModel):
    """What every error looks like."""

    error_code: int = Field(
        examples=[40401], description="HTTP status, mostly with two digits more"
    )
    message: str = Field(examples=["topic 'flights' does not exist"])


def documented(said: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Errors by status, and when they come, as the API's documentation wants them."""
    return {
        status: {"model": ErrorBody, "description": description}
        for status, description in said.items()
    }


class TopicNotHosted(UnknownTopic):
    """The topic itself was asked for: Kafka's own words and another number than elsewhere."""

    status = 404
    code = 40403

    def __str__(self) -> str:
        return "This server does not host this topic-partition."


class NoSuchResource(LogError):
    """A resource of the v3 dialect that is neither a topic nor a partition."""

    status = 404
    code = 404


class CrossSite(LogError):
    """A page of another site has a browser of ours write here; nobody asked whoever sits at it."""

    status = 403
    code = 40301

    def __str__(self) -> str:
        return "a page of another site may not change anything here"


class ErrorAnswer(NamedTuple):
    """An error as HTTP says it; `headers` beside those of any answer."""

    status: int
    code: int
    message: str
    headers: dict[str, str]


def error_response(error: LogError) -> ErrorAnswer:
    """Status, code, message and further headers of one of our errors."""
    status, code = next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)
    status, code = getattr(error, "status", status), getattr(error, "code", code)
    message = str(error)
    headers: dict[str, str] = dict(getattr(error, "headers", {}))
    if isinstance(error, Throttled):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_ms / 1000), 1))
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    elif isinstance(error, CommitUnknown) and "outcome" not in message:
        message += "; outcome unknown, retry with the same Idempotency-Key"
    return ErrorAnswer(status, code, message, headers)


def error_body(code: int, message: str) -> bytes:
    """The body of any error. Never fails: lone surrogates that a client sent become `?`."""
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[:MESSAGE_CHARS_MAX] + "..."
    body = json.dumps({"error_code": code, "message": message}, ensure_ascii=False)
    return body.encode("utf-8", "replace")


def json_type(path: str) -> str:
    """The media type of JSON answers below `path`: the v2 dialect has one of its own."""
    is_v2 = path.startswith(("/topics", "/brokers", "/consumers", "/admin/"))
    return (JSON_V2 if is_v2 else JSON).decode()


def check_printable(parameter: str, text: str) -> None:
    """Raises InvalidParameter, as Redpanda says it, for control characters in a path's name."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Invalid parameter '{parameter}' got '{shown}'")


def check_printable_field(text: str) -> None:
    """The same for a name that came in a body."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Parameter contained invalid control characters: {shown}")


def _visible(text: str) -> str:
    """Control characters as their symbols: U+2400 + n, and U+2421 for delete."""
    if text.isprintable():
        return text
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 0x20 else "\u2421" if c == "\x7f" else c for c in text
    )


def add_handlers(app: FastAPI) -> None:
    """Answer with our bodies whatever goes wrong in a route, and before one is found."""
    app.add_exception_handler(LogError, _on_log_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_log_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LogError)
    _count(request, error)
    answer = error_response(error)
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("%s %s: %d: %s", request.method, request.url.path, answer.status, error)
    return _response(request, answer)


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    _count(request, error)
    told = error.errors()[:VALIDATION_ERRORS_TOLD_MAX]
    first: dict[str, Any] = told[0]
    if first["type"] == "json_invalid":
        why = f"the body is not JSON: {first['ctx']['error']} at {first['loc'][-1]}"
        return _response(request, ErrorAnswer(400, 400, why, {}))
    sent = media_type(request.headers.get("content-type", "").encode("latin-1")).decode("latin-1")
    if first["loc"] == ("body",) and isinstance(first["input"], bytes):
        why = f"HTTP 415 Unsupported Media Type: send application/json, not {sent!r}"
        return _response(request, ErrorAnswer(415, 415, why, {}))
    why = "; ".join(_in_words(each) for each in told)
    return _response(request, ErrorAnswer(422, 422, why, {}))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    _count(request, error)
    status = error.status_code
    message = error.detail
    if message == HTTPStatus(status).phrase:
        message = f"HTTP {status} {message}"
    return _response(request, ErrorAnswer(status, status, message, dict(error.headers or {})))


def _count(request: Request, error: Exception) -> None:
    counters = getattr(request.app.state, "counters", None)
    if counters is not None:
        counters.refused(error)


def _in_words(error: Mapping[str, Any]) -> str:
    """One line that names the field: `configs.0.name: ...`."""
    name = ".".join(str(part) for part in error["loc"][1:])
    if not name:
        is_absent = error["type"] == "missing"
        return "the body is missing" if is_absent else f"the body: {error['msg']}"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        return f"Unrecognized field: {name}"
    return f"{name}: {error['msg']}"


def _response(request: Request, answer: ErrorAnswer) -> Response:
    return Response(
        error_body(answer.code, answer.message),
        answer.status,
        headers=answer.headers,
        media_type=json_type(request.url.path),
    )
