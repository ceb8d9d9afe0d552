"""A setting as a field of a dataclass: default, documentation, and the check of its value."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tidelog.service.quantities import parser_of, with_unit
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import LogSettings

LOG = LogSettings()
"""The defaults of the parts of a broker."""
MIB = 1024 * 1024
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
"""`int` accepts more: `1_0`, blanks, digits of other scripts."""
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Values of a setting that is true or false, by their text in lower case."""


class BadSettings(LogError):
    """The settings cannot be used; the message names the setting and the reason."""


def setting(
    doc: str,
    *,
    default: str | int | bool = "",
    limits: tuple[int, int | None] = (0, None),
    words: str = "",
    is_secret: bool = False,
) -> Any:
    """Return the field of a setting.

    `limits` are the least and the greatest of a number, `words` are all values of a text.
    """
    checks = {"doc": doc, "limits": limits, "words": words.split(), "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=checks, repr=not is_secret)


@dataclasses.dataclass(frozen=True)
class Section:
    """Settings of one subject. Each field is a `setting`. Raises BadSettings for the first problem."""

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise BadSettings(problem)

    def problems(self) -> Iterator[str]:
        """Yield why these settings cannot be used. A section appends the relations of its fields."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            (low, high), words = field.metadata["limits"], field.metadata["words"]
            if field.type is int and value < low:
                yield f"{name}: {value} is below {low}"
            if field.type is int and high is not None and value > high:
                yield f"{name}: {value} is above {high}"
            if words and value not in words:
                yield f"{name}: {value!r} is none of {', '.join(words)}"


def ms_of(seconds: float) -> int:
    return round(1000 * seconds)


def names_in(text: str) -> list[str]:
    """Return the names in a list that `;` separates."""
    return [name.strip() for name in text.split(";") if name.strip()]


def whole_number(name: str, text: str) -> int:
    """Return the value of a setting that is a number.

    If the name says that it is a duration or a size, the text may have a unit: `7d`, `1GiB`. Raises
    BadSettings.
    """
    try:
        number = with_unit(name, text)
        if not _INTEGER.fullmatch(number):
            raise ValueError(f"{text!r} is not a whole number")
        return int(number)
    except ValueError as error:
        why = error if parser_of(name) else f"{text!r} is not a whole number"
        raise BadSettings(f"{name}: {why}") from None
