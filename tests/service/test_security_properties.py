"""Whatever is sent as a key or a cookie: it is refused, and never a failure of the broker."""

import base64
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service import keyed
from tests.support.properties import examples
from tests.tools.fuzz.http_target import Served
from tidelog.service.http.errors import CrossSite
from tidelog.service.http.route import RouteAccess
from tidelog.service.security import session_cookie
from tidelog.service.security.authenticator import Caller
from tidelog.service.security.caller import Unauthenticated


@pytest.fixture(scope="module")
def served() -> Any:
    served = Served(**keyed.SETTINGS)
    yield served
    served.close()


def admitted(served: Served, *headers: tuple[bytes, bytes]) -> Any:
    """Why not, or who."""
    security = served.broker.app._security
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/topics",
        "headers": list(headers),
        "client": ("10.1.2.3", 4),
    }
    refusal = served._runner.run(security.admit(scope, RouteAccess.ANY_KEY))
    return scope.get("rights") if refusal is None else refusal


@examples(300)
@given(
    st.binary(max_size=80), st.sampled_from([b"", b"Basic ", b"Bearer ", b"basic", b"Negotiate "])
)
@example(base64.b64encode(b"admin:"), b"Basic ")
@example(base64.b64encode(b":" + keyed.ADMIN_KEY.encode()), b"Basic ")
@example(base64.b64encode(b"admin\xff:" + keyed.ADMIN_KEY.encode()), b"Basic ")
@example(b"\xff" * 80, b"Basic ")
@example(b" \t", b"Bearer ")
def test_random_headers_are_rejected(served: Served, text: bytes, scheme: bytes) -> None:
    refusal = admitted(served, (b"authorization", scheme + text))
    assert isinstance(refusal, Unauthenticated)
    assert keyed.ADMIN_KEY not in str(refusal)


@examples(300)
@given(st.binary(max_size=80), st.booleans())
@example(b"v1.admin.99999999999999." + b"0" * 64, True)
@example("v1.admin.².".encode("latin-1"), True)
@example(b"v1...", True)
def test_random_cookies_are_rejected(served: Served, text: bytes, is_named: bool) -> None:
    security = served.broker.app._security
    name = security.cookie.encode() + b"=" if is_named else b""
    refusal = admitted(served, (b"cookie", name + text))
    assert isinstance(refusal, Unauthenticated | CrossSite)


def test_right_ones_are(served: Served) -> None:
    security = served.broker.app._security
    credential = served._runner.run(security.log_in(keyed.ADMIN_KEY))
    _, cookie = served._runner.run(security.begin_session(credential))
    for header in (
        (b"authorization", f"Bearer {keyed.ADMIN_KEY}".encode()),
        (b"cookie", f"a=b; {security.cookie}={cookie}; c=d".encode()),
    ):
        caller = admitted(served, header)
        assert isinstance(caller, Caller)
        assert (caller.principal, caller.host) == ("User:admin", "10.1.2.3")


@examples(200)
@given(st.text(max_size=60), st.integers(0, 2**53), st.binary(min_size=32, max_size=32))
def test_session_is_what_was_signed_and_nothing_else(
    key_id: str, expires_ms: int, digest: bytes
) -> None:
    signed = session_cookie.Session(key_id, "its-id", expires_ms)
    session = session_cookie.parse(session_cookie.sign(b"secret", signed, digest))
    if "." in key_id or not key_id.isascii() or expires_ms >= 10**15:
        assert session is None or session.key_id == key_id
        return
    assert session is not None
    assert session._replace(mac="") == signed
    assert session_cookie.is_signed(b"secret", session, digest)
    assert not session_cookie.is_signed(b"other", session, digest)
    assert not session_cookie.is_signed(b"secret", session, bytes([digest[0] ^ 1]) + digest[1:])
    assert not session_cookie.is_signed(b"secret", session._replace(key_id=key_id + "x"), digest)
    assert not session_cookie.is_signed(b"secret", session._replace(session_id="other"), digest)
    assert not session_cookie.is_signed(
        b"secret", session._replace(expires_ms=expires_ms + 1), digest
    )
