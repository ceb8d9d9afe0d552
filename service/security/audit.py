"""The audit log: refusals, logins and changes, one JSON line each, in a file or the broker's log.

A line has `time`, `event`, `broker`, `principal` (if it is known), `client` (the address that
connects), `forwarded_for` (X-Forwarded-For, which a proxy or the client wrote), `request`,
`status`, and `reason` of a refusal or `detail` of a change. An empty field is absent. Events:
`unauthenticated`, `denied`, `wrong_host`; `login`, `logout`, `change` (with a status of 5xx, the
outcome of the change may be unknown); `left_out`. No line has a secret. Requests for records and
requests of consumer instances have a line only if they are refused. The `request` of a Kafka client
is an API and a topic, or the changed defaults; the `status` of its change is Kafka's error code. A
topic that a REST producer creates has the `request` `auto.create.topics` and its name.

Any client can cause refusals, so at most LINES_PER_S refusals a second have a line. The event
`left_out` has the number of refusals without a line. Changes need a permission, and are never left
out, but commits of offsets to many groups are only counted (service.kafka.group_offsets). The file
is opened for each line, so it may be renamed at any time (logrotate). **On a crash** after a change
and before its line, the line is missing, but the change is in the WAL.
"""

import asyncio
import datetime as dt
import json
import logging
import os
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from tidelog.service.http.request import HttpRequest, Scope
from tidelog.service.security.caller import address_of, rights_of
from tidelog.service.security.token_bucket import Bucket
from tidelog.service.settings.security import AUDIT_AUTO, AUDIT_OFF, AUDIT_STDERR, SecuritySettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.request_context import PRINCIPAL

log = logging.getLogger("tidelog.audit")
access_log = logging.getLogger("tidelog.access")

LINES_PER_S = 20.0
LEFT_OUT_S = 10.0
"""Time from the first refusal without a line to the `left_out` line that counts it."""
CHARS_MAX = 500
"""Maximum characters of a field, because clients choose the paths (I10)."""
FILE_MODE = 0o600
REFUSALS = {401: "unauthenticated", 403: "denied", 421: "wrong_host"}
SESSION_EVENTS = {"/tidelog/v1/login": "login", "/tidelog/v1/logout": "logout"}

_details: ContextVar[list[str] | None] = ContextVar("details", default=None)
"""The change that this request makes, in words."""

Fields = dict[str, Any]


def note(message: str, *values: object) -> None:
    """Log a change of keys, ACLs or quotas, and add it to the audit line of the request."""
    access_log.info(message, *values)
    details = _details.get()
    if details is not None:
        details.append(message % values)


class AuditedRequest(NamedTuple):
    """A request as its lines name it. `action` is a method and a path, or Kafka's API and a name.

    `client` is the address that connects.
    """

    action: str
    principal: str
    client: str
    forwarded_for: str = ""

    @classmethod
    def of_http(cls, scope: Scope) -> "AuditedRequest":
        query = scope["query_string"].decode("latin-1")
        path = f"{scope['path']}?{query}" if query else scope["path"]
        forwarded_for = dict(scope["headers"]).get(b"x-forwarded-for", b"").decode("latin-1")
        principal = rights_of(scope).principal
        return cls(f"{scope['method']} {path}", principal, address_of(scope), forwarded_for)


def open_audit(
    settings: SecuritySettings, broker: Broker, counters: HttpCounters
) -> "Audit | None":
    """Return the audit log of the settings.

    If it is off, return None. Raises LogError if the file cannot be written.
    """
    destination = settings.audit_log
    if destination == AUDIT_AUTO:
        destination = AUDIT_STDERR if settings.security == "keys" else AUDIT_OFF
    if destination in (AUDIT_OFF, ""):
        return None
    if destination == AUDIT_STDERR:
        log.setLevel(logging.INFO)  # also if `log_level` is higher
        return Audit(broker, counters, _log_event)
    try:
        _append(destination, b"")
    except OSError as error:
        raise LogError(f"audit_log {destination} cannot be written: {error.strerror}") from error
    return Audit(broker, counters, lambda event: _append(destination, f"{_text(event)}\n".encode()))


class Audit:
    """The audit log of one broker, on its event loop.

    `write` may block the loop, because lines are few.
    """

    def __init__(
        self, broker: Broker, counters: HttpCounters, write: Callable[[Fields], None]
    ) -> None:
        self._clock = broker.clock
        self._broker = broker.name
        self._counters = counters
        self._write = write
        self._refusals = Bucket(LINES_PER_S, broker.clock.boot_s())
        self._left_out = 0

    def refused(self, error: BaseException, request_of: Callable[[], AuditedRequest]) -> None:
        """Write a line if the error is a refusal; ignore other errors.

        `request_of` is called only for a line, because any client can cause errors.
        """
        status = getattr(error, "status", None)
        if not isinstance(error, LogError) or status not in REFUSALS:
            return
        self._counters.audited[REFUSALS[status]] += 1
        if self._refusals.throttle_s(self._clock.boot_s()) > 0:
            self._counters.audit_lost["flood"] += 1
            if not self._left_out:
                asyncio.get_running_loop().call_later(LEFT_OUT_S, self._report_left_out)
            self._left_out += 1
            return
        self._refusals.charge(1.0)
        self._event(REFUSALS[status], request_of(), {"status": status, "reason": _cut(str(error))})

    async def change(self, work: Awaitable[None], call: HttpRequest) -> None:
        """Serve a request that may change the cluster, and write a line about the change."""
        details: list[str] = []
        _details.set(details)
        await work
        scope, status = call.scope, call.status
        if 400 <= status < 500:
            return
        event = SESSION_EVENTS.get(scope["path"], "change")
        self._counters.audited[event] += 1
        fields: Fields = {"status": status, "detail": _cut("; ".join(details))}
        if event != "change":  # before a login, the scope has no caller
            fields["principal"] = PRINCIPAL.get()
        self._event(event, AuditedRequest.of_http(scope), fields)

    def changed(self, request: AuditedRequest, code: int) -> None:
        """Write a line about a change that is no request of its own, or a Kafka client's.

        The status of a Kafka client's change is Kafka's error code.
        """
        self._counters.audited["change"] += 1
        self._event("change", request, {"status": code})

    def _report_left_out(self) -> None:
        left_out, self._left_out = self._left_out, 0
        self._put({**self._head("left_out"), "left_out": left_out})

    def _event(self, event: str, request: AuditedRequest, fields: Fields) -> None:
        caller_fields = {
            "principal": request.principal,
            "client": request.client,
            "forwarded_for": _cut(request.forwarded_for),
            "request": _cut(request.action.rstrip()),
        }
        self._put({**self._head(event), **caller_fields, **fields})

    def _head(self, event: str) -> Fields:
        moment = dt.datetime.fromtimestamp(self._clock.now_ms() / 1000, dt.UTC)
        time = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"time": time, "event": event, "broker": self._broker}

    def _put(self, event: Fields) -> None:
        try:
            self._write({name: value for name, value in event.items() if value != ""})
        except OSError as error:
            self._counters.audit_lost["write"] += 1
            log.error("the audit log cannot be written: %s", error.strerror)


def _log_event(event: Fields) -> None:
    log.info("%s", _text(event), extra={"audit": event})


def _append(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def _text(event: Fields) -> str:
    return json.dumps(event)  # ASCII only, because a client may send lone surrogates


def _cut(text: str) -> str:
    return text if len(text) <= CHARS_MAX else f"{text[:CHARS_MAX]}..."
