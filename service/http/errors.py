"""From an error to an HTTP response: one table of statuses and 5-digit codes, and one function.

Every error body of every dialect is `{"error_code": int, "message": str}` (DIALECTS.md lists the
codes). An error class with its own `status` and `code` (a dialect's own error) takes precedence
over the table. `answered` is the only way from an error to a response: it counts the error, and it
logs damage and bugs. A client gets no text of an unexpected exception, only a bare 500.
"""

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tidelog.service.http.call import HttpResponse, InvalidParameter, Scope
from tidelog.service.http.route import media_type_of_errors
from tidelog.storage.core.errors import (
    AssignedOtherwise,
    CommitUnknown,
    Corrupt,
    IdempotencyMismatch,
    InvalidRequest,
    InvalidTimestamp,
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
"""Messages quote requests; this bounds the response (I10)."""
VALIDATION_ERRORS_MAX = 3
"""Errors of one body that the message names."""
INTERNAL_ERROR = (500, 50002, "internal error: the broker's log has the details")
UNKNOWN = "outcome unknown, retry with the same Idempotency-Key"

_TABLE: Mapping[type[LogError], tuple[int, int]] = {
    LogError: (500, 50002),
    Corrupt: (500, 50002),
    InvalidRequest: (400, 40002),  # TopicExists and InvalidConfig with it
    OffsetOutOfRange: (400, 40002),
    RecordTooLarge: (413, 413),
    InvalidTimestamp: (422, 422),
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
    """The body of every error."""

    error_code: int = Field(
        examples=[40401], description="HTTP status, mostly with two digits more"
    )
    message: str = Field(examples=["topic 'flights' does not exist"])


class TopicNotHosted(UnknownTopic):
    """The request is for the topic itself: Kafka's message, and a code that no other route uses."""

    status = 404
    code = 40403

    def __str__(self) -> str:
        return "This server does not host this topic-partition."


class NoSuchResource(LogError):
    """A resource of the v3 dialect that is neither a topic nor a partition."""

    status = 404
    code = 404


class CrossSite(LogError):
    """A page of another site uses a user's browser to change something here."""

    status = 403
    code = 40301

    def __str__(self) -> str:
        return "a page of another site may not change anything here"


class ErrorAnswer(NamedTuple):
    """An error in terms of HTTP; `headers` beside those of every response."""

    status: int
    code: int
    message: str
    headers: dict[str, str]

    def response(self, path: str) -> HttpResponse:
        headers = tuple(
            (name.lower().encode(), text.encode()) for name, text in self.headers.items()
        )
        body = error_body(self.code, self.message)
        return HttpResponse(self.status, body, media_type_of_errors(path), headers)


class ErrorCounter(Protocol):
    """Counts errors by class: HttpCounters."""

    def refused(self, error: BaseException, scope: Scope) -> None: ...


def answered(
    error: BaseException, scope: Scope, counter: ErrorCounter, request_id: str = ""
) -> ErrorAnswer:
    """Convert any error of a request into its answer; count it, and log it if it is a 500.

    The log names the method and the path, and has the traceback of an exception that is no
    LogError: it is a bug.
    """
    counter.refused(error, scope)
    request = f"{scope['method']} {scope['path']}"
    if request_id:
        request += f" (request {request_id})"
    if isinstance(error, LogError):
        answer = error_response(error)
        if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("%s: %s", request, error)
        return answer
    if isinstance(error, RequestValidationError):
        return _invalid_request(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    log.error("bug in %s", request, exc_info=error)
    status, code, message = INTERNAL_ERROR
    is_reading = request.startswith(("GET ", "HEAD "))
    return ErrorAnswer(status, code, message if is_reading else f"{message}; {UNKNOWN}", {})


def error_response(error: LogError) -> ErrorAnswer:
    """Return status, code, message and headers of a LogError. Pure."""
    status, code = next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)
    status, code = getattr(error, "status", status), getattr(error, "code", code)
    message = str(error)
    headers: dict[str, str] = dict(getattr(error, "headers", {}))
    if isinstance(error, Throttled):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_ms / 1000), 1))
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    elif isinstance(error, CommitUnknown) and "outcome" not in message:
        message += f"; {UNKNOWN}"
    return ErrorAnswer(status, code, message, headers)


def error_body(code: int, message: str) -> bytes:
    """Encode the body of any error. Never fails: lone surrogates of a client become `?`."""
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[:MESSAGE_CHARS_MAX] + "..."
    body = json.dumps({"error_code": code, "message": message}, ensure_ascii=False)
    return body.encode("utf-8", "replace")


def check_printable(parameter: str, text: str) -> None:
    """Raise InvalidParameter, with Redpanda's message, for control characters in a path's name."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Invalid parameter '{parameter}' got '{shown}'")


def check_printable_field(text: str) -> None:
    """Raise InvalidParameter for control characters in a name of a body."""
    shown = _visible(text)
    if shown != text:
        raise InvalidParameter(f"Parameter contained invalid control characters: {shown}")


def _visible(text: str) -> str:
    """Replace control characters by their symbols: U+2400 + n, and U+2421 for delete."""
    if text.isprintable():
        return text
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 0x20 else "\u2421" if c == "\x7f" else c for c in text
    )


def _invalid_request(error: RequestValidationError) -> ErrorAnswer:
    named = error.errors()[:VALIDATION_ERRORS_MAX]
    first: dict[str, Any] = named[0]
    if first["type"] == "json_invalid":
        why = f"the body is not JSON: {first['ctx']['error']} at {first['loc'][-1]}"
        return ErrorAnswer(400, 400, why, {})
    why = "; ".join(_in_words(each) for each in named)
    if first["loc"][0] == "query" and first["type"] == "missing":
        return ErrorAnswer(400, 40002, why, {})
    return ErrorAnswer(422, 422, why, {})


def _http_error(error: HTTPException) -> ErrorAnswer:
    status, message = error.status_code, error.detail
    if message == HTTPStatus(status).phrase:
        message = f"HTTP {status} {message}"
    return ErrorAnswer(status, status, message, dict(error.headers or {}))


def _in_words(error: Mapping[str, Any]) -> str:
    """Return one line that names the field: `configs.0.name: ...`."""
    name = ".".join(str(part) for part in error["loc"][1:])
    if not name:
        is_absent = error["type"] == "missing"
        return "the body is missing" if is_absent else f"the body: {error['msg']}"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        return f"Unrecognized field: {name}"
    return f"{name}: {error['msg']}"
