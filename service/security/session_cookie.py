"""The session cookie of a browser after a login.

It has the id of the key of the login, the id of the session, the time at which the session expires,
and a signature with the cluster's secret.

Pure. A broker accepts a cookie that any broker of the cluster signed. The signature covers the
digest of the key, so if a key is deleted, or the admin key is changed, its sessions end. The
cluster's state stores a session as a key of its own, with the note NOTE. A logout, a later login or
`tidelog keys delete` deletes this key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from tidelog.storage.state.access import Key

COOKIE_VERSION = "v2"
NOTE = "session of the console"
"""The note of the keys that are sessions."""
SESSIONS_MAX = 10
"""Maximum sessions of one principal; the next login ends the oldest (I10)."""
LIVES_MS = 12 * 3_600_000
NAME_PREFIX = "tidelog_"
COOKIE_CHARS_MAX = 512


class Session(NamedTuple):
    """The content of a cookie. `is_signed` verifies `mac`."""

    key_id: str
    session_id: str
    expires_ms: int
    mac: str = ""


def cookie_name(cluster_id: str) -> str:
    """Return a name that differs for each cluster.

    Browsers send a cookie to every port of a host, so two clusters on one host need two names.
    """
    return NAME_PREFIX + hashlib.sha256(cluster_id.encode()).hexdigest()[:8]


def sign(secret: bytes, session: Session, digest: bytes) -> str:
    """Return the cookie's value. `digest` is the digest of the key."""
    return f"{_signed(session)}{_mac(secret, session, digest)}"


def ended_by_login(keys: Iterable[Key], principal: str, now_ms: int) -> list[str]:
    """Return the ids of the sessions that a login of the principal ends.

    These are the expired sessions, and the oldest sessions if there would be more than SESSIONS_MAX
    with the new session.
    """
    own = [key for key in keys if key.note == NOTE and key.principal == principal]
    own.sort(key=lambda key: key.created_ms)
    too_many = max(len(own) - SESSIONS_MAX + 1, 0)
    return [
        key.key_id
        for number, key in enumerate(own)
        if number < too_many or key.expires_ms <= now_ms
    ]


def parse(cookie: str) -> Session | None:
    """Return the content of a session cookie. If `cookie` has another form, return None."""
    parts = cookie.split(".") if len(cookie) <= COOKIE_CHARS_MAX else []
    if len(parts) != 5 or parts[0] != COOKIE_VERSION or not cookie.isascii():
        return None
    _, key_id, session_id, expires, mac = parts
    if not expires.isdigit() or len(expires) > 15:
        return None
    return Session(key_id, session_id, int(expires), mac)


def is_signed(secret: bytes, session: Session, digest: bytes) -> bool:
    """Return whether a broker of this cluster signed the session for the key of `digest`."""
    return hmac.compare_digest(_mac(secret, session, digest), session.mac)


def cookie_of(header: str, name: str) -> str | None:
    """Return the value of the cookie `name` in a Cookie header. If it is absent, return None."""
    for part in header.split(";"):
        part_name, _, value = part.strip().partition("=")
        if part_name == name:
            return value
    return None


def _signed(session: Session) -> str:
    return f"{COOKIE_VERSION}.{session.key_id}.{session.session_id}.{session.expires_ms}."


def _mac(secret: bytes, session: Session, digest: bytes) -> str:
    return hmac.new(secret, _signed(session).encode() + digest, hashlib.sha256).hexdigest()
