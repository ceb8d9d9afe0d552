"""Conversion of errors to HTTP responses, with one table of statuses and codes, and one function.

Every error body of every dialect is `{"error_code": int, "message": str}` (DIALECTS.md lists the
codes). If an error class has a `status` and a `code` of its own, as errors of one dialect have,
they take precedence over the table. `answered` makes the response of every error, counts the error,
and logs damage and bugs. A client gets no text of an unexpected exception, only a 500 with a fixed
message.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tidelog.service.http.media_types import JSON
from tidelog.service.http.request import HttpResponse, Scope
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
from tidelog.storage.runtime.request_context import PRINCIPAL

log = logging.getLogger("tidelog.http")

MESSAGE_CHARS_MAX = 2000
"""Maximum characters of a message. Messages quote requests, so they need a bound (I10)."""
VALIDATION_ERRORS_MAX = 3
"""Maximum errors of one body that the message names."""
INTERNAL_ERROR = (500, 50002, "internal error: the broker's log has the details")
_TOPIC = re.compile(r"/topics/([^/]+)")
UNKNOWN = "outcome unknown, retry with the same Idempotency-Key"

_ICEBERG_PREFIX = "/iceberg/"
READ_ONLY = "the catalog is read-only: only brokers write the table"
_ICEBERG_TYPES = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NotFoundException",
    406: "UnsupportedOperationException",
    413: "BadRequestException",
    422: "BadRequestException",
    429: "TooManyRequestsException",
    503: "ServiceUnavailableException",
}
"""The types of errors in Iceberg's catalog, by status."""

_TABLE: Mapping[type[LogError], tuple[int, int]] = {
    LogError: (500, 50002),
    Corrupt: (500, 50002),
    InvalidRequest: (400, 40002),  # also TopicExists and InvalidConfig
    OffsetOutOfRange: (400, 40002),
    RecordTooLarge: (413, 413),
    InvalidTimestamp: (422, 422),
    IdempotencyMismatch: (422, 422),
    OffsetMetadataTooLarge: (422, 422),
    MemberExists: (409, 40902),
    NotAssigned: (409, 40903),
    AssignedOtherwise: (409, 40903),
    StaleCommit: (409, 40903),  # also ProducerFenced, OutOfOrderSequence, IllegalGeneration
    UnknownTopic: (404, 40401),
    UnknownPartition: (404, 40402),
    Throttled: (429, 42901),
    Unavailable: (503, 50302),
    CommitUnknown: (504, 50003),
}


class ErrorBody(BaseModel):
    """The body of every error."""

    error_code: int = Field(
        examples=[40401], description="HTTP status, in most errors with two more digits"
    )
    message: str = Field(examples=["topic 'flights' does not exist"])


class TopicNotHosted(UnknownTopic):
    """The topic in the path of GET /topics/NAME, or of a v3 route, does not exist.

    This error has Kafka's message and code 40403. The other routes use 40401 (UnknownTopic).
    """

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
    """The HTTP response for an error. `headers` are the headers that only this response has."""

    status: int
    code: int
    message: str
    headers: dict[str, str]
    iceberg_type: str = ""
    """The type of the error in Iceberg's catalog; if it is empty, that of the status."""

    def response(self, path: str) -> HttpResponse:
        headers = tuple(
            (name.lower().encode(), text.encode()) for name, text in self.headers.items()
        )
        status, body = self.status, error_body(self.code, self.message)
        if path.startswith(_ICEBERG_PREFIX):
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                status = HTTPStatus.NOT_ACCEPTABLE
                return HttpResponse(status, self._iceberg_body(status, READ_ONLY), JSON)
            body = self._iceberg_body(status, self.message)
        return HttpResponse(status, body, media_type_of_errors(path), headers)

    def _iceberg_body(self, status: int, message: str) -> bytes:
        """Return the body of an error of Iceberg's catalog, which also has the fields of others."""
        code = self.code if status == self.status else status
        kind = self.iceberg_type or _ICEBERG_TYPES.get(status, "ServiceFailureException")
        return error_body(code, message, {"error": {"type": kind, "code": status}})


class ErrorCounter(Protocol):
    """Counter of errors by class. HttpCounters implements it."""

    def refused(self, error: BaseException) -> None: ...


def answered(
    error: BaseException, scope: Scope, counter: ErrorCounter, request_id: str = ""
) -> ErrorAnswer:
    """Convert any error of a request into its answer. Count the error, and log damage and bugs.

    The log has a line for each answer of 500 and more. It names the method and the path; as JSON,
    it has fields (`_fields`). An unexpected exception is a bug, so the log has its traceback.
    """
    counter.refused(error)
    request = f"{scope['method']} {scope['path']}"
    if request_id:
        request += f" (request {request_id})"
    if isinstance(error, LogError):
        answer = error_response(error)
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            is_damage = answer.status == HTTPStatus.INTERNAL_SERVER_ERROR
            level = logging.ERROR if is_damage else logging.WARNING
            fields = _fields(scope, request_id, answer.status, answer.code, error)
            log.log(level, "%s: %s", request, error, extra={"fields": fields})
        return answer
    if isinstance(error, RequestValidationError):
        return _invalid_request(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    status, code, message = INTERNAL_ERROR
    fields = _fields(scope, request_id, status, code, error)
    log.error("bug in %s", request, exc_info=error, extra={"fields": fields})
    is_reading = request.startswith(("GET ", "HEAD "))
    return ErrorAnswer(status, code, message if is_reading else f"{message}; {UNKNOWN}", {})


def _fields(
    scope: Scope, request_id: str, status: int, code: int, error: BaseException
) -> dict[str, str | int]:
    """Return the fields of a log line about a request. `topic` is the topic in the path."""
    fields: dict[str, str | int] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "error_code": code,
        "error": type(error).__name__,
    }
    if request_id:
        fields["request_id"] = request_id
    if match := _TOPIC.search(scope["path"]):
        fields["topic"] = match[1]
    if principal := PRINCIPAL.get():
        fields["principal"] = principal
    return fields


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
    return ErrorAnswer(status, code, message, headers, _iceberg_type(error))


def _iceberg_type(error: LogError) -> str:
    if isinstance(error, UnknownTopic):
        return "NoSuchTableException"
    return str(getattr(error, "iceberg_type", ""))


def error_body(code: int, message: str, more: Mapping[str, Mapping[str, Any]] = {}) -> bytes:
    """Encode the body of any error. This never fails, because lone surrogates become `?`.

    Each object of `more` gets the message, too.
    """
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[:MESSAGE_CHARS_MAX] + "..."
    fields: dict[str, Any] = {"error_code": code, "message": message}
    for name, value in more.items():
        fields[name] = {"message": message, **value}
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")


def _invalid_request(error: RequestValidationError) -> ErrorAnswer:
    named = error.errors()[:VALIDATION_ERRORS_MAX]
    first: dict[str, Any] = named[0]
    if first["type"] == "json_invalid":
        why = f"the body is not JSON: {first['ctx']['error']} at {first['loc'][-1]}"
        return ErrorAnswer(400, 400, why, {})
    why = "; ".join(_in_words(detail) for detail in named)
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
