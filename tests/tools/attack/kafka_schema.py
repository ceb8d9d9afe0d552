"""For each API and each array of its request: a request with as many elements as fit.

The requests are made from the classes of the messages, so a new API or a new array is attacked
without a line here. `kafka_arrays` has the requests whose elements a broker would serve.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tests.service.kafka.every_message import every_message
from tests.service.kafka.wire import framed
from tests.tools.attack.measure import MIB, VICTIM, scaled
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.schema import CompiledField, Message, Structure, members_of

PART = 99
"""In percent: of the elements that the decoder allows, and of the bytes of a frame."""
SAMPLE = 100
FIRST = 0x10000
"""The number of the first element: all names are equally long."""
_LEAST = {"text": VICTIM, "bytes": b"", "records": memoryview(b""), "pieces": [], "16s": ZERO_UUID}
"""By form, the value of a field that is required; numbers are 0."""


class ArrayField(NamedTuple):
    """An array of a request, in its newest version that has the array."""

    request: type[Message]
    version: int
    path: tuple[str, ...]
    """The names of the fields from the request to the array."""

    def __str__(self) -> str:
        return f"{self.request.__name__}.{'.'.join(self.path)}"


def requests() -> list[type[Message]]:
    """Return the requests of all APIs."""
    return [
        message
        for message in every_message()
        if message.api_key is not None and message.__name__.endswith("Request")
    ]


def array_fields() -> list[ArrayField]:
    """Return the arrays of all requests."""
    newest: dict[tuple[type[Message], tuple[str, ...]], ArrayField] = {}
    for request in requests():
        for version in request.versions:
            for path in _paths(request, version):
                newest[request, path] = ArrayField(request, version, path)
    return list(newest.values())


def frame_of(field: ArrayField, scale: float) -> bytes:
    """Return a request with as many elements of the array as fit, at this scale."""
    sample = len(framed(_request(field, SAMPLE), field.version))
    element = (sample - len(framed(_request(field, 0), field.version))) / SAMPLE
    fit = min(field.request.elements_max, int(MIB / (element + 1))) * PART // 100
    return framed(_request(field, scaled(fit, scale, 10)), field.version)


def elements_of(field: ArrayField, request: Any) -> Sequence[Any]:
    """Return the elements of the array in a decoded request of `frame_of`."""
    value = request
    for name in field.path:
        value = getattr(value[0] if isinstance(value, list) else value, name)
    elements: Sequence[Any] = value
    return elements


def _paths(structure: type[Structure], version: int) -> Iterator[tuple[str, ...]]:
    for member in members_of(structure):
        if version not in member.versions:
            continue
        if member.is_array:
            yield (member.name,)
        if isinstance(member.form, type):
            for path in _paths(member.form, version):
                yield (member.name, *path)


def _request(field: ArrayField, count: int) -> Message:
    message = _made(field.request, field.version, field.path, count, 0)
    assert isinstance(message, Message)
    return message


def _made(
    structure: type[Structure], version: int, path: tuple[str, ...], count: int, number: int
) -> Structure:
    """Make a structure with the least values, and `count` elements in the array at the path.

    The names and numbers of elements differ.
    """
    values: dict[str, Any] = {}
    for member in members_of(structure):
        if version not in member.versions:
            continue
        if path and member.name == path[0]:
            values[member.name] = _on_path(member, version, path[1:], count)
        elif member.default is msgspec.NODEFAULT:
            values[member.name] = _least(member, version, number)
    return structure(**values)


def _on_path(member: CompiledField, version: int, names: tuple[str, ...], count: int) -> Any:
    form = member.form
    if names:
        assert isinstance(form, type)
        inner = _made(form, version, names, count, 0)
        return [inner] if member.is_array else inner
    return [_element(form, version, FIRST + number) for number in range(count)]


def _element(form: str | type[Structure], version: int, number: int) -> Any:
    if isinstance(form, type):
        return _made(form, version, (), 0, number)
    return {"text": f"{number:x}", "i": number, "h": number % 100, "b": number % 100}.get(
        form, _LEAST.get(form, number)
    )


def _least(member: CompiledField, version: int, number: int) -> Any:
    if member.is_array:
        return []
    if isinstance(member.form, type):
        return _made(member.form, version, (), 0, number)
    if member.form == "text":
        return f"{number:x}" if number else VICTIM
    if member.form == "i" and "partition" in member.name:
        return number
    if member.name == "acks":
        return -1  # a Produce request with 0 has no answer
    return _LEAST.get(member.form, 0)
