"""The header `X-Request-Id`: the client's id in every answer, or a new id in an error's answer.

A client's id is used if it is sane (`_SANE`). Only errors get a new id, so the header costs all
other requests one lookup in a dict.
"""

import re
from collections.abc import Mapping

from tidelog.storage.runtime.clock import Clock

REQUEST_ID = b"x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Ids that cannot forge a line of the log."""


def sane(request_id: bytes) -> bytes:
    """Return the id that a client has sent, or nothing if the id is not sane."""
    return request_id if _SANE.fullmatch(request_id) else b""


def echo(headers: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes]] | tuple[()]:
    """Return the headers to add to the response: the client's request id if it is sane."""
    if REQUEST_ID in headers and (request_id := sane(headers[REQUEST_ID])):
        return ((REQUEST_ID, request_id),)
    return ()


def id_of_error(request_id: str | bytes, clock: Clock) -> str:
    """Return the client's id if it is sane, else a new id."""
    octets = request_id.encode("latin-1", "replace") if isinstance(request_id, str) else request_id
    return sane(octets).decode() or clock.new_id().hex()
