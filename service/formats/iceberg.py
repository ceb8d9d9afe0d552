"""Bodies of Iceberg's REST catalog: requests decoded, answers encoded. Pure."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.iceberg_tables import PlannedFiles

NAMESPACE = "logs"
"""The one namespace. Its tables are the topics."""
FILES_MAX = 2_000
"""Files of one answer to a plan: 0.6 MB. A task of the plan has the next ones."""
TOKEN_CHARS_MAX = 1_024

Expression = Any


FILTER_BYTES_MAX = 32 * 1024
"""Upper bound of a plan's filter: it is in the plan's next task, too."""


class PlanRequest(msgspec.Struct, rename="kebab"):
    """A request to plan a scan. Other fields do not change the files."""

    snapshot_id: int | None = None
    filter: Expression = None
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None


class PlanPosition(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Where the next task of a plan begins: the number of files that earlier answers have."""

    snapshot_id: int | None
    first: int
    filter: Expression


class TaskRequest(msgspec.Struct, rename="kebab"):
    """A request for the files of a plan's task."""

    plan_task: str


class TokenRequest(NamedTuple):
    """A request for a token: the secret of a key, or a token of an earlier answer."""

    secret: str


_plan = msgspec.json.Decoder(PlanRequest)
_task = msgspec.json.Decoder(TaskRequest)
_position = msgspec.json.Decoder(PlanPosition)


def plan_request(body: bytes) -> PlanRequest:
    """Decode a plan's request. Raises InvalidRequest."""
    try:
        request = _plan.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is no plan request: {error}") from error
    if len(msgspec.json.encode(request.filter)) > FILTER_BYTES_MAX:
        raise InvalidRequest(f"the filter has more than {FILTER_BYTES_MAX} bytes")
    return request


def task_position(body: bytes) -> PlanPosition:
    """Decode a request for a task. Raises InvalidRequest."""
    try:
        task = _task.decode(body)
        position = _position.decode(base64.b64decode(task.plan_task, b"-_", validate=True))
    except (ValueError, RecursionError) as error:  # also errors of msgspec and base64
        raise InvalidRequest(f"plan-task is no task of a plan: {error}") from error
    if position.first < 0:
        raise InvalidRequest("plan-task is no task of a plan: it begins before the first file")
    return position


def scan_tasks(planned: PlannedFiles, position: PlanPosition) -> dict[str, Any]:
    """Return the tasks of one answer, and the plan's next task.

    A task has no residual filter: then the client applies the scan's own filter to its rows.
    """
    tasks = [
        {
            "data-file": {
                "spec-id": 0,
                "partition": [file.partition],
                "content": "data",
                "file-path": f"{planned.location}/{file.path}",
                "file-format": "parquet",
                "file-size-in-bytes": file.size,
                "record-count": file.rows,
            },
            "delete-file-references": [],
        }
        for file in planned.files
    ]
    following: list[str] = []
    if planned.has_more:
        end = position.first + len(planned.files)
        body = msgspec.json.encode(PlanPosition(planned.snapshot_id, end, position.filter))
        following = [base64.urlsafe_b64encode(body).decode()]
    return {"file-scan-tasks": tasks, "delete-files": [], "plan-tasks": following}


def token_request(body: bytes) -> TokenRequest:
    """Decode the form of an OAuth2 token request. Raises InvalidRequest."""
    try:
        form = parse_qs(body.decode("ascii"), max_num_fields=20, errors="strict")
    except ValueError as error:
        raise InvalidRequest(f"the body is no form: {error}") from error
    for name in ("client_secret", "subject_token"):
        for secret in form.get(name, ()):
            if len(secret) > TOKEN_CHARS_MAX:
                raise InvalidRequest(f"{name} has more than {TOKEN_CHARS_MAX} characters")
            return TokenRequest(secret)
    raise InvalidRequest("the form has no client_secret: set the secret of a key as credential")


def token_answer(secret: str) -> dict[str, Any]:
    """Return the answer to a token request: the key itself is the token."""
    return {
        "access_token": secret,
        "token_type": "bearer",
        "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
    }


def identifiers(names: Sequence[str], next_token: str | None) -> dict[str, Any]:
    """Return a page of tables."""
    tables = [{"namespace": [NAMESPACE], "name": name} for name in names]
    return {"identifiers": tables, "next-page-token": next_token}


def encode(answer: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(answer)


def etag_of(body: bytes) -> str:
    return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
