"""Bearer tokens of one OIDC issuer: JWTs that the broker verifies with a public key of the issuer.

A broker fetches the issuer's keys (JWKS) when it starts, when a token names an unknown key, and
when a token is used while the keys are older than REFRESH_S. It begins at most one fetch in
FETCH_EACH_S, so clients cannot make it send more requests to the issuer (I10). The start does not
wait for the issuer. If fetches fail, the broker uses the last keys until they are KEPT_S old. Then
it refuses each token, because the issuer may have withdrawn the token's key meanwhile.

PyJWT verifies signature, algorithm, issuer and audience. PyJWT's client for JWKS is not used,
because it blocks and follows redirects. The broker compares times with its own clock, accepts only
algorithms with public keys, and requires `exp`. No message has a part of a token.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpcore  # noqa: F401  # else httpx's first client imports it: 20 ms of the loop
import httpx
import jwt

from tidelog.service.security.caller import BEARER, Unauthenticated
from tidelog.service.settings.security import SecuritySettings, is_protected
from tidelog.storage.core.acls import ADMIN, EVERYBODY, check_principal
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.runtime.clock import Clock

log = logging.getLogger("tidelog")

REFRESH_S = 300.0
FETCH_EACH_S = 30.0
FETCH_S = 10.0
"""Timeout of a fetch, which is one request, or two requests with discovery."""
KEPT_S = 6 * 3600.0
SKEW_MS = 30_000
"""How far the issuer's clock may be ahead, for `nbf` only. `exp` is exact."""
JWKS_BYTES_MAX = 1024 * 1024
KEYS_MAX = 100
TIME_S_MAX = 10**11
DISCOVERY = "/.well-known/openid-configuration"
ALGORITHMS: Mapping[tuple[Any, Any], tuple[str, ...]] = {
    ("RSA", None): ("RS256", "PS256"),
    ("EC", "P-256"): ("ES256",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Algorithms by type and curve of a key. A key verifies only tokens of these algorithms, even if a
token's header names another algorithm."""
ALLOWED = frozenset(name for names in ALGORITHMS.values() for name in names)
THUMBPRINT = ("crv", "e", "kty", "n", "x", "y")
"""Members that identify a key (RFC 7638)."""
NEVER = frozenset({ADMIN, EVERYBODY})
"""Principals that no token proves, whatever `oidc_principal_prefix` is."""
CHALLENGE = f'{BEARER}, error="invalid_token"'
FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RecursionError)
"""Errors of a fetch. OSError includes a timeout."""


class Token(NamedTuple):
    """The principal of a verified token, its expiry, and the thumbprint of its signing key."""

    principal: str
    expires_ms: int
    thumbprint: bytes


class _Key(NamedTuple):
    key: jwt.PyJWK
    thumbprint: bytes


class Issuer:
    """The issuer in the settings.

    One per broker, owned by its event loop. `failures` counts bad tokens by kind.
    """

    def __init__(self, settings: SecuritySettings, clock: Clock, failures: Counter[str]) -> None:
        self._failures = failures
        self._name = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_principal_claim
        self._prefix = settings.oidc_principal_prefix
        self._jwks_url = settings.oidc_jwks_url
        self._clock = clock
        self._keys: Mapping[tuple[str, str], _Key] = {}
        """By id (`kid`) and algorithm."""
        self._thumbprints: frozenset[bytes] = frozenset()
        self._fetched_s = -math.inf
        self._began_s = -math.inf
        self._fetching: asyncio.Task[None] | None = None
        self._tls: ssl.SSLContext | None = None
        self._is_failing = False

    async def verify(self, token: bytes) -> Token:
        """Verify the token and return its content.

        Raises Unauthenticated. Raises Unavailable if this broker has no keys of the issuer, or if
        they are too old.
        """
        try:
            return await self._verified(token)
        except Unauthenticated as error:
            self._failures[error.kind] += 1
            raise

    async def _verified(self, token: bytes) -> Token:
        with _refusing():
            text = token.decode("ascii")
            header = jwt.get_unverified_header(text)
        key_id, algorithm = header.get("kid", ""), header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in ALLOWED:
            raise _bad(f"its algorithm is not one of {', '.join(sorted(ALLOWED))}")
        key = await self._key(key_id, algorithm)
        with _refusing():
            claims = jwt.decode(
                text,
                key.key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._name,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,  # PyJWT would use its own clock
                    "verify_nbf": False,
                    "verify_iat": False,
                    "enforce_minimum_key_length": True,
                },
            )
        return Token(self._principal(claims), self._expires_ms(claims), key.thumbprint)

    def trusts(self, thumbprint: bytes) -> bool:
        """Whether the issuer still has the key.

        If the keys are old, begin a fetch, but do not wait for it.
        """
        age_s = self._clock.boot_s() - self._fetched_s
        if age_s > REFRESH_S:
            self.begin_fetch()
        return age_s <= KEPT_S and thumbprint in self._thumbprints

    def begin_fetch(self) -> "asyncio.Task[None] | None":
        """Return the running fetch, or begin one.

        Return None if the last fetch began less than FETCH_EACH_S ago.
        """
        if self._fetching is None:
            now_s = self._clock.boot_s()
            if now_s - self._began_s < FETCH_EACH_S:
                return None
            self._began_s = now_s
            self._fetching = asyncio.create_task(self._fetch(), name="tidelog-oidc")
        return self._fetching

    # -- claims

    def _principal(self, claims: Mapping[str, Any]) -> str:
        name = claims.get(self._claim)
        if not isinstance(name, str) or not name:
            raise _bad(f"its claim {self._claim!r} is missing, empty or not a string")
        if self._claim == "email" and claims.get("email_verified", True) not in (True, "true"):
            raise _bad("its email is not verified")
        principal = f"User:{self._prefix}{name}"
        if principal in NEVER or check_principal(principal) is not None:
            raise _bad(f"its claim {self._claim!r} is not a name that a token may have")
        return principal

    def _expires_ms(self, claims: Mapping[str, Any]) -> int:
        now_ms = self._clock.now_ms()
        expires_ms = _time_ms(claims, "exp")
        if now_ms >= expires_ms:
            raise _bad("it has expired", "expired")
        if "nbf" in claims and now_ms + SKEW_MS < _time_ms(claims, "nbf"):
            raise _bad("it is not valid yet")
        return expires_ms

    # -- keys

    async def _key(self, key_id: str, algorithm: str) -> _Key:
        key = self._keys.get((key_id, algorithm))
        if key is None or not self.trusts(key.thumbprint):
            if (fetching := self.begin_fetch()) is not None:
                await asyncio.shield(fetching)
            key = self._keys.get((key_id, algorithm))
        if self._clock.boot_s() - self._fetched_s > KEPT_S:
            raise Unavailable(f"the keys of the issuer {self._name} cannot be fetched: retry")
        if key is None:
            raise _bad("the issuer has no such key")
        return key

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(FETCH_S):
                keys = await self._download()
        except FAULTS as error:
            if not self._is_failing:
                why = str(error) or type(error).__name__
                log.warning("keys of the issuer %s cannot be fetched: %s", self._name, why)
            self._is_failing = True
            return
        finally:
            self._fetching = None
        if self._is_failing:
            log.warning("keys of the issuer %s can be fetched again", self._name)
        self._is_failing = False
        self._keys, self._fetched_s = keys, self._clock.boot_s()
        self._thumbprints = frozenset(key.thumbprint for key in keys.values())

    async def _download(self) -> Mapping[tuple[str, str], _Key]:
        """Raises FAULTS."""
        url = self._jwks_url or await self._discovered()
        keys = _usable(await self._json(url))
        if not keys:
            raise ValueError(f"{url} has no key for {', '.join(sorted(ALLOWED))}")
        return keys

    async def _discovered(self) -> str:
        url = self._name.rstrip("/") + DISCOVERY
        document = await self._json(url)
        if document.get("issuer") != self._name:
            raise ValueError(f"{url} has another issuer: oidc_issuer must be equal to its `issuer`")
        keys_url = document.get("jwks_uri")
        if not isinstance(keys_url, str) or not is_protected(keys_url):
            raise ValueError(f"jwks_uri in {url} is not https")
        return keys_url

    async def _json(self, url: str) -> dict[str, Any]:
        """Return the JSON object at the URL. Redirects are not followed. Raises FAULTS."""
        # In a thread, because the context reads some hundred certificates.
        if self._tls is None and not url.startswith("http:"):
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        body = bytearray()
        # Without a context, the URL has the scheme http and this machine's host (is_protected).
        async with (
            httpx.AsyncClient(verify=self._tls or False, timeout=FETCH_S) as client,
            client.stream("GET", url, follow_redirects=False) as answer,
        ):
            if answer.status_code != 200:
                raise ValueError(f"{url} answers {answer.status_code}")
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > JWKS_BYTES_MAX:
                    raise ValueError(f"{url} has more than {JWKS_BYTES_MAX} bytes")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"{url} is not a JSON object")
        return document


def _usable(jwks: Mapping[str, Any]) -> dict[tuple[str, str], _Key]:
    """Return the keys that may verify tokens, by id and algorithm. Raises ValueError."""
    jwk_list = jwks.get("keys")
    if not isinstance(jwk_list, list):
        raise ValueError("the document of keys has no list `keys`")
    keys = {}
    for data in jwk_list[:KEYS_MAX]:
        if not isinstance(data, dict) or data.get("use", "sig") != "sig" or "d" in data:
            continue
        thumbprint = _thumbprint(data)
        for algorithm in ALGORITHMS.get((str(data.get("kty")), _curve(data)), ()):
            if data.get("alg", algorithm) == algorithm:
                with contextlib.suppress(jwt.PyJWTError, ValueError, TypeError):
                    key = jwt.PyJWK(data, algorithm)
                    keys[str(data.get("kid", "")), algorithm] = _Key(key, thumbprint)
    return keys


def _curve(data: Mapping[str, Any]) -> str | None:
    curve = data.get("crv")
    return None if curve is None else str(curve)


def _thumbprint(data: Mapping[str, Any]) -> bytes:
    members = {name: data[name] for name in THUMBPRINT if name in data}
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).digest()


def _time_ms(claims: Mapping[str, Any], name: str) -> int:
    value = claims[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= TIME_S_MAX:  # also false for a NaN
        raise _bad(f"its claim {name!r} is not a time in seconds")
    return int(value * 1000)


def _bad(why: str, kind: str = "token") -> Unauthenticated:
    """Return the error for a token that does not prove a principal."""
    return Unauthenticated(kind, f"invalid token: {why}", CHALLENGE)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise Unauthenticated for each error of the library; the message has no part of the token."""
    try:
        yield
    except jwt.InvalidSignatureError:
        raise _bad("its signature is wrong") from None
    except jwt.InvalidAudienceError:
        raise _bad("it is for another audience") from None
    except jwt.InvalidIssuerError:
        raise _bad("it has another issuer") from None
    except jwt.InvalidKeyError:
        raise _bad("the issuer's key is too short") from None
    except jwt.MissingRequiredClaimError as error:
        raise _bad(f"it has no claim {error.claim!r}") from None
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _bad("it is malformed") from None
