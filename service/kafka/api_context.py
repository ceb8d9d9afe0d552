"""The parts of a broker that the handlers of all APIs use: codes of refusals, rights, audit lines.

A refused right and a failed authentication have an audit line, and so has each change of topics,
configs, records and groups. The audit log of REST writes these lines, within the same bound
(service.security.audit).
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from tidelog.service.codec_threads import UnpackThreads
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.client import REQUEST, ApiClient, fields_of
from tidelog.service.kafka.errors import Code, RequestKind, code_of
from tidelog.service.kafka.refusal_lines import RefusalLines
from tidelog.service.kafka.refused_batches import RefusedBatches
from tidelog.service.operations.operations import Operations
from tidelog.service.security.audit import Audit, AuditedRequest
from tidelog.service.security.caller import CallerRights, Unauthenticated
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.codec.batch_header import TRANSACTIONS_NOT_SERVED
from tidelog.storage.core.acls import CLUSTER, CLUSTER_NAME, GROUP, TOPIC, Right
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.state.committed_offsets import check_group_id
from tidelog.storage.state.topic import Topic

log = logging.getLogger("tidelog.kafka")

LOGGED_CHARS_MAX = 255
"""Characters of a transactional id in a log line (I10)."""
_KINDS = {TOPIC: RequestKind.FETCH, GROUP: RequestKind.GROUP, CLUSTER: RequestKind.ADMIN}
"""By type of resource: the kind of request whose code for Forbidden names this type."""


class Context:
    """The parts of a broker that handlers use. One per listener."""

    def __init__(
        self,
        broker: Broker,
        operations: Operations,
        settings: RequestSettings,
        traffic: HttpCounters,
        threads: UnpackThreads,
        audit: Audit | None = None,
    ) -> None:
        self.broker = broker
        self.batches = broker.kafka
        self.operations = operations
        self.settings = settings
        self.counters = traffic.kafka
        self.traffic = traffic
        """Counts the records and bytes of topics, over all protocols."""
        self.refused_batches = RefusedBatches()
        self.refusal_lines = RefusalLines(traffic.kafka.admission)
        self.answers = traffic.admission.answers
        """The memory of the answers with records, over all protocols."""
        self.threads = threads
        self.audit = audit
        """None if the audit log is off."""
        self.is_draining = False
        """Whether the broker is stopping. Then it refuses appends and reads with the code that
        sends clients to another broker."""

    async def encoded(
        self, rights: CallerRights, encode: Callable[[], Iterable[bytes | memoryview]]
    ) -> EncodedAnswer:
        """Build a wide answer in a thread, in turns by principal.

        Its parts use many times the memory of its bytes, so few are built at a time. After a
        cancellation, it waits until the thread uses them no longer: the request holds their memory.
        """
        return EncodedAnswer([await self.threads.run_to_end(rights, lambda: b"".join(encode()))])

    def failed(self, api: str, error: BaseException) -> None:
        """Log an exception that no handler expects."""
        log.error("bug in Kafka's %s", api, exc_info=error, extra={"fields": _fields(api)})

    def refusal(self, api: str, code: Code) -> Code:
        """Count an error of an answer, and return it."""
        self.counters.errors[api, code.name] += 1
        return code

    def code(self, api: str, error: LogError, kind: RequestKind) -> Code:
        """Return the code for an error of the log, and count it. Log damage and bugs."""
        code = code_of(error, kind)
        if code is Code.UNKNOWN_SERVER_ERROR or isinstance(error, Corrupt):
            fields = _fields(api) | {"error_code": code.value, "error": code.name}
            log.error("Kafka's %s: %s", api, error, extra={"fields": fields})
        return self.refusal(api, code)

    def not_served(self, api: str, client: ApiClient, code: Code, why: str) -> Code:
        """Count a request for a function that brokers do not have, and return the code.

        The first such request of a client is logged.
        """
        self.warn(api, client, f"refused {api}: {why}")
        return self.refusal(api, code)

    def warn(self, api: str, client: ApiClient, text: str) -> None:
        """Log a line about a request of a client, within the bound of such lines."""
        self.refusal_lines.warn(client, text, _fields(api))

    def no_transactions(
        self, api: str, client: ApiClient, code: Code, transactional_id: str
    ) -> Code:
        """Count a request for a transactional id, and return the code.

        The first such request of a client is logged.
        """
        name = transactional_id[:LOGGED_CHARS_MAX]
        return self.not_served(api, client, code, f"{TRANSACTIONS_NOT_SERVED} {name!r}")

    async def refreshed(self, api: str, kind: RequestKind) -> Code:
        """Read the WAL to its end (I3). If the store fails, return the code, and count it."""
        try:
            await self.broker.refresh()
        except LogError as error:
            return self.code(api, error, kind)
        return Code.NONE

    def topic(self, name: str, topic_id: bytes | None) -> Topic | None:
        """Return a topic by its id or, where `topic_id` is None, by its name."""
        state = self.broker.state
        if topic_id is None:
            return state.topics.get(name)
        return state.topic_of_id(topic_id.hex())

    # -- rights

    async def right_refusal(
        self, api: str, client: ApiClient, right: Right, name: str = CLUSTER_NAME
    ) -> Code:
        """Return the code if the client does not have the right to a resource, else NONE.

        Raises Unauthenticated, which ends the connection.
        """
        if client.rights.may(right, name):
            return Code.NONE
        try:
            await client.rights.check(right, name)
        except Unauthenticated:
            raise
        except LogError as error:
            return self.denial(api, client, error, _KINDS[right.resource_type])
        return Code.NONE

    async def topic_refusal(
        self,
        api: str,
        client: ApiClient,
        right: Right,
        topic: Topic | None,
        name: str = "",
        *,
        unread: Code = Code.NONE,
    ) -> Code:
        """Return the code if the client has no right to a topic, or it does not exist, else NONE.

        `name` is the name in the request; it is empty if the request has an id. Only a client that
        has the right to a name learns whether a topic has this name. `unread` is the code of
        `refreshed`: if it is an error, the topic may exist.
        """
        topic_name = name if topic is None else topic.name
        if topic_name and (code := await self.right_refusal(api, client, right, topic_name)):
            return code
        if topic is not None:
            return Code.NONE
        if unread:
            return unread
        unknown = Code.UNKNOWN_TOPIC_OR_PARTITION if name else Code.UNKNOWN_TOPIC_ID
        return self.refusal(api, unknown)

    async def group_refusal(self, api: str, client: ApiClient, right: Right, group_id: str) -> Code:
        """Return the code if the group's id is invalid or the client lacks the right, else NONE."""
        if code := self.group_id_refusal(api, group_id):
            return code
        return await self.right_refusal(api, client, right, group_id)

    def group_id_refusal(self, api: str, group_id: str) -> Code:
        """Return the code if the group's id is invalid, else NONE."""
        if check_group_id(group_id) is None:
            return Code.NONE
        return self.refusal(api, Code.INVALID_GROUP_ID)

    # -- the audit log

    def denial(self, api: str, client: ApiClient, error: LogError, kind: RequestKind) -> Code:
        """Return the code of an error, and write an audit line if the error is a refused right."""
        self.audit_refusal(api, client, error)
        return self.code(api, error, kind)

    def audit_refusal(self, api: str, client: ApiClient, error: LogError) -> None:
        """Write an audit line if the error is a refused right or a failed authentication."""
        if self.audit is not None:
            self.audit.refused(error, partial(_audited, api, client, ""))

    def audit_change(self, api: str, client: ApiClient, name: str, code: Code = Code.NONE) -> None:
        """Write an audit line about a change of `name`: a topic, a group, or a part of these."""
        if self.audit is not None:
            self.audit.changed(_audited(api, client, name), int(code))


def _audited(api: str, client: ApiClient, name: str) -> AuditedRequest:
    return AuditedRequest(f"{api} {name}", client.rights.principal, client.host)


def _fields(api: str) -> dict[str, str | int]:
    """Return the fields of a log line about the current request."""
    request = REQUEST.get()
    return {"api": api} if request is None else fields_of(*request)
