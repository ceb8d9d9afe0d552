"""The network of a simulation: what may happen to one message."""

import enum
from typing import NamedTuple


class Air(NamedTuple):
    """How likely messages are lost (they, or their answers), reset or doubled, and how slow.

    `wrong`: how likely the bytes of an object that a peer sends are wrong.
    """

    lost: float = 0.0
    reset: float = 0.0
    doubled: float = 0.0
    median_s: float = 0.002
    wrong: float = 0.0


class Fate(enum.Enum):
    """The fate of one message."""

    GOOD = "good"
    LOST = "lost"
    ANSWER_LOST = "answer lost"
    RESET = "reset"
    DOUBLED = "doubled"


class Refusal(Exception):
    """No process listens there: the message did not arrive."""


class Silence(Exception):
    """No answer, or the connection broke: the outcome is unknown."""
