"""`X-Request-Id`: the client's, if it is sane, in every answer; else one of ours, in errors alone.

An id costs as much as a lookup in a dict where the client sends none, so hot routes make none.
"""

import re

from tidelog.storage.io.clock import Clock

REQUEST_ID = b"x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Nothing that could forge a line of the log."""


def sane(given: bytes) -> bytes:
    """Return the id that a client has sent, or nothing."""
    return given if _SANE.fullmatch(given) else b""


def id_of_error(given: str | bytes, clock: Clock) -> str:
    """Return the client's id, or a new one."""
    octets = given.encode("latin-1", "replace") if isinstance(given, str) else given
    return sane(octets).decode() or clock.new_id().hex()
