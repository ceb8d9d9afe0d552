"""Authentication and authorization on one broker: keys, sessions, ACLs and quotas.

Except on public routes (RouteAccess.PUBLIC), every request needs a principal. The request proves it
by `Authorization: Basic` (user and secret of a key), by `Bearer` (the secret, or a token of the
OIDC issuer), or by the console's cookie. Callers are cached by credential and address, and found
again by header, so authorization costs two lookups in dicts. A change of the state applies to the
next request. The memory of callers and of their cached decisions is bounded (I10).

Before a broker rejects a request, it refreshes its view, because another broker may have added the
key or the ACL (I3). It refreshes at most REFRESHES_PER_S times a second. So an invalid key costs a
hash and no memory, and invalid keys cause no flood of requests to the store (I10). Secrets are
compared as SHA-256 in constant time, and appear in no message, log line, trace or metric.
"""

import asyncio
import base64
import binascii
import hmac
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from tidelog.service.http.errors import CrossSite
from tidelog.service.http.loop_turns import Turns
from tidelog.service.http.route import Access, RouteAccess
from tidelog.service.security import session_cookie
from tidelog.service.security.caller import (
    BASIC,
    BEARER,
    Credential,
    QuotaExceeded,
    Unauthenticated,
    allowed_operations,
    charge_request,
    forbidden,
    super_users_of,
)
from tidelog.service.security.peer_signatures import SIGNED_LEVEL
from tidelog.service.security.token_bucket import Bucket
from tidelog.service.settings.security import SecuritySettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import ADMIN, CLUSTER_NAME, TEXT_BYTES_MAX, Right
from tidelog.storage.core.actions import DeleteKey
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.state.access import Access as AccessState
from tidelog.storage.state.access import Key, digest

if TYPE_CHECKING:
    from tidelog.service.security.oidc import Issuer

ADMIN_ID = "admin"
"""Id of the key in the settings, which is not in the state. Its principal is User:admin."""
TOKEN_ID = "token"
"""Stands for a key's id if a token proved the principal. Ids of keys are hexadecimal, so no key has
this id."""
NO_DIGEST = b""
HEADER_BYTES_MAX = 1024
TOKEN_BYTES_MAX = 8192
CALLERS_MAX = 10_000
"""Maximum cached callers; the next caller clears the cache. Quota buckets, and headers by which
callers are found, have the same maximum."""
DECISIONS_MAX = 1_000
"""Maximum cached decisions of one caller; the next decision clears them."""
DECISION_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of decisions that all callers cache; the next decision clears the decisions of all."""
DECISION_BYTES = 250
"""Bytes of a cached decision without its name: a tuple, and its part of a dict."""
REFRESHES_PER_S = 5.0
READING = frozenset({"GET", "HEAD", "OPTIONS"})
CONSOLE_HEADER = b"tidelog-console"
"""Pages of other sites cannot send this header, so a cookie alone does not permit a change."""


class Caller:
    """The CallerRights of a principal at an address, for all requests with the same credentials."""

    __slots__ = (
        "__weakref__",
        "_access",
        "_decisions",
        "_is_revoked",
        "_security",
        "_version",
        "_without",
        "credential",
        "host",
        "principal",
    )

    def __init__(
        self, security: "Security", principal: str, host: str, credential: Credential | None
    ) -> None:
        self.principal, self.host, self.credential = principal, host, credential
        self._security = security
        self._access: AccessState | None = None
        self._version = -1
        self._is_revoked = False
        self._decisions: dict[tuple[Right, str], bool] = {}
        self._without: set[str] = set()

    @property
    def is_super(self) -> bool:
        return self.principal in self._security.super_users

    @property
    def is_valid(self) -> bool:
        """Whether the credential has not expired, and its key still exists.

        The key is the API key (and the session) or, for a token, the issuer's key.
        """
        access = self._security.access
        if access.version != self._version or access is not self._access:
            self._renew(access)
        credential = self.credential
        if self._is_revoked or credential is None:
            return not self._is_revoked
        if not credential.expires_ms:
            return True
        if self._security.clock.now_ms() >= credential.expires_ms:
            return False
        return credential.key_id != TOKEN_ID or self._security.trusts(credential.digest)

    @property
    def proof(self) -> tuple[str, str, int]:
        credential = self.credential
        if credential is None:
            return ("", "", 0)
        return credential.key_id, credential.session_id, credential.expires_ms

    def check_valid(self) -> None:
        if not self.is_valid:
            why = "API key revoked, or the session has ended"
            if self.credential is not None and self.credential.key_id == TOKEN_ID:
                why = "the token has expired, or the issuer has withdrawn its key"
            raise self._security.refused("revoked", why)

    def may(self, right: Right, name: str = CLUSTER_NAME) -> bool:
        if not self.is_valid:
            return False
        decision = self._decisions.get((right, name))
        if decision is None:
            acls = self._security.access.acls
            decision = self.is_super or acls.allows(self.principal, self.host, right, name)
            if len(name) <= TEXT_BYTES_MAX:  # else no resource has this name
                self._cache(right, name, decision)
        return decision

    def _cache(self, right: Right, name: str, decision: bool) -> None:
        if len(self._decisions) >= DECISIONS_MAX:
            self._decisions.clear()
        self._security.reserve_decision(self, DECISION_BYTES + sys.getsizeof(name))
        self._decisions[right, name] = decision

    def forget_decisions(self) -> None:
        self._decisions.clear()

    async def check(self, right: Right, name: str = CLUSTER_NAME) -> None:
        if self.may(right, name):
            return
        await self._security.refresh()
        if self.may(right, name):
            return
        self.check_valid()
        self._security.counters.denied[right.resource_type] += 1
        raise forbidden(self.principal, right, name)

    def charge(self, quota: str, size: int = 0) -> None:
        bucket = self._bucket(quota)
        if bucket is None:
            return
        throttle_s = bucket.throttle_s(self._security.clock.boot_s())
        if throttle_s > 0:
            self._security.counters.throttled[quota] += 1
            raise QuotaExceeded(self.principal, quota, bucket.rate, throttle_s)
        bucket.charge(size)

    def has_quota(self, quota: str) -> bool:
        return self._bucket(quota) is not None

    def record(self, quota: str, size: float) -> None:
        bucket = self._bucket(quota)
        if bucket is not None:
            bucket.charge(size)

    def throttle_s(self, quota: str) -> float:
        bucket = self._bucket(quota)
        return 0.0 if bucket is None else bucket.throttle_s(self._security.clock.boot_s())

    def _bucket(self, quota: str) -> Bucket | None:
        """Return the quota's bucket, or None if the principal does not have the quota (`_without`).

        `is_valid` clears `_without` after a change of access.
        """
        if quota in self._without:
            return None
        bucket = self._security.bucket(quota, self.principal)
        if bucket is None:
            self._without.add(quota)
        return bucket

    def operations(self, resource_type: str, name: str) -> list[str]:
        return allowed_operations(self, resource_type, name)

    def _renew(self, access: AccessState) -> None:
        self._access, self._version = access, access.version
        self._decisions.clear()
        self._without.clear()
        credential = self.credential
        if credential is None:
            return
        if credential.key_id not in (ADMIN_ID, TOKEN_ID):
            key = access.keys.get(credential.key_id)
            self._is_revoked = key is None or key.digest != credential.digest
        if credential.session_id and credential.session_id not in access.keys:
            self._is_revoked = True


class Security:
    """The access checks of one broker with security on.

    `secret` is the cluster's secret. `issuer` is None if only keys prove a principal.
    """

    def __init__(
        self,
        broker: Broker,
        settings: SecuritySettings,
        secret: bytes,
        counters: HttpCounters,
        issuer: "Issuer | None" = None,
        turns: Turns | None = None,
    ) -> None:
        self._broker = broker
        self._secret = secret
        self.counters = counters
        self.clock = broker.clock
        self.super_users = super_users_of(settings)
        self._admin = digest(settings.admin_key.encode()) if settings.admin_key else None
        self._callers: dict[tuple[str, Credential | None, str], Caller] = {}
        self._shown: dict[tuple[Any, ...], Caller] = {}
        """The callers by the header or cookie that they show, and by address; callers of other
        brokers by principal, address and proof."""
        self._deciding: WeakSet[Caller] = WeakSet()
        self._decision_bytes = 0
        self._logins: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The locks of principals whose sessions begin."""
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._refreshes = Bucket(REFRESHES_PER_S, broker.clock.boot_s())
        self.cookie = session_cookie.cookie_name(broker.identity.cluster_id)
        self._issuer = issuer
        self.turns = turns or Turns()
        """The turns of answers to wrong logins, by address. Without them, the answers to thousands
        of connections are due in one iteration of the event loop, and take a second."""

    # -- admission

    async def admit(self, scope: MutableMapping[str, Any], access: Access) -> LogError | None:
        """Authenticate a request and put the caller's rights into its scope.

        If the access needs a caller and there is none, return the error. The caller of this method
        checks permissions.
        """
        try:
            header = None
            for key, value in scope["headers"]:
                if key == b"authorization":
                    header = value
                    break
            client = scope.get("client")
            host = client[0] if client else ""
            caller = None if header is None else self._shown.get((_kept(header), host))
            if caller is None or not caller.is_valid:
                caller = await self._identify(scope, access, header, host)
                if caller is None:
                    return None
            scope["rights"] = caller
            PRINCIPAL.set(caller.principal)  # of this request's task
        except LogError as error:
            return error
        return None

    async def _identify(
        self, scope: MutableMapping[str, Any], access: Access, header: bytes | None, host: str
    ) -> Caller | None:
        """Return the caller. If the request has no key and the route needs none, return None."""
        if header is not None:
            credential = await self._of_header(header)
            return self._remember((_kept(header), host), credential)
        headers = dict(scope["headers"])
        if _needs_no_key(scope, access):
            return None
        cookie = self._cookie(headers)
        # With a challenge of Basic, a browser would show its own dialog over the console's page.
        challenge = BEARER if CONSOLE_HEADER in headers else BASIC
        if cookie is None:
            raise self.refused(
                "missing", "authentication required: Authorization: Basic or Bearer", challenge
            )
        if scope["method"] not in READING and CONSOLE_HEADER not in headers:
            raise CrossSite
        key = (cookie.encode("latin-1"), host)
        cached = self._shown.get(key)
        if cached is not None and cached.is_valid:
            return cached
        session = session_cookie.parse(cookie)
        claimed = None if session is None else await self._of_session(session)
        if claimed is None:
            raise self.refused("session", "the session has expired: log in", challenge)
        return self._remember(key, claimed)

    async def log_in(self, secret: str) -> Credential:
        """Return the credential of this secret, and charge its principal a mutation.

        Raises Unauthenticated, QuotaExceeded.
        """
        sent = secret.encode("utf-8", "replace")[:HEADER_BYTES_MAX]
        credential = await self._of_secret(sent, BEARER)
        caller = self._caller(credential.principal, "", credential)
        refusal = charge_request(caller, is_mutation=True)
        if refusal is not None:
            raise refusal
        return credential

    async def begin_session(self, credential: Credential) -> tuple[Credential, str]:
        """Begin a session; return its credential and its cookie.

        One of a principal begins at a time, so that parallel logins do not begin more than
        SESSIONS_MAX.

        The session is a key of its own in the cluster's state, so each broker sees its end. The
        secret of this key is dropped. Raises the errors of a commit. **On a crash** before the
        cookie is sent, the key is useless, and a later login of the principal deletes it.
        """
        async with self._logins.setdefault(credential.principal, asyncio.Lock()):
            return await self._begin_session(credential)

    async def _begin_session(self, credential: Credential) -> tuple[Credential, str]:
        now_ms = self.clock.now_ms()
        keys = self.access.keys.values()
        for key_id in session_cookie.ended_by_login(keys, credential.principal, now_ms):
            await self._broker.access.change(DeleteKey(key_id))
        until_ms = now_ms + session_cookie.LIVES_MS
        until_ms = min(until_ms, credential.expires_ms or until_ms)
        key, _ = await self._broker.access.create_key(
            credential.principal, expires_ms=until_ms, note=session_cookie.NOTE
        )
        session = session_cookie.Session(credential.key_id, key.key_id, until_ms)
        cookie = session_cookie.sign(self._secret, session, credential.digest)
        return credential._replace(expires_ms=until_ms, session_id=key.key_id), cookie

    async def end_session(self, headers: Mapping[bytes, bytes]) -> str:
        """End the session of a request's cookie on all brokers.

        Return the session's principal, or "" if there is no session. Raises CrossSite and the
        errors of a commit.
        """
        cookie = self._cookie(headers)
        session = None if cookie is None else session_cookie.parse(cookie)
        claimed = None if session is None else await self._of_session(session)
        if claimed is None:
            return ""
        if CONSOLE_HEADER not in headers:
            raise CrossSite
        await self._broker.access.change(DeleteKey(claimed.session_id))
        return claimed.principal

    def _cookie(self, headers: Mapping[bytes, bytes]) -> str | None:
        cookies = headers.get(b"cookie", b"").decode("latin-1")
        return session_cookie.cookie_of(cookies, self.cookie) if cookies else None

    async def of_peer(self, principal: str, host: str, proof: tuple[str, str, int]) -> Caller:
        """Return the caller of a forwarded request, which another broker has authenticated.

        If security is off on that broker, the principal is empty, and the caller has only the
        rights of every client. Raises Unauthenticated if the key or the session has ended.
        """
        shown = (principal, host, proof)
        cached = self._shown.get(shown)
        if cached is not None and cached.is_valid:
            return cached
        caller = self._caller(principal, host, self._of_proof(principal, proof))
        if not caller.is_valid:
            await self.refresh()
            caller = self._caller(principal, host, self._of_proof(principal, proof))
        caller.check_valid()
        if principal and caller.credential is None:  # version 0.1: valid until the level rises
            return caller
        return self._show(shown, caller)

    def _of_proof(self, principal: str, proof: tuple[str, str, int]) -> Credential | None:
        """Return a credential that is valid only while its key and session are in the state."""
        key_id, session_id, expires_ms = proof
        if not key_id and (not principal or self._broker.state.level < SIGNED_LEVEL):
            return None  # the forwarding broker needs no keys, or has version 0.1
        key = self.access.keys.get(key_id)
        is_of_principal = key is not None and key.principal == principal
        digest_of_key = key.digest if key is not None and is_of_principal else NO_DIGEST
        is_odd_token = key_id == TOKEN_ID and (principal == ADMIN or not expires_ms)
        if is_odd_token or (key_id == ADMIN_ID and principal != ADMIN):
            key_id = ""
        return Credential(key_id, principal, digest_of_key, expires_ms, session_id)

    def _remember(self, shown: tuple[bytes, str], credential: Credential) -> Caller:
        """Return the caller, which the next request with the same header or cookie finds."""
        return self._show(shown, self._caller(credential.principal, _plain(shown[1]), credential))

    def _show(self, shown: tuple[Any, ...], caller: Caller) -> Caller:
        if len(self._shown) >= CALLERS_MAX:
            self._shown.clear()
        self._shown[shown] = caller
        return caller

    def _caller(self, principal: str, host: str, credential: Credential | None) -> Caller:
        """Return the cached caller, or a new one. Only a valid caller is cached."""
        key = (principal, credential, host)
        cached = self._callers.get(key)
        if cached is not None and cached.is_valid:
            return cached
        caller = Caller(self, principal, host, credential)
        if caller.is_valid:
            if len(self._callers) >= CALLERS_MAX:
                self._callers.clear()
            self._callers[key] = caller
        return caller

    async def _of_header(self, header: bytes) -> Credential:
        scheme, _, parameter = header.strip().partition(b" ")
        user: bytes | None = None
        secret = parameter.strip()
        if self._issuer is not None and scheme.lower() == b"bearer" and self._is_token(secret):
            token = await self._issuer.verify(secret)
            return Credential(TOKEN_ID, token.principal, token.thumbprint, token.expires_ms)
        if len(header) > HEADER_BYTES_MAX or scheme.lower() not in (b"basic", b"bearer"):
            raise self.refused("malformed", "Authorization is neither Basic nor Bearer")
        if scheme.lower() == b"basic":
            try:
                user, colon, secret = base64.b64decode(secret, validate=True).partition(b":")
            except (binascii.Error, ValueError):
                user, colon, secret = b"", b"", b""
            if not colon:
                raise self.refused("malformed", "Basic takes base64 of user:secret")
        credential = await self._of_secret(secret, BASIC)
        if user is not None and b"User:" + user != credential.principal.encode():
            raise self.refused("unknown", "invalid credentials: no key of this user")
        return credential

    def _is_token(self, secret: bytes) -> bool:
        has_parts = len(secret) <= TOKEN_BYTES_MAX and secret.count(b".") == 2
        return has_parts and self._find(digest(secret)) is None  # the admin key may have dots

    def trusts(self, thumbprint: bytes) -> bool:
        """Whether the issuer still has the key that signed a token.

        For a forwarded request, the thumbprint is empty, because the broker that forwards it checks
        the key.
        """
        return not thumbprint or (self._issuer is not None and self._issuer.trusts(thumbprint))

    async def _of_secret(self, secret: bytes, challenge: str) -> Credential:
        sha256 = digest(secret)
        credential = self._find(sha256)
        if credential is None:
            await self.refresh()
            credential = self._find(sha256)
        if credential is None:
            raise self.refused("unknown", "invalid credentials", challenge)
        if credential.expires_ms and self.clock.now_ms() >= credential.expires_ms:
            raise self.refused("expired", "API key expired", challenge)
        return credential

    def _find(self, sha256: bytes) -> Credential | None:
        # The lookup in a dict by digest takes a time that depends on the digest. That helps only an
        # attacker that can choose digests.
        if self._admin is not None and hmac.compare_digest(sha256, self._admin):
            return Credential(ADMIN_ID, ADMIN, self._admin, 0)
        key = self.access.key_of_digest(sha256)
        if key is None or not hmac.compare_digest(sha256, key.digest):
            return None
        return _credential(key)

    async def _of_session(self, session: session_cookie.Session) -> Credential | None:
        keys = self.access.keys
        if session.session_id not in keys:
            await self.refresh()
            keys = self.access.keys
        if session.key_id == ADMIN_ID and self._admin is not None:
            credential = Credential(ADMIN_ID, ADMIN, self._admin, 0)
        elif (key := keys.get(session.key_id)) is not None:
            credential = _credential(key)
        else:
            return None
        if session.session_id not in keys:
            return None
        if not session_cookie.is_signed(self._secret, session, credential.digest):
            return None
        until_ms = min(session.expires_ms, credential.expires_ms or session.expires_ms)
        credential = credential._replace(expires_ms=until_ms, session_id=session.session_id)
        return credential if self.clock.now_ms() < until_ms else None

    # -- what callers need

    @property
    def access(self) -> AccessState:
        return self._broker.state.access

    async def refresh(self) -> None:
        """Refresh the view before a rejection, at most REFRESHES_PER_S times a second.

        Raises Unavailable.
        """
        if self._refreshes.throttle_s(self.clock.boot_s()) == 0:
            self._refreshes.charge(1.0)
            await self._broker.refresh()

    def reserve_decision(self, caller: Caller, size: int) -> None:
        """Reserve bytes for a decision that the caller will cache.

        If all callers together have too many bytes, their decisions are cleared.
        """
        self._decision_bytes += size
        if self._decision_bytes > DECISION_BYTES_MAX:
            for deciding in self._deciding:
                deciding.forget_decisions()
            self._deciding.clear()
            self._decision_bytes = size
        self._deciding.add(caller)

    def bucket(self, quota: str, principal: str) -> Bucket | None:
        """Return the principal's token bucket. If the principal has no such quota, return None."""
        if not self.access.quotas:
            return None
        rate = self.access.quota(quota, principal)
        if rate is None:
            return None
        bucket = self._buckets.get((quota, principal))
        if bucket is None or bucket.rate != rate:
            if len(self._buckets) >= CALLERS_MAX:
                self._buckets.clear()
            bucket = self._buckets[quota, principal] = Bucket(rate, self.clock.boot_s())
        return bucket

    def refused(self, kind: str, why: str, challenge: str = BASIC) -> Unauthenticated:
        """Count the failure and return its error."""
        self.counters.auth_failures[kind] += 1
        return Unauthenticated(kind, why, challenge)


def _kept(header: bytes) -> bytes:
    """Return a header's key in the cache of callers: the header, or NUL and its digest.

    It is the digest if the header is longer than HEADER_BYTES_MAX. No header contains NUL.
    """
    return header if len(header) <= HEADER_BYTES_MAX else b"\0" + digest(header)


def _credential(key: Key) -> Credential:
    return Credential(key.key_id, key.principal, key.digest, key.expires_ms)


def _needs_no_key(scope: MutableMapping[str, Any], access: Access) -> bool:
    if access is RouteAccess.KEY_UNLESS_BROWSER:
        return b"text/html" in dict(scope["headers"]).get(b"accept", b"")
    return access is RouteAccess.PUBLIC


def _plain(host: str) -> str:
    """Return an IPv4 address without the prefix that a socket for both versions adds."""
    return host.removeprefix("::ffff:") if "." in host else host
