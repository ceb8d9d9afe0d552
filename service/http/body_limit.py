"""The limit of a body without records: its bytes after it is unpacked, and its JSON values.

A route declares its limit, and the router writes it into the scope of a request. Such a body is
parsed on the event loop. Its bytes alone do not bound the costs: `[{},{},...]` takes 20 times its
size in memory, and a large error for each item. So the values are counted before they are parsed.
"""

from typing import NamedTuple

from tidelog.service.http.request import HttpRequest, Scope
from tidelog.storage.core.errors import RecordTooLarge

_SCOPE_KEY = "body_limit"


class TooManyValues(RecordTooLarge):
    """A body has more JSON values than its route can use."""


class BodyLimit(NamedTuple):
    """The largest body of a request of a route."""

    bytes_max: int
    """Of the unpacked body."""
    values_max: int
    """Maximum JSON values. An object or an array counts, too; the name of a field does not."""

    def with_items(self, count: int, bytes_each: int, values_each: int) -> "BodyLimit":
        """Return the limit of a body that also has so many items of a list."""
        return BodyLimit(self.bytes_max + count * bytes_each, self.values_max + count * values_each)


SMALL_BODY = BodyLimit(64 * 1024, 4_000)
"""Enough for every request that does not list partitions, topics or ACLs."""


def set_limit(scope: Scope, limit: BodyLimit | None) -> None:
    """Set the limit of the request's body, if its route has one."""
    if limit is not None:
        scope[_SCOPE_KEY] = limit


async def limited_body(call: HttpRequest) -> bytes:
    """Read a body without records, up to the limit of its route.

    Raises TooManyValues, and what HttpRequest.body raises.
    """
    limit: BodyLimit = call.scope.get(_SCOPE_KEY, SMALL_BODY)
    body = await call.body(limit.bytes_max)
    values = values_bound(body)
    if values > limit.values_max:
        raise TooManyValues(
            f"request body has up to {values} JSON values, the limit of this route is "
            f"{limit.values_max}: send several smaller requests"
        )
    return body


def values_bound(body: bytes) -> int:
    """Return a number that the JSON values of a body do not exceed.

    Each value is the only one, or the first in an array or an object, or it follows a comma.
    Brackets and commas in strings count, too. UTF-16 and UTF-32 have the same bytes among others.
    """
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
