"""Patterns of subscriptions: regular expressions over the names of topics, in bounded time.

RE2 and not `re`: its time is linear to the name, whatever a client sends (`(a+)+$` would hold the
loop for ever). It takes what people write for topics in Java's dialect, and refuses what needs
backtracking (lookaround, back references). Never asked by `apply`: what an engine finds may change
with its version, so the names that were found are what an entry carries.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import re2

from storage.errors import InvalidRequest
from storage.group_members import PATTERN_CHARS_MAX

SHOWN_MAX = 100


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that the whole pattern fits, sorted. Raises InvalidRequest for no pattern."""
    expression = _compiled(pattern)
    return sorted(name for name in names if expression.fullmatch(name))


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    if len(pattern) > PATTERN_CHARS_MAX:
        raise InvalidRequest(f"a pattern has {PATTERN_CHARS_MAX} characters at most")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise InvalidRequest(
            f"topic_pattern {pattern[:SHOWN_MAX]!r} is no pattern: {why}"
        ) from None
