"""The choices of one run: given ones first, then the first option each time."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """One option of a choice, and what it takes of the bound."""

    name: str
    preemptions: int = 0
    faults: int = 0


class Bound(NamedTuple):
    """The most preemptions and faults of one run, and of both together."""

    preemptions: int
    faults: int
    both: int

    def covers(self, other: "Bound") -> bool:
        return all(mine >= of for mine, of in zip(self, other, strict=True))

    def without(self, option: Option) -> "Bound":
        return Bound(
            self.preemptions - option.preemptions,
            self.faults - option.faults,
            self.both - option.preemptions - option.faults,
        )


class Diverged(RuntimeError):
    """The same choices have led to another choice: a run depends on more than its choices."""


class Choices:
    """`counts` and `marks` are of the choices so far.

    How many options there were, and a hash of all options up to there.
    """

    def __init__(self, given_choices: Sequence[int], bound: Bound, mark: bytes = b"") -> None:
        """`mark` is what another run had before the last of the given choices."""
        self.left = bound
        self.taken: list[int] = []
        self.counts: list[int] = []
        self.marks: list[bytes] = []
        self.names: list[str] = []
        self._given = given_choices
        self._mark = mark
        self._hash = hashlib.blake2b(digest_size=8)

    def choose(self, subject: str, options: Sequence[Option]) -> int:
        """Return the index of one that the bound allows.

        The first must cost nothing. No choice is counted if there is only one.
        """
        allowed = [
            index for index, option in enumerate(options) if min(self.left.without(option)) >= 0
        ]
        if len(allowed) == 1:
            return allowed[0]
        position = len(self.taken)
        for index in allowed:
            self._hash.update(f"{subject}: {options[index].name};".encode())
        self.marks.append(self._hash.digest())
        if position == len(self._given) - 1 and self._mark not in {b"", self.marks[position]}:
            raise Diverged(
                f"choice {position}, {subject}, of {[options[index].name for index in allowed]}"
            )
        number = self._given[position] if position < len(self._given) else 0
        if number >= len(allowed):
            raise Diverged(f"choice {position}, {subject}, has no option {number}")
        option = options[allowed[number]]
        self.taken.append(number)
        self.counts.append(len(allowed))
        self.names.append(f"{subject}: {option.name}")
        self._hash.update(f"{option.name}.".encode())
        self.left = self.left.without(option)
        return allowed[number]
