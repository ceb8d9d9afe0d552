"""Routes of keys and quotas, and the console's login, logout and `/me` (the caller).

They are under /tidelog/v1; no other REST proxy has them.

Only the response to the creation of a key has the key's secret. If security is off, every route
except `/me` responds as a Kafka cluster without an authorizer does. The routes of ACLs do the same.
"""

import asyncio
from http.cookies import Morsel
from typing import Annotated, Any, Literal

from fastapi import Header, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tidelog.service.formats.strict_bodies import StrictModel, WholeNumber
from tidelog.service.http.body_limit import BodyLimit
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.http.urls import client_url
from tidelog.service.operations.change_request import decided
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    EmptyListing,
    FreshBroker,
    Listing,
    RequiredSecurity,
)
from tidelog.service.security.authenticator import Caller
from tidelog.service.security.caller import Unauthenticated, rights_of
from tidelog.service.slices import in_order
from tidelog.storage.core.acls import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_NAME,
    DEFAULT,
    DESCRIBE,
    DESCRIBE_CONFIGS,
)
from tidelog.storage.runtime.observer import PRINCIPAL
from tidelog.storage.state.access import Key

WRONG_LOGIN_S = 1.0
"""Time that the broker waits before it refuses a login with an invalid key."""
TTL_S_MAX = 100 * 365 * 86_400

# -- the console's session


class Login(StrictModel):
    model_config = ConfigDict(hide_input_in_errors=True)
    key: str = Field(max_length=1024, description="the secret of a key")


class Me(BaseModel):
    """The caller. `operations` are the operations on the cluster that the caller may do."""

    security: Literal["off", "keys"]
    principal: str = ""
    is_super: bool = False
    expires_ms: int = Field(default=0, description="end of the session or key; 0: never")
    operations: list[str] = []


async def log_in(
    request: Request, response: Response, body: Login, security: RequiredSecurity
) -> Me:
    """Begin a session of a browser: set a cookie that the browser sends only to this site.

    The session is valid for twelve hours, or until the key expires if that is earlier.
    """
    try:
        credential = await security.log_in(body.key)
    except Unauthenticated:
        await asyncio.sleep(WRONG_LOGIN_S)  # slows down guesses; other clients do not wait
        await security.turns.come(request.client.host if request.client else "")
        raise
    PRINCIPAL.set(credential.principal)
    session, cookie = await decided(security.begin_session(credential))
    lives_s = max((session.expires_ms - security.clock.now_ms()) // 1000, 0)
    _set_cookie(request, response, security.cookie, cookie, lives_s)
    return _me(Caller(security, session.principal, "", session))


async def log_out(request: Request, security: RequiredSecurity) -> Response:
    """End the session. This broker ends it at once, other brokers when they apply the commit."""
    PRINCIPAL.set(await decided(security.end_session(dict(request.scope["headers"]))))
    response = Response(status_code=204)
    _set_cookie(request, response, security.cookie, "", 0)
    return response


async def get_me(request: Request) -> Me:
    """Show whether security is on, and the caller's principal."""
    rights = rights_of(request.scope)
    return _me(rights) if isinstance(rights, Caller) else Me(security="off")


def _me(caller: Caller) -> Me:
    return Me(
        security="keys",
        principal=caller.principal,
        is_super=caller.is_super,
        expires_ms=0 if caller.credential is None else caller.credential.expires_ms,
        operations=caller.operations(CLUSTER, CLUSTER_NAME),
    )


def _set_cookie(request: Request, response: Response, name: str, value: str, lives_s: int) -> None:
    """Set the cookie.

    Scripts cannot read it (HttpOnly), and requests from other sites do not carry it
    (SameSite=Strict). The cookie is Secure if the browser uses TLS, to this broker or to a
    balancer.
    """
    cookie: Morsel[str] = Morsel()
    cookie.set(name, value, value)
    cookie |= {"path": "/", "httponly": True, "samesite": "Strict", "max-age": str(lives_s)}
    if client_url(request.scope).proto == "https":
        cookie["secure"] = True
    response.headers["Set-Cookie"] = cookie.OutputString()
    response.headers["Cache-Control"] = "no-store"


# -- keys


class NewKey(StrictModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"principal": "User:alice", "note": "the nightly job"}]},
    )
    principal: str = Field(examples=["User:alice"])
    ttl_s: WholeNumber | None = Field(default=None, ge=1, le=TTL_S_MAX, description="null: never")
    note: str = Field(default="", description="free text")


class KeyData(BaseModel):
    """A key without its secret."""

    key_id: str
    principal: str
    created_ms: int
    expires_ms: int | None = Field(description="null: never")
    is_expired: bool
    note: str


class CreatedKey(KeyData):
    secret: str = Field(description="no other response has it")


async def list_keys(
    broker: FreshBroker, security: RequiredSecurity, empty: EmptyListing, page: WantedPage
) -> Listing[KeyData]:
    """All keys, oldest first."""
    now_ms, key_by_id = security.clock.now_ms(), broker.state.access.keys
    by_age = ((key.created_ms, key.key_id) for key in key_by_id.values())

    def shown(position: tuple[int, str]) -> KeyData | None:
        key = key_by_id.get(position[1])
        return None if key is None else KeyData(**_fields(key, now_ms))

    keys = await in_order(by_age, page.position(int, str))
    response: Listing[KeyData] = await answer_page(page, empty, keys, shown)
    return response


async def create_key(
    response: Response,
    body: NewKey,
    operations: BrokerOperations,
    change: CallerChange,
    security: RequiredSecurity,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=255,
            description="a repetition within ten minutes replaces the key of the first request, "
            "whose secret is then invalid: after a lost response there is one key",
        ),
    ] = None,
) -> CreatedKey:
    """Create a key of a principal. Only this response has its secret."""
    key, secret = await operations.access.create_key(
        change, body.principal, body.ttl_s, body.note, idempotency_key
    )
    response.headers["Cache-Control"] = "no-store"
    return CreatedKey(**_fields(key, security.clock.now_ms()), secret=secret)


async def delete_key(
    key_id: str, operations: BrokerOperations, change: CallerChange, _: RequiredSecurity
) -> Response:
    """Revoke a key and its sessions.

    This broker refuses them at once, other brokers when they apply the commit, after
    `poll_interval_ms` at most.
    """
    if await operations.access.delete_key(change, key_id) is None:
        raise NoSuchResource(f"Key {key_id} cannot be found.")
    return Response(status_code=204)


def _fields(key: Key, now_ms: int) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "principal": key.principal,
        "created_ms": key.created_ms,
        "expires_ms": key.expires_ms or None,
        "is_expired": bool(key.expires_ms) and key.expires_ms <= now_ms,
        "note": key.note,
    }


# -- quotas

Rate = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="bytes a second; null: as `<default>`, or no limit if that is null",
    ),
]


RequestRate = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="requests a second; null: as `<default>`, or no limit if that is null",
    ),
]
Percentage = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="CPU time of requests, in percent of one thread; null: as `<default>`, or no "
        "limit if that is null",
    ),
]
Share = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="maximum number (bytes for `offset_metadata_bytes`) that the principal may "
        "have; null: as `<default>`, or a quarter of the cluster's bound if that is null",
    ),
]


class QuotaRates(StrictModel):
    """Rates and the percentage apply to each broker, the other quotas to the whole cluster."""

    producer_byte_rate: Rate
    consumer_byte_rate: Rate
    request_rate: RequestRate
    mutation_rate: RequestRate
    request_percentage: Percentage
    topics: Share
    partitions: Share
    keys: Share
    offsets: Share
    offset_metadata_bytes: Share
    members: Share
    patterns: Share
    idempotency_keys: Share
    producers: Share
    producer_partitions: Share


class QuotaData(QuotaRates):
    """The quotas of a principal.

    Each broker applies rates and the percentage by itself. The other quotas are shares of the
    cluster's bounds. A quota that a principal does not have is taken from `<default>`.
    """

    principal: str = Field(examples=["User:alice", DEFAULT])


async def list_quotas(
    broker: FreshBroker, _: RequiredSecurity, empty: EmptyListing, page: WantedPage
) -> Listing[QuotaData]:
    """All quotas, by principal."""
    quotas_by_principal = broker.state.access.quotas

    def shown(principal: str) -> QuotaData | None:
        quotas = quotas_by_principal.get(principal)
        return None if quotas is None else QuotaData(principal=principal, **quotas)

    principals = await in_order(quotas_by_principal, page.key(str))
    response: Listing[QuotaData] = await answer_page(page, empty, principals, shown)
    return response


async def set_quotas(
    principal: str,
    body: QuotaRates,
    operations: BrokerOperations,
    change: CallerChange,
    _: RequiredSecurity,
) -> QuotaData:
    """Set quotas of a principal.

    A quota that the body omits does not change. The value null removes a quota.
    """
    rates: dict[str, int | None] = body.model_dump(exclude_unset=True)
    quotas = await operations.access.set_quotas(change, principal, rates)
    return QuotaData(principal=principal, **quotas)


async def delete_quotas(
    principal: str, operations: BrokerOperations, change: CallerChange, _: RequiredSecurity
) -> Response:
    """Remove the quotas of a principal, so that the default quotas apply to it again."""
    if not await operations.access.delete_quotas(change, principal):
        raise NoSuchResource(f"Quotas of {principal} cannot be found.")
    return Response(status_code=204)


_DESCRIBE = Permission(DESCRIBE, CLUSTER)
_ALTER = Permission(ALTER, CLUSTER)
_DESCRIBE_QUOTAS = Permission(DESCRIBE_CONFIGS, CLUSTER)
_ALTER_QUOTAS = Permission(ALTER_CONFIGS, CLUSTER)
_PUBLIC = RouteAccess.PUBLIC
_LABEL = "security"
_ERRORS = {
    400: "40002: security is off, or a value is invalid",
    401: "40101: no valid key",
    403: "40301: the key's principal is not authorized",
    503: ERRORS[503],
}
_CHANGE_ERRORS = _ERRORS | CHANGE_ERRORS
_DELETE_ERRORS = _CHANGE_ERRORS | {404: ERRORS[404]}
_LOGIN_BODY = BodyLimit(4 * 1024, 100)
_LOGIN_DOC = RouteDoc(_ERRORS | {401: "40101: no key has this secret, or the key has expired"})
_LOGOUT_DOC = RouteDoc(_ERRORS, 204)
_DOC = RouteDoc(_ERRORS)
_CREATE_DOC = RouteDoc(_CHANGE_ERRORS | {422: "the Idempotency-Key was used for another key"}, 201)
_CHANGE_DOC = RouteDoc(_CHANGE_ERRORS)
_DELETE_DOC = RouteDoc(_DELETE_ERRORS, 204)

ROUTES = (
    # Public: a client that logs in has no session yet.
    Route("POST", "/login", log_in, _PUBLIC, _LABEL, TIDELOG, _LOGIN_DOC, body=_LOGIN_BODY),
    Route("POST", "/logout", log_out, _PUBLIC, _LABEL, TIDELOG, _LOGOUT_DOC),
    Route("GET", "/me", get_me, RouteAccess.ANY_KEY, _LABEL, TIDELOG, _DOC),
    # The permissions are those that Kafka requires for SCRAM credentials and client quotas.
    Route("GET", "/keys", list_keys, _DESCRIBE, _LABEL, TIDELOG, _DOC),
    Route("POST", "/keys", create_key, _ALTER, _LABEL, TIDELOG, _CREATE_DOC),
    Route("DELETE", "/keys/{key_id}", delete_key, _ALTER, _LABEL, TIDELOG, _DELETE_DOC),
    Route("GET", "/quotas", list_quotas, _DESCRIBE_QUOTAS, _LABEL, TIDELOG, _DOC),
    Route("PUT", "/quotas/{principal}", set_quotas, _ALTER_QUOTAS, _LABEL, TIDELOG, _CHANGE_DOC),
    Route(
        "DELETE", "/quotas/{principal}", delete_quotas, _ALTER_QUOTAS, _LABEL, TIDELOG, _DELETE_DOC
    ),
)
