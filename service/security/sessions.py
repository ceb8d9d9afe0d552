"""The session cookie of a browser after a login: a key, a session and its end, signed with the
cluster's secret.

Pure. A broker accepts a cookie that any broker of the cluster signed. The signature covers the
digest of the key: if a key is deleted, or the admin key is changed, its sessions end. The session
has an id in the cluster's state, which a logout deletes.
"""

import hashlib
import hmac
from typing import NamedTuple

COOKIE_VERSION = "v2"
LIVES_MS = 12 * 3_600_000
NAME_PREFIX = "tidelog_"
COOKIE_CHARS_MAX = 512


class Session(NamedTuple):
    """The content of a cookie. The caller compares `mac` with the digest of the key."""

    key_id: str
    session_id: str
    expires_ms: int
    mac: str = ""


def cookie_name(cluster_id: str) -> str:
    """A cookie is sent to every port of a host: two clusters there need two names."""
    return NAME_PREFIX + hashlib.sha256(cluster_id.encode()).hexdigest()[:8]


def sign(secret: bytes, session: Session, digest: bytes) -> str:
    """Return the cookie's value; `digest` is that of the key."""
    return f"{_signed(session)}{_mac(secret, session, digest)}"


def parse(cookie: str) -> Session | None:
    """Return the content of a cookie; None if its form is not that of a session cookie."""
    parts = cookie.split(".") if len(cookie) <= COOKIE_CHARS_MAX else []
    if len(parts) != 5 or parts[0] != COOKIE_VERSION or not cookie.isascii():
        return None
    _, key_id, session_id, expires, mac = parts
    if not expires.isdigit() or len(expires) > 15:
        return None
    return Session(key_id, session_id, int(expires), mac)


def is_signed(secret: bytes, session: Session, digest: bytes) -> bool:
    """Whether a broker of this cluster has said so, of this key."""
    return hmac.compare_digest(_mac(secret, session, digest), session.mac)


def cookie_of(header: str, name: str) -> str | None:
    """One cookie's value in a Cookie header."""
    for part in header.split(";"):
        found, _, value = part.strip().partition("=")
        if found == name:
            return value
    return None


def _signed(session: Session) -> str:
    return f"{COOKIE_VERSION}.{session.key_id}.{session.session_id}.{session.expires_ms}."


def _mac(secret: bytes, session: Session, digest: bytes) -> str:
    return hmac.new(secret, _signed(session).encode() + digest, hashlib.sha256).hexdigest()
