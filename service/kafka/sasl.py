"""SASL PLAIN: a client proves its principal by the user and the secret of an API key.

The keys are those of HTTP, and so are the checks (service.security.authenticator). A wrong secret
is answered after FAILED_DELAY_S, because librdkafka connects again at once. If the key expires, the
answer gives the time that is left, and the client authenticates again on the same connection.
"""

import asyncio
import base64
import re
from collections.abc import Callable
from typing import Any

from tidelog.service.http.route import RouteAccess
from tidelog.service.kafka.apis import SASL_HANDSHAKE, Api
from tidelog.service.kafka.client import Client
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.handshake import (
    ApiVersionsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import NO_RIGHTS, CallerRights

MECHANISM = "PLAIN"
FAILED_DELAY_S = 1.0
FIRST_WITH_SOFTWARE = 3
"""The first version of ApiVersions that names the client's library."""
LIFETIME_MS_MAX = 0x7FFF_FFFF
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_CHARS_MAX = 255


class Authentication:
    """The state of one connection's authentication."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._has_mechanism = False
        self._rights: CallerRights | None = None
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the delay of an answer: the connection has ended."""
        self._closed.set()

    def is_current(self) -> bool:
        """Whether the client has proved its principal, and the key has not expired."""
        if self._rights is None:
            return False
        expires_ms = self._rights.proof[2]
        return not expires_ms or self._security.clock.now_ms() < expires_ms

    async def answer(
        self,
        request: SaslHandshakeRequest | SaslAuthenticateRequest,
        client: Client,
        on_success: Callable[[CallerRights], None],
    ) -> Any:
        """Answer a request of the handshake. Call `on_success` with the rights of the client."""
        if isinstance(request, SaslHandshakeRequest):
            self._has_mechanism = request.mechanism == MECHANISM
            code = Code.NONE if self._has_mechanism else Code.UNSUPPORTED_SASL_MECHANISM
            return SaslHandshakeResponse(error_code=code, mechanisms=[MECHANISM])
        if not self._has_mechanism:
            return _failure(Code.ILLEGAL_SASL_STATE, "send SaslHandshake with the mechanism PLAIN")
        rights, why = await self._rights_of(request.auth_bytes, client.host)
        before = self._rights
        if rights is not None and before is not None and before.principal != rights.principal:
            rights, why = None, "a connection cannot change its principal"
        if rights is None:
            await self._delay()
            return _failure(Code.SASL_AUTHENTICATION_FAILED, why)
        self._rights = rights
        self._has_mechanism = False
        on_success(rights)
        expires_ms = rights.proof[2]
        left_ms = expires_ms - self._security.clock.now_ms() if expires_ms else 0
        return SaslAuthenticateResponse(
            error_code=Code.NONE,
            error_message=None,
            auth_bytes=b"",
            session_lifetime_ms=max(min(left_ms, LIFETIME_MS_MAX), 0),
        )

    async def _rights_of(self, message: bytes, host: str) -> tuple[CallerRights | None, str]:
        """Return the rights of `authzid NUL user NUL secret`, or None and the reason."""
        authzid, _, rest = message.partition(b"\0")
        user, separator, secret = rest.partition(b"\0")
        if not separator or not user:
            return None, "PLAIN takes: empty, NUL, the user of a key, NUL, the key"
        if authzid not in (b"", user):
            return None, "the authorization id must be empty, or equal to the user"
        header = b"Basic " + base64.b64encode(user + b":" + secret)
        scope: dict[str, Any] = {"headers": [(b"authorization", header)], "client": (host, 0)}
        refusal = await self._security.admit(scope, RouteAccess.ANY_KEY, None)
        if refusal is not None:
            return None, str(refusal)
        rights: CallerRights = scope.get("rights", NO_RIGHTS)
        return rights, ""

    async def _delay(self) -> None:
        try:
            async with asyncio.timeout(FAILED_DELAY_S):
                await self._closed.wait()
        except TimeoutError:
            return


def _failure(code: Code, why: str) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(error_code=code, error_message=why, auth_bytes=b"")


def refusal_without_security(api: Api) -> SaslHandshakeResponse | SaslAuthenticateResponse:
    """Return the answer to a request of SASL at a broker that needs no keys."""
    if api.key == SASL_HANDSHAKE:
        return SaslHandshakeResponse(error_code=Code.ILLEGAL_SASL_STATE, mechanisms=[])
    return _failure(Code.ILLEGAL_SASL_STATE, "this broker needs no keys: use PLAINTEXT or SSL")


def is_software(text: str) -> bool:
    """Whether a client's library may have this name, or this version."""
    return len(text) <= _SOFTWARE_CHARS_MAX and _SOFTWARE.fullmatch(text) is not None


def invalid_software() -> ApiVersionsResponse:
    """Return the answer to a request with a name that is not allowed."""
    return ApiVersionsResponse(error_code=Code.INVALID_REQUEST, api_keys=[])
