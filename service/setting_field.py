"""A setting as a field of a dataclass: its default, its documentation and its bounds."""

import dataclasses
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    low: int | None = None,
    high: int | None = None,
    words: str = "",
    is_secret: bool = False,
) -> Any:
    """Return the field. `words` are all its values, separated by blanks; empty: any text."""
    checks = {"doc": doc, "low": low, "high": high, "words": words.split(), "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=checks, repr=not is_secret)
