"""A fuzz target: a decoder, valid bytes to begin with, and a check that holds for any input.

`check` returns when the bytes were refused by one of our errors or came to a value that holds; all
else it lets through is a finding. The same targets serve pytest (tests/tools/fuzz/test_targets.py)
and atheris (tests/tools/fuzz/run.py).
"""

from collections.abc import Callable
from typing import NamedTuple

INPUT_BYTES_MAX = 64 * 1024
"""Of what is drawn: what large input does is for tests/tools/fuzz/test_memory.py."""


class Target(NamedTuple):
    """`seeds` are valid; `examples` is how many pytest draws."""

    name: str
    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes], None]
    examples: int = 60


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")
