"""Routes of the console's login and logout, and `/me` (the caller).

If security is off, only `/me` responds.
"""

import asyncio
from http.cookies import Morsel
from typing import Literal

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tidelog.service.formats.strict_bodies import StrictModel
from tidelog.service.http.body_limit import BodyLimit
from tidelog.service.http.route import TIDELOG, Route, RouteAccess, RouteDoc
from tidelog.service.http.urls import client_url
from tidelog.service.operations.change_request import decided
from tidelog.service.routes.dependencies import (
    SECURITY_ERRORS,
    SECURITY_LABEL,
    RequiredSecurity,
)
from tidelog.service.security.authenticator import Caller
from tidelog.service.security.caller import Unauthenticated, rights_of
from tidelog.storage.core.acls import (
    CLUSTER,
    CLUSTER_NAME,
)
from tidelog.storage.runtime.request_context import PRINCIPAL

WRONG_LOGIN_S = 1.0
"""Time that the broker waits before it refuses a login with an invalid key."""


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


_PUBLIC = RouteAccess.PUBLIC


_LOGIN_BODY = BodyLimit(4 * 1024, 100)


_LOGIN_DOC = RouteDoc(
    SECURITY_ERRORS | {401: "40101: no key has this secret, or the key has expired"}
)


_LOGOUT_DOC = RouteDoc(SECURITY_ERRORS, 204)

ROUTES = (
    # Public: a client that logs in has no session yet.
    Route("POST", "/login", log_in, _PUBLIC, SECURITY_LABEL, TIDELOG, _LOGIN_DOC, body=_LOGIN_BODY),
    Route("POST", "/logout", log_out, _PUBLIC, SECURITY_LABEL, TIDELOG, _LOGOUT_DOC),
    Route(
        "GET",
        "/me",
        get_me,
        RouteAccess.ANY_KEY,
        SECURITY_LABEL,
        TIDELOG,
        RouteDoc(SECURITY_ERRORS),
    ),
)
