"""The notation of messages: a class is the schema of a request, a response, a structure.

    class DeletableTopicResult(Structure):
        name: Annotated[str | None, Field(null="6+")]
        topic_id: Annotated[Uuid, Field("6+")] = ZERO_UUID
        error_code: Int16
        error_message: Annotated[str | None, Field("5+")] = None

    class DeleteTopicsResponse(Message, api_key=20, versions="1-6", flexible="4+"):
        throttle_time_ms: Int32
        responses: list[DeletableTopicResult]

Fields are in the order of the bytes. A field without `Field` is in every version of its message,
and `| None` without `null` lets every version have null. A field that some version lacks has a
default: the decoder of that version gives the default, its encoder omits the field. `tag` gives the
number of a tagged field, which is omitted where it equals its default. A tagged structure is
`| None = None`: None stands for an omitted field, since the bytes have no null for it.

`flexible` versions have compact lengths and tagged fields. Names are those of Kafka's message
definitions, in snake_case. Messages are trees, so no instance is tracked by the garbage collector.
"""

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Union, dataclass_transform, get_args
from typing import get_origin as origin_of

import msgspec

from tidelog.service.kafka.messages.primitives import ELEMENTS_MAX

VERSION_MAX = 0x7FFF
FIRST_FLEXIBLE: dict[int, int] = {}
"""By API, the first flexible version of its messages.

A message class adds its own, so the header of an API's requests is read right once its classes are
imported: the table of the APIs that a broker serves (`apis.table`) imports them.
"""


class Field(NamedTuple):
    """A field's versions ("3+", "3-12", "4"; "" for all), versions that allow null, and tag."""

    versions: str = ""
    null: str = ""
    tag: int | None = None


class Wire(NamedTuple):
    """How a value stands in the bytes: `struct`'s letters of a fixed size, or a name."""

    form: str


Int8 = Annotated[int, Wire("b")]
Int16 = Annotated[int, Wire("h")]
Int32 = Annotated[int, Wire("i")]
Int64 = Annotated[int, Wire("q")]
Uuid = Annotated[bytes, Wire("16s")]
"""16 bytes; `ZERO_UUID` means none."""
Pieces = Annotated[list[bytes | memoryview], Wire("pieces")]
"""Record batches in pieces: the encoder writes them one after the other, without a copy."""

_PYTHON_TYPES = {
    str: Wire("text"),
    bytes: Wire("bytes"),
    bool: Wire("?"),
    memoryview: Wire("records"),
}


class StructureMeta(msgspec.StructMeta):
    """The metaclass of structures: fields are keyword-only, and a `Message` has its versions."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        **options: Any,
    ) -> "StructureMeta":
        """Make a class; `options`: `api_key`, `versions`, `flexible` (messages), `elements_max`."""
        structure = super().__new__(mcs, name, bases, namespace, kw_only=True, gc=False)
        for option, value in options.items():
            setattr(structure, option, versions_of(value) if isinstance(value, str) else value)
        if "api_key" in options and (flexible := versions_of(options["flexible"])):
            first = FIRST_FLEXIBLE.setdefault(options["api_key"], flexible[0])
            assert first == flexible[0], f"{name} is flexible from another version on"
        return structure


@dataclass_transform(kw_only_default=True)
class Structure(msgspec.Struct, metaclass=StructureMeta):
    """A group of fields within a message."""


class Message(Structure):
    """A request, a response, or another message with versions of its own."""

    api_key: ClassVar[int | None] = None
    elements_max: ClassVar[int] = ELEMENTS_MAX
    versions: ClassVar[range]
    flexible: ClassVar[range]


class CompiledField(NamedTuple):
    """A field as the compiler needs it."""

    name: str
    form: str | type[Structure]
    is_array: bool
    versions: range
    null_versions: range
    tag: int | None
    default: Any
    """`msgspec.NODEFAULT` if the field is required. The default of an array is an empty tuple."""


def versions_of(text: str) -> range:
    """Parse "3-12", "4", "3+" (without end) or "none"."""
    if text == "none":
        return range(0)
    if text.endswith("+"):
        return range(int(text[:-1]), VERSION_MAX + 1)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@cache
def members_of(structure: type[Structure]) -> tuple[CompiledField, ...]:
    """Return the fields of a structure in the order of the bytes.

    Raises `TypeError` if the notation is wrong.
    """
    return tuple(_members(structure))


def _members(structure: type[Structure]) -> Iterator[CompiledField]:
    for field in msgspec.structs.fields(structure):
        notes, inner, nullable = _parts(field.type)
        is_array = origin_of(inner) is list and not any(isinstance(note, Wire) for note in notes)
        if is_array:
            element_notes, inner, _ = _parts(get_args(inner)[0])
            notes += element_notes
        forms: list[Any] = [note.form for note in notes if isinstance(note, Wire)]
        if isinstance(inner, StructureMeta):
            forms.append(inner)
        elif inner in _PYTHON_TYPES and not forms:
            forms.append(_PYTHON_TYPES[inner].form)
        if len(forms) != 1:
            raise TypeError(f"{structure.__name__}.{field.name}: {field.type} has no form in bytes")
        field_note = next((note for note in notes if isinstance(note, Field)), Field())
        if field_note.tag is not None and isinstance(forms[0], type) and not is_array:
            nullable = False  # None is an omitted field, see above
        default = field.default if field.default_factory is msgspec.NODEFAULT else ()
        yield CompiledField(
            name=field.name,
            form=forms[0],
            is_array=is_array,
            versions=versions_of(field_note.versions or "0+"),
            null_versions=versions_of((field_note.null or "0+") if nullable else "none"),
            tag=field_note.tag,
            default=default,
        )


def _parts(annotation: Any) -> tuple[list[Any], Any, bool]:
    """Split an annotation into its notes, the type inside, and whether None is allowed."""
    notes: list[Any] = []
    nullable = False
    while True:
        if origin_of(annotation) is Annotated:
            annotation, *inner_notes = get_args(annotation)
            notes += inner_notes
        elif origin_of(annotation) in (Union, types.UnionType):
            (annotation,) = (kind for kind in get_args(annotation) if kind is not types.NoneType)
            nullable = True
        else:
            return notes, annotation, nullable
