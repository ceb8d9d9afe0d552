"""Keys, quotas and the console's login: ours, under /tidelog/v1; no dialect has routes for them.

A key's secret is in one answer, that of its creation, and never again anywhere. Where security is
off the answer is that of a cluster without an authorizer, as for ACLs.
"""

import logging
from http.cookies import Morsel
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.caller import rights_of
from service.errors import NoSuchResource, documented
from service.paths import origin
from service.security import Caller, Security
from service.topics import CHANGE_ERRORS, ERRORS, Asking, FreshLog, decided
from storage.access import DEFAULT, QUOTAS, Key
from storage.acls import CLUSTER, CLUSTER_NAME
from storage.entry import DeleteKey, SetQuotas
from storage.errors import InvalidRequest

log = logging.getLogger("tidelog.access")

PREFIX = "/tidelog/v1"
SWITCHED_OFF = "SecurityDisabledException: No Authorizer is configured on the broker."
TTL_S_MAX = 100 * 365 * 86_400
LOGIN_ERRORS = documented({401: "40101: no key has this secret, or it has expired"})


async def switched_on(request: Request) -> Security:
    """Raises InvalidRequest where security is off."""
    security: Security | None = request.app.state.security
    if security is None:
        raise InvalidRequest(SWITCHED_OFF)
    return security


SwitchedOn = Annotated[Security, Depends(switched_on)]
router = APIRouter(
    prefix=PREFIX,
    tags=["security"],
    responses=documented(
        {
            400: "40002: security is off, or a value cannot be",
            401: "40101: no key that holds",
            403: "40301: the key's owner may not",
            503: "the object store does not answer: try again",
        }
    ),
)


# -- the console's session


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    key: str = Field(max_length=1024, description="the secret of a key")


class Me(BaseModel):
    """Who asks. `operations` are those on the cluster."""

    security: Literal["off", "keys"]
    principal: str = ""
    is_super: bool = False
    expires_ms: int = Field(default=0, description="end of the session or key; 0: none")
    operations: list[str] = []


@router.post("/login", responses=LOGIN_ERRORS)
async def log_in(request: Request, response: Response, body: Login, security: SwitchedOn) -> Me:
    """Begin a session of a browser: a cookie that only this site gets back, for twelve hours or as
    long as the key holds."""
    by, cookie, until_ms = await security.log_in(body.key)
    lives_s = max((until_ms - security.now_ms()) // 1000, 0)
    _set_cookie(request, response, security.cookie, cookie, lives_s)
    return _me(Caller(security, by.principal, "", by._replace(expires_ms=until_ms)))


@router.post("/logout", status_code=204)
async def log_out(request: Request, security: SwitchedOn) -> Response:
    """End it."""
    response = Response(status_code=204)
    _set_cookie(request, response, security.cookie, "", 0)
    return response


@router.get("/me")
async def get_me(request: Request) -> Me:
    """Whether security is on, and who asks."""
    rights = rights_of(request.scope)
    return _me(rights) if isinstance(rights, Caller) else Me(security="off")


def _me(caller: Caller) -> Me:
    return Me(
        security="keys",
        principal=caller.principal,
        is_super=caller.is_super,
        expires_ms=0 if caller.by is None else caller.by.expires_ms,
        operations=caller.operations(CLUSTER, CLUSTER_NAME),
    )


def _set_cookie(request: Request, response: Response, name: str, value: str, lives_s: int) -> None:
    """HttpOnly: no script reads it; SameSite=Strict: no other site has it sent; Secure wherever
    the browser came over TLS, here or at the balancer."""
    cookie: Morsel[str] = Morsel()
    cookie.set(name, value, value)
    cookie |= {"path": "/", "httponly": True, "samesite": "Strict", "max-age": str(lives_s)}
    where = origin(request.headers, request.url.path, proto=request.url.scheme, server="localhost")
    if where.proto == "https":
        cookie["secure"] = True
    response.headers["Set-Cookie"] = cookie.OutputString()
    response.headers["Cache-Control"] = "no-store"


# -- keys


class NewKey(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"principal": "User:alice", "note": "the nightly job"}]},
    )
    principal: str = Field(examples=["User:alice"])
    ttl_s: int | None = Field(default=None, ge=1, le=TTL_S_MAX, description="none: no end")
    note: str = Field(default="", description="for people")


class KeyData(BaseModel):
    """A key, without its secret: nobody has that but who was told it."""

    key_id: str
    principal: str
    created_ms: int
    expires_ms: int | None = Field(description="null: never")
    is_expired: bool
    note: str


class CreatedKey(KeyData):
    secret: str = Field(description="never told again")


@router.get("/keys")
async def list_keys(broker: FreshLog, security: SwitchedOn) -> list[KeyData]:
    """All keys, the oldest first."""
    now_ms = security.now_ms()
    return [KeyData(**_shown(key, now_ms)) for key in broker.state.access.keys.values()]


@router.post("/keys", status_code=201, responses=CHANGE_ERRORS)
async def create_key(
    response: Response, body: NewKey, broker: FreshLog, security: SwitchedOn, asking: Asking
) -> CreatedKey:
    """Make a key for a principal. The answer has its secret, once."""
    now_ms = security.now_ms()
    expires_ms = 0 if body.ttl_s is None else now_ms + body.ttl_s * 1000
    key, secret = await decided(
        broker.access.create_key(body.principal, expires_ms=expires_ms, note=body.note)
    )
    log.info("%s created key %s of %s", asking.principal, key.key_id, key.principal)
    response.headers["Cache-Control"] = "no-store"
    return CreatedKey(**_shown(key, now_ms), secret=secret)


@router.delete("/keys/{key_id}", status_code=204, responses=CHANGE_ERRORS | {404: ERRORS[404]})
async def delete_key(key_id: str, broker: FreshLog, _: SwitchedOn, asking: Asking) -> Response:
    """From now on nobody is known by it, and its sessions are over: here at once, on other brokers
    as soon as they hear of it, which is a moment, and `poll_interval_ms` at most."""
    key = broker.state.access.keys.get(key_id)
    if key is None:
        raise NoSuchResource(f"Key {key_id} cannot be found.")
    await decided(broker.access.submit(DeleteKey(key_id)))
    log.info("%s deleted key %s of %s", asking.principal, key_id, key.principal)
    return Response(status_code=204)


def _shown(key: Key, now_ms: int) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "principal": key.principal,
        "created_ms": key.created_ms,
        "expires_ms": key.expires_ms or None,
        "is_expired": bool(key.expires_ms) and key.expires_ms <= now_ms,
        "note": key.note,
    }


# -- quotas

Rate = Annotated[int | None, Field(default=None, description="bytes a second; null: none")]


class Rates(BaseModel):
    model_config = ConfigDict(extra="forbid")
    producer_byte_rate: Rate
    consumer_byte_rate: Rate


class QuotaData(Rates):
    """Of each broker by itself. `<default>` is for whoever has none of that name."""

    principal: str = Field(examples=["User:alice", DEFAULT])


@router.get("/quotas")
async def list_quotas(broker: FreshLog, _: SwitchedOn) -> list[QuotaData]:
    """All quotas, by principal."""
    held = sorted(broker.state.access.quotas.items())
    return [QuotaData(principal=principal, **rates) for principal, rates in held]


@router.put("/quotas/{principal}", responses=CHANGE_ERRORS)
async def set_quotas(
    principal: str, body: Rates, broker: FreshLog, _: SwitchedOn, asking: Asking
) -> QuotaData:
    """Set a principal's quotas: what is not given stays, null is none of its own."""
    rates: dict[str, int | None] = body.model_dump(exclude_unset=True)
    await decided(broker.access.submit(SetQuotas(principal, rates)))
    log.info("%s set quotas of %s: %s", asking.principal, principal, rates)
    return QuotaData(principal=principal, **broker.state.access.quotas.get(principal, {}))


@router.delete("/quotas/{principal}", status_code=204, responses=CHANGE_ERRORS | {404: ERRORS[404]})
async def delete_quotas(
    principal: str, broker: FreshLog, _: SwitchedOn, asking: Asking
) -> Response:
    """The principal has the default ones again."""
    if principal not in broker.state.access.quotas:
        raise NoSuchResource(f"Quotas of {principal} cannot be found.")
    await decided(broker.access.submit(SetQuotas(principal, dict.fromkeys(QUOTAS))))
    log.info("%s removed the quotas of %s", asking.principal, principal)
    return Response(status_code=204)
