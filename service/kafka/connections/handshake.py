"""The first requests of a connection: versions of the APIs, and SASL PLAIN.

With SASL, a client proves its principal by the user and the secret of an API key. The keys are
those of HTTP, and so are the checks (service.security.authenticator). A wrong secret is answered
after FAILED_DELAY_S, because librdkafka connects again at once. If the key has a time of expiry,
the answer gives the time until then, and the client authenticates again on the same connection.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tidelog.service.http.route import RouteAccess
from tidelog.service.kafka.apis import API_VERSIONS, SASL_HANDSHAKE, Api, versions_answer
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.handshake import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import ALL_RIGHTS, NO_RIGHTS, CallerRights
from tidelog.storage.core.errors import LogError

MECHANISM = "PLAIN"
FAILED_DELAY_S = 1.0
FIRST_WITH_SOFTWARE = 3
"""The first version of ApiVersions that names the client's library."""
LIFETIME_MS_MAX = 0x7FFF_FFFF
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_CHARS_MAX = 255


class Handshake:
    """The library and the principal of one connection's client."""

    def __init__(
        self,
        apis: Mapping[int, Api],
        security: Security | None,
        on_change: Callable[[], object],
        on_refusal: Callable[[str, ApiClient, LogError], object],
    ) -> None:
        """`on_change` is called when the client has named its library, or proved its principal.

        `on_refusal` gets the API, the client and the error of a failed authentication.
        """
        self.software = ""
        self.rights: CallerRights = ALL_RIGHTS if security is None else NO_RIGHTS
        self._apis = apis
        self._security = security
        self._on_change = on_change
        self._on_refusal = on_refusal
        self._has_mechanism = False
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the delay of an answer: the connection has ended."""
        self._closed.set()

    @property
    def is_current(self) -> bool:
        """Whether the client may use the APIs: it needs no key, or its key has not expired."""
        if self._security is None:
            return True
        if self.rights is NO_RIGHTS:
            return False
        expires_ms = self.rights.proof[2]
        return not expires_ms or self._security.clock.now_ms() < expires_ms

    def serve(
        self, api: Api, request: Any, client: ApiClient
    ) -> ApiVersionsResponse | SaslHandshakeResponse | Coroutine[Any, Any, Any]:
        """Answer ApiVersions, SaslHandshake or SaslAuthenticate."""
        if api.key == API_VERSIONS:
            return self._versions(request, client)
        if api.key == SASL_HANDSHAKE:
            return self._begin(request)
        return self._authenticate(request.auth_bytes, client)

    def _versions(self, request: ApiVersionsRequest, client: ApiClient) -> ApiVersionsResponse:
        if client.version >= FIRST_WITH_SOFTWARE:
            name, version = request.client_software_name, request.client_software_version
            if not (_is_software(name) and _is_software(version)):
                return ApiVersionsResponse(error_code=Code.INVALID_REQUEST, api_keys=[])
            self.software = f"{name} {version}"
            self._on_change()
        return versions_answer(self._apis, is_known=True)

    def _begin(self, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
        if self._security is None:
            return SaslHandshakeResponse(error_code=Code.ILLEGAL_SASL_STATE, mechanisms=[])
        self._has_mechanism = request.mechanism == MECHANISM
        code = Code.NONE if self._has_mechanism else Code.UNSUPPORTED_SASL_MECHANISM
        return SaslHandshakeResponse(error_code=code, mechanisms=[MECHANISM])

    async def _authenticate(self, message: bytes, client: ApiClient) -> SaslAuthenticateResponse:
        if self._security is None:
            return _failure(Code.ILLEGAL_SASL_STATE, "this broker needs no keys: do not use SASL")
        if not self._has_mechanism:
            return _failure(Code.ILLEGAL_SASL_STATE, "send SaslHandshake with the mechanism PLAIN")
        try:
            rights = await self._rights_of(self._security, message, client.host)
        except LogError as error:
            self._on_refusal("SaslAuthenticate", client, error)
            await self._delay()
            await self._security.turns.come(client.host)
            return _failure(Code.SASL_AUTHENTICATION_FAILED, str(error))
        self.rights = rights
        self._has_mechanism = False
        self._on_change()
        expires_ms = rights.proof[2]
        left_ms = expires_ms - self._security.clock.now_ms() if expires_ms else 0
        return SaslAuthenticateResponse(
            error_code=Code.NONE,
            error_message=None,
            auth_bytes=b"",
            session_lifetime_ms=max(min(left_ms, LIFETIME_MS_MAX), 0),
        )

    async def _rights_of(self, security: Security, message: bytes, host: str) -> CallerRights:
        """Return the rights of `authzid NUL user NUL secret`.

        Raises Unauthenticated, and the errors of a view that cannot be refreshed.
        """
        authzid, _, credentials = message.partition(b"\0")
        user, separator, secret = credentials.partition(b"\0")
        if not separator or not user:
            why = "PLAIN takes: empty, NUL, the user of a key, NUL, the key"
            raise security.refused("malformed", why)
        if authzid not in (b"", user):
            why = "the authorization id must be empty, or equal to the user"
            raise security.refused("malformed", why)
        header = b"Basic " + base64.b64encode(user + b":" + secret)
        scope: dict[str, Any] = {"headers": [(b"authorization", header)], "client": (host, 0)}
        refusal = await security.admit(scope, RouteAccess.ANY_KEY)
        if refusal is not None:
            raise refusal
        rights: CallerRights = scope["rights"]
        if self.rights is not NO_RIGHTS and rights.principal != self.rights.principal:
            raise security.refused("session", "a connection cannot change its principal")
        return rights

    async def _delay(self) -> None:
        try:
            async with asyncio.timeout(FAILED_DELAY_S):
                await self._closed.wait()
        except TimeoutError:
            return


def _failure(code: Code, why: str) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(error_code=code, error_message=why, auth_bytes=b"")


def _is_software(text: str) -> bool:
    return len(text) <= _SOFTWARE_CHARS_MAX and _SOFTWARE.fullmatch(text) is not None
