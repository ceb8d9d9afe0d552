"""The loops over bytes of clients: in C (native.c), or else in Python (plain_byte_loops).

Python's run if the installation had no compiler. Their contracts are in _native.pyi. Callers do not
know which run; the costs say how long they take.

A build of other code than this installation's is not used: its functions may take and return
something else.
"""

from typing import TYPE_CHECKING

from tidelog.storage.codec.plain_byte_loops import VERSION


def _why_slow() -> str:
    try:
        from tidelog.storage.codec import _native
    except ImportError:
        return "the installation had no C compiler"
    version = getattr(_native, "VERSION", 0)
    if version != VERSION:
        return f"its version is {version}, not {VERSION}: install tidelog again"
    return ""


WHY_SLOW = _why_slow()
"""Why the loops in C are not used; empty if they are."""

if TYPE_CHECKING or not WHY_SLOW:
    from tidelog.storage.codec import _native as _chosen
else:
    from tidelog.storage.codec import plain_byte_loops as _chosen

walk, fields, headers, write = _chosen.walk, _chosen.fields, _chosen.headers, _chosen.write
murmur2, murmur2_column = _chosen.murmur2, _chosen.murmur2_column

RECORD_COST, BYTE_COST = (2_000, 1.0) if WHY_SLOW else (5, 0.06)
"""The time of `walk` for a record and for each of its bytes, in units of about 3 ns."""
INLINE_UNPACKED, INLINE_HEADERS = (1 << 16, 300) if WHY_SLOW else (1 << 20, 20_000)
"""The most unpacked bytes and headers of a request that the event loop may read: a few ms. The cost
cannot be seen in packed bytes: 105 of them may be 100,000 headers."""
