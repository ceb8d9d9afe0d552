"""Who asks, and whether they may: keys, sessions, ACLs and quotas of one broker.

Every request but those of Open.PUBLIC (service.rights) names a principal: `Authorization: Basic`
(the user of a key and its secret), `Bearer` (the secret), or the console's cookie. What is known of
a header is remembered, so that a request costs two lookups in dicts; what changes in the cluster's
state holds from then on.

Before it says no, a broker looks whether another has just said yes (I3), a few times a second at
most: bad keys cost a hash each, no memory and no flood of requests to the store (I10). Secrets are
compared as SHA-256 in constant time, and are in no message, log line, trace or metric.
"""

import base64
import binascii
import hmac
import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from service import sessions
from service.caller import BASIC, BEARER, Forbidden, QuotaExceeded, Unauthenticated
from service.errors import CrossSite
from service.paths import clean_path
from service.quotas import Bucket
from service.rights import Need, Open, is_public, rule_of
from service.settings import Settings
from service.telemetry import HttpCounters
from storage.access import Access, digest
from storage.acls import CLUSTER, DESCRIBE, OPERATIONS_OF, TOPIC
from storage.errors import LogError
from storage.log import Log

ADMIN_ID = "admin"
"""Of the key that the settings give, which the state does not have; its principal is User:admin."""
ADMIN = "User:admin"
HEADER_BYTES_MAX = 1024
KNOWN_MAX = 10_000
"""Headers, and callers of other brokers, that are remembered; then all are forgotten."""
DECISIONS_MAX = 1_000
"""Of one caller; then all are made anew."""
LOOKS_PER_S = 5.0
READING = frozenset({"GET", "HEAD", "OPTIONS"})
CONSOLE_HEADER = b"tidelog-console"
"""What pages of other sites cannot send: a cookie alone changes nothing."""


class Credential(NamedTuple):
    """By which key somebody is who they say, and until when (0: no end of its own)."""

    key_id: str
    principal: str
    digest: bytes
    expires_ms: int


class Caller:
    """A principal at an address: Rights. Shared by all requests with the same header."""

    __slots__ = (
        "_access",
        "_decisions",
        "_is_revoked",
        "_security",
        "_version",
        "by",
        "host",
        "principal",
    )

    def __init__(
        self, security: "Security", principal: str, host: str, by: Credential | None
    ) -> None:
        self.principal, self.host, self.by = principal, host, by
        self._security = security
        self._access: Access | None = None
        self._version = -1
        self._is_revoked = False
        self._decisions: dict[tuple[str, str, str], bool] = {}

    @property
    def is_super(self) -> bool:
        return self.principal in self._security.super_users

    @property
    def is_valid(self) -> bool:
        """Whether the key still is one."""
        access = self._security.access
        if access.version != self._version or access is not self._access:
            self._renew(access)
        by = self.by
        if self._is_revoked or by is None:
            return not self._is_revoked
        return not by.expires_ms or self._security.now_ms() < by.expires_ms

    def may(self, operation: str, resource_type: str, name: str) -> bool:
        if not self.is_valid:
            return False
        asked = (operation, resource_type, name)
        decision = self._decisions.get(asked)
        if decision is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            acls = self._security.access.acls
            decision = self.is_super or acls.allows(self.principal, self.host, *asked)
            self._decisions[asked] = decision
        return decision

    async def check(self, operation: str, resource_type: str, name: str) -> None:
        if self.may(operation, resource_type, name):
            return
        await self._security.look_anew()
        if self.may(operation, resource_type, name):
            return
        if not self.is_valid:
            raise self._security.refused("revoked", "the key is no more")
        self._security.count_denied(resource_type)
        what = "the cluster" if resource_type == CLUSTER else f"{resource_type.lower()} {name!r}"
        raise Forbidden(f"not authorized: {self.principal} may not {operation} {what}")

    def pay(self, quota: str, size: int = 0) -> None:
        bucket = self._security.bucket(quota, self.principal)
        if bucket is None:
            return
        owes_s = bucket.owes_s(self._security.boot_s())
        if owes_s > 0:
            self._security.count_throttled(quota)
            raise QuotaExceeded(
                f"{self.principal} has used up its {quota} here: {bucket.rate} bytes a second",
                retry_after_ms=math.ceil(owes_s * 1000),
            )
        bucket.pay(size)

    def owe(self, quota: str, size: int) -> None:
        bucket = self._security.bucket(quota, self.principal)
        if bucket is not None:
            bucket.pay(size)

    def owes_s(self, quota: str) -> float:
        bucket = self._security.bucket(quota, self.principal)
        return 0.0 if bucket is None else bucket.owes_s(self._security.boot_s())

    def operations(self, resource_type: str, name: str) -> list[str]:
        """All that may be done with it."""
        asked = OPERATIONS_OF[resource_type]
        return [operation for operation in asked if self.may(operation, resource_type, name)]

    def _renew(self, access: Access) -> None:
        self._access, self._version = access, access.version
        self._decisions.clear()
        if self.by is not None and self.by.key_id != ADMIN_ID:
            key = access.keys.get(self.by.key_id)
            self._is_revoked = key is None or key.digest != self.by.digest


class Security:
    """One per broker, where it is on. `secret` is the cluster's."""

    def __init__(
        self, broker: Log, settings: Settings, secret: bytes, counters: HttpCounters
    ) -> None:
        self._log = broker
        self._secret = secret
        self._counters = counters
        self.super_users = frozenset({ADMIN, *settings.super_user_names})
        self._admin = digest(settings.admin_key.encode()) if settings.admin_key else None
        self._known: dict[tuple[bytes, str], Caller] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._looks = Bucket(LOOKS_PER_S, broker.clock.boot_s())
        self.cookie = sessions.cookie_name(broker.wal.cluster.cluster_id)

    # -- letting in

    async def admit(
        self, scope: MutableMapping[str, Any], need: Need | None, name: str
    ) -> LogError | None:
        """Find who asks, and put their rights into the scope; why they may not go on, if so."""
        try:
            header = None
            for key, value in scope["headers"]:
                if key == b"authorization":
                    header = value
                    break
            client = scope.get("client")
            host = client[0] if client else ""
            caller = None if header is None else self._known.get((header, host))
            if caller is None or not caller.is_valid:
                caller = await self._identify(scope, header, host)
                if caller is None:
                    return None
            scope["rights"] = caller
            if need is not None and not caller.may(need.operation, need.resource_type, name):
                await caller.check(need.operation, need.resource_type, name)
        except LogError as error:
            return error
        return None

    async def allow_route(self, scope: MutableMapping[str, Any]) -> None:
        """Of a route of the application. Raises Forbidden, Unauthenticated."""
        rule = rule_of(scope["method"], scope["route"].path)
        rights = scope.get("rights")
        if rule is Open.PUBLIC or (rights is None and _needs_no_key(scope)):
            return
        if rights is None:
            raise self.refused("missing", "say who you are")
        if isinstance(rule, Need):
            name = rule.name(scope["path_params"])
            await rights.check(rule.operation, rule.resource_type, name)
        elif rule is None:
            raise Forbidden("not authorized: nobody may do this")

    async def _identify(
        self, scope: MutableMapping[str, Any], header: bytes | None, host: str
    ) -> Caller | None:
        """None: without a key, and needs none."""
        if header is not None:
            by = await self._of_header(header)
            return self._remember((header, host), Caller(self, by.principal, _plain(host), by))
        headers = dict(scope["headers"])
        cookies = headers.get(b"cookie", b"").decode("latin-1")
        cookie = sessions.cookie_of(cookies, self.cookie) if cookies else None
        if _needs_no_key(scope):
            return None
        # A challenge of Basic would have a browser ask for a password, over the console's page.
        challenge = BEARER if CONSOLE_HEADER in headers else BASIC
        if cookie is None:
            raise self.refused(
                "missing", "a key is needed: Authorization: Basic or Bearer", challenge
            )
        if scope["method"] not in READING and CONSOLE_HEADER not in headers:
            raise CrossSite
        remembered = (cookie.encode("latin-1"), host)
        known = self._known.get(remembered)
        if known is not None and known.is_valid:
            return known
        session = sessions.parse(cookie)
        claimed = None if session is None else await self._of_session(session)
        if claimed is None:
            raise self.refused("session", "the session is over: log in", challenge)
        return self._remember(remembered, Caller(self, claimed.principal, _plain(host), claimed))

    async def log_in(self, secret: str) -> tuple[Credential, str, int]:
        """Whose key this is, a cookie for it, and until when that holds. Raises Unauthenticated."""
        by = await self._of_secret(secret.encode("utf-8", "replace")[:HEADER_BYTES_MAX], BEARER)
        until_ms = self.now_ms() + sessions.LIVES_MS
        until_ms = min(until_ms, by.expires_ms or until_ms)
        return by, sessions.sign(self._secret, by.key_id, until_ms, by.digest), until_ms

    def of_peer(self, principal: str, host: str) -> Caller:
        """Who asked another broker, which let them in and hands the request over. The empty name,
        where that broker's security is off, may what everybody may."""
        remembered = (b"", f"{host} {principal}")
        known = self._known.get(remembered)
        return known or self._remember(remembered, Caller(self, principal, host, None))

    def may_see(self, principal: str, topic: str) -> bool:
        """Whether this principal may describe the topic, wherever it asks from."""
        return self.of_peer(principal, "").may(DESCRIBE, TOPIC, topic)

    def _remember(self, key: tuple[bytes, str], caller: Caller) -> Caller:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[key] = caller
        return caller

    async def _of_header(self, header: bytes) -> Credential:
        scheme, _, rest = header.strip().partition(b" ")
        user: bytes | None = None
        secret = rest.strip()
        if len(header) > HEADER_BYTES_MAX or scheme.lower() not in (b"basic", b"bearer"):
            raise self.refused("malformed", "Authorization is neither Basic nor Bearer")
        if scheme.lower() == b"basic":
            try:
                user, colon, secret = base64.b64decode(secret, validate=True).partition(b":")
            except (binascii.Error, ValueError):
                user, colon, secret = b"", b"", b""
            if not colon:
                raise self.refused("malformed", "Basic takes base64 of user:secret")
        by = await self._of_secret(secret, BASIC)
        if user is not None and b"User:" + user != by.principal.encode():
            raise self.refused("unknown", "no key of this user has this secret")
        return by

    async def _of_secret(self, secret: bytes, challenge: str) -> Credential:
        held = digest(secret)
        by = self._find(held)
        if by is None:
            await self.look_anew()
            by = self._find(held)
        if by is None:
            raise self.refused("unknown", "no key has this secret", challenge)
        if by.expires_ms and self.now_ms() >= by.expires_ms:
            raise self.refused("expired", "the key has expired", challenge)
        return by

    def _find(self, held: bytes) -> Credential | None:
        # That a dict is looked into by the digest tells nobody anything who cannot choose digests.
        if self._admin is not None and hmac.compare_digest(held, self._admin):
            return Credential(ADMIN_ID, ADMIN, self._admin, 0)
        key = self.access.key_of_digest(held)
        if key is None or not hmac.compare_digest(held, key.digest):
            return None
        return Credential(key.key_id, key.principal, key.digest, key.expires_ms)

    async def _of_session(self, session: sessions.Session) -> Credential | None:
        if session.key_id == ADMIN_ID and self._admin is not None:
            by = Credential(ADMIN_ID, ADMIN, self._admin, 0)
        else:
            key = self.access.keys.get(session.key_id)
            if key is None:
                await self.look_anew()
                key = self.access.keys.get(session.key_id)
            if key is None:
                return None
            by = Credential(key.key_id, key.principal, key.digest, key.expires_ms)
        if not sessions.is_signed(self._secret, session, by.digest):
            return None
        until_ms = min(session.expires_ms, by.expires_ms or session.expires_ms)
        return by._replace(expires_ms=until_ms) if self.now_ms() < until_ms else None

    # -- what callers need

    @property
    def access(self) -> Access:
        return self._log.state.access

    def now_ms(self) -> int:
        return self._log.clock.now_ms()

    def boot_s(self) -> float:
        return self._log.clock.boot_s()

    async def look_anew(self) -> None:
        """Before a no: another broker may just have said yes. Raises Unavailable."""
        if self._looks.owes_s(self.boot_s()) == 0:
            self._looks.pay(1.0)
            await self._log.wal.refresh()

    def bucket(self, quota: str, principal: str) -> Bucket | None:
        """None: no quota."""
        if not self.access.quotas:
            return None
        rate = self.access.quota(quota, principal)
        if rate is None:
            return None
        bucket = self._buckets.get((quota, principal))
        if bucket is None or bucket.rate != rate:
            if len(self._buckets) >= KNOWN_MAX:
                self._buckets.clear()
            bucket = self._buckets[quota, principal] = Bucket(rate, self.boot_s())
        return bucket

    def refused(self, kind: str, why: str, challenge: str = BASIC) -> Unauthenticated:
        """The error, counted."""
        self._counters.auth_failures[kind] = self._counters.auth_failures.get(kind, 0) + 1
        return Unauthenticated(kind, why, challenge)

    def count_denied(self, resource_type: str) -> None:
        denied = self._counters.denied
        denied[resource_type] = denied.get(resource_type, 0) + 1

    def count_throttled(self, quota: str) -> None:
        throttled = self._counters.throttled
        throttled[quota] = throttled.get(quota, 0) + 1


def _needs_no_key(scope: MutableMapping[str, Any]) -> bool:
    accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
    return is_public(scope["method"], clean_path(scope["path"]), accept)


def _plain(host: str) -> str:
    """IPv4 as such, also where it came to a socket of both."""
    return host.removeprefix("::ffff:") if "." in host else host
