"""The level of the format: which elements, actions and bytes the objects of a cluster may have.

A cluster has one level. The first element of an entry's header, and of a checkpoint's state, is the
level at which it was written. A reader checks this element before it decodes the rest. FORMAT.md
has the table of levels. `tidelog upgrade` raises the level one step at a time. For each step it
writes an entry that has the next level and no commits. The level is never lowered. Pure.
"""

import msgspec

from tidelog.storage.core.errors import Corrupt, NewerLevel

FIRST = 1
"""The level of tidelog 0.1."""
NEWEST = 4
"""The newest level that this version reads and writes; new clusters begin at it."""
RELEASED = 1
"""The newest level of a release: its bytes never change."""

KAFKA = 4
"""The level from which chunks may have record batches of Kafka's producers."""
TOPIC_DEFAULTS = 4
"""The level from which the cluster has defaults of topic configs."""

_FIXARRAY, _FIXARRAY_MASK, _FIXINT_MAX = 0x90, 0xF0, 0x7F


class _Leading(msgspec.Struct, array_like=True):
    """The first element of a header or a state.

    The decoder skips all other elements, which may be of any type.
    """

    level: int


_decoder = msgspec.msgpack.Decoder(_Leading)


def check(level: int, key: str) -> None:
    """Raise NewerLevel if only newer versions have the level, Corrupt if no version has it."""
    if level > NEWEST:
        raise NewerLevel(key, level, NEWEST)
    if level < FIRST:
        raise Corrupt(key, f"it has level {level} of the format; the first is {FIRST}")


def leading(body: bytes, key: str) -> int:
    """Return the level of a MessagePack array, its first element. Raises NewerLevel, Corrupt."""
    if len(body) > 1 and body[0] & _FIXARRAY_MASK == _FIXARRAY and body[1] <= _FIXINT_MAX:
        level = body[1]  # faster than the decoder: this runs for each entry
    else:
        try:
            level = _decoder.decode(body).level
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(key, f"it does not begin with a level: {error}") from error
    check(level, key)
    return level
