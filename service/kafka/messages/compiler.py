"""Decoders and encoders of one message and version, compiled from its class at the first use.

A decoder is a plain Python function. One `struct` call reads neighbour fields of a fixed size, with
the length that follows them. A varint of one byte needs no call. `memoryview` fields are slices of
the frame, not copies. A decoder checks an array's length against the bytes left before it makes the
list, and the end of the message against the end of the frame. A slice over the end of the frame is
too short; the check of the end refuses it, too.

`decoder_source` and `encoder_source` write the source; a traceback shows it.
"""

import functools
import linecache
import struct
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tidelog.service.kafka.messages import decoder_source, encoder_source, primitives
from tidelog.service.kafka.messages.schema import Message

M = TypeVar("M", bound=Message)
Decoder = Callable[[bytes | bytearray, int], M]
Encoder = Callable[[M], list[bytes | memoryview]]

_PRIMITIVES = {name: getattr(primitives, name) for name in vars(primitives) if name[0] != "_"}


def decoder(message: type[M], version: int, *, to_the_end: bool = True) -> Decoder[M]:
    """Return `decode(frame, position) -> message`, which raises no error except `MalformedMessage`.

    The message must end where the frame ends, unless `to_the_end` is false. Slices of `memoryview`
    fields keep the whole frame in memory. Raises `ValueError` for a version that the message lacks.
    """
    return cast("Decoder[M]", _decoder(message, version, to_the_end))


def encoder(message: type[M], version: int) -> Encoder[M]:
    """Return `encode(message) -> pieces`. The pieces in their order are the bytes of the message.

    `encode` raises `ValueError` if a value does not fit: None where the version has no null, an
    integer or a string that is too large. Raises `ValueError` for a version that the message lacks.
    """
    return cast("Encoder[M]", _encoder(message, version))


@functools.cache
def _decoder(message: type[Message], version: int, to_the_end: bool) -> Any:
    _check(message, version)
    written = decoder_source.source(message, version, to_the_end)
    return _compile(f"<decoder of {message.__name__} version {version}>", *written)


@functools.cache
def _encoder(message: type[Message], version: int) -> Any:
    _check(message, version)
    written = encoder_source.source(message, version)
    return _compile(f"<encoder of {message.__name__} version {version}>", *written)


def _check(message: type[Message], version: int) -> None:
    if version not in message.versions:
        served = f"{message.versions[0]} to {message.versions[-1]}"
        raise ValueError(f"{message.__name__} has the versions {served}, not {version}")


def _compile(name: str, source: str, constants: dict[str, Any]) -> Any:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {**_PRIMITIVES, **constants, "struct": struct}
    # `exec` is safe: the source is made from the classes of this package, never from input.
    exec(compile(source, name, "exec"), names)  # noqa: S102
    return names["run"]
