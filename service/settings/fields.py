"""A setting as a field of a dataclass: default, documentation, and the check of its value."""

import dataclasses
from typing import Any

from tidelog.service.quantities import DURATIONS, SIZES, with_unit
from tidelog.storage.core.errors import LogError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Values of a setting that is true or false, by their text in lower case."""


class BadSettings(LogError):
    """The settings cannot be used; the message names the setting and the reason."""


def setting(
    default: Any,
    doc: str,
    *,
    low: int | None = None,
    high: int | None = None,
    words: str = "",
    is_secret: bool = False,
) -> Any:
    checks = {"doc": doc, "low": low, "high": high, "words": words.split(), "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=checks, repr=not is_secret)


def check(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raise BadSettings if the value is out of the field's range. If the field has a list of words,
    raise BadSettings for a value that is not in the list."""
    low, high, words = (field.metadata[key] for key in ("low", "high", "words"))
    if low is not None and value < low:
        raise BadSettings(f"{field.name}: {value} is below {low}")
    if high is not None and value > high:
        raise BadSettings(f"{field.name}: {value} is above {high}")
    if words and value not in words:
        raise BadSettings(f"{field.name}: {value!r} is none of {', '.join(words)}")


def whole_number(name: str, text: str) -> int:
    """Return the value of a setting that is a number. If the name says that it is a duration or a
    size, the text may have a unit: `7d`, `1GiB`. Raises BadSettings."""
    try:
        return int(with_unit(name, text))
    except ValueError:
        kinds = {"ms": f"duration: give {DURATIONS}", "bytes": f"size: give {SIZES}"}
        kind = next((kinds[word] for word in name.split("_") if word in kinds), "whole number")
        raise BadSettings(f"{name}: {text!r} is not a {kind}") from None
