"""Match topic names with the pattern of a subscription, in bounded time.

The engine is RE2, not `re`. RE2's time is linear in the name's length for every pattern, but `re`
would block the event loop at `(a+)+$`. RE2 accepts the usual topic patterns of Java's dialect. It
rejects patterns that need backtracking (lookaround, back references). `apply` must not use this
module, because another version of RE2 may give another result. So an entry contains the matching
names.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import re2

from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.group_members import PATTERN_CHARS_MAX

SHOWN_MAX = 100
COMPILED_MAX = 1_000
"""Maximum number of cached compiled patterns, each at most ~150 KB. To compile a pattern of 1,000
characters takes 4 ms."""


def check(pattern: str) -> None:
    """Raise InvalidRequest if the pattern is not valid."""
    _compiled(pattern)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return, sorted, the names that match from start to end. Raises InvalidRequest."""
    expression = _compiled(pattern)
    return sorted(name for name in names if expression.fullmatch(name))


@lru_cache(maxsize=COMPILED_MAX)
def _compiled(pattern: str) -> Any:
    if len(pattern) > PATTERN_CHARS_MAX:
        raise InvalidRequest(f"a topic pattern has {PATTERN_CHARS_MAX} characters at most")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise InvalidRequest(f"topic_pattern {pattern[:SHOWN_MAX]!r} is not valid: {why}") from None
