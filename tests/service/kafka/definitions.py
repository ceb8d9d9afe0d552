"""Kafka's own message definitions (JSON, of a dev dependency), and an interpreter over them.

The oracle of the message tests: it shares no code with `tidelog.service.kafka.messages`. A value is
a dict by the field names in snake_case, without the fields that the version lacks; a tagged
structure is None where it is omitted.
"""

import json
import random
import re
import struct
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

# The definitions alone: the client that they belong to is not imported.
_FOLDER = Path(distribution("kafka-python").locate_file("kafka/protocol/schemas/resources"))
_MORE = Path(__file__).with_name("more_definitions")
"""Definitions that the dependency does not have, by hand."""
_FIXED = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "bool": "?", "uuid": "16s"}
_LETTERS = "aé漢 \x00z"


class Definition(NamedTuple):
    """A message: its fields and structures by name as JSON has them."""

    name: str
    api_key: int | None
    versions: str
    flexible: str
    fields: list[dict[str, Any]]
    structures: dict[str, list[dict[str, Any]]]


def load(name: str) -> Definition:
    """Read a definition, for example `FetchRequest`."""
    file = f"{name}.json"
    path = _MORE / file if (_MORE / file).exists() else _FOLDER / file
    lines = path.read_text("utf-8").splitlines()
    text = "\n".join(re.sub(r'^\s*//.*|\s//[^"]*$', "", line) for line in lines)
    definition = json.loads(text)
    structures = {
        structure["name"]: structure["fields"] for structure in definition.get("commonStructs", [])
    }
    return Definition(
        definition["name"],
        definition.get("apiKey"),
        definition["validVersions"],
        definition["flexibleVersions"],
        definition["fields"],
        structures,
    )


def snake_case(name: str) -> str:
    """`LastKnownElr` to `last_known_elr`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def within(versions: str | None, version: int) -> bool:
    """Whether a version is in "3+", "1-2", "4" or "none"."""
    if versions in (None, "none"):
        return False
    first, plus, last = re.fullmatch(r"(\d+)(?:(\+)|-(\d+))?", versions).groups()
    return int(first) <= version and (bool(plus) or version <= int(last or first))


class Interpreter:
    """Reads, writes and invents values of one message in one version."""

    def __init__(self, definition: Definition, version: int) -> None:
        self.structures = definition.structures
        self.fields = definition.fields
        self.version = version
        self.flexible = within(definition.flexible, version)

    def _inner(self, field: dict[str, Any]) -> list[dict[str, Any]] | None:
        kind = field["type"].removeprefix("[]")
        return field.get("fields") or self.structures.get(kind)

    def _present(self, fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [field for field in fields if within(field["versions"], self.version)]

    def _nullable(self, field: dict[str, Any]) -> bool:
        return within(field.get("nullableVersions"), self.version)

    def _tagged(self, field: dict[str, Any]) -> bool:
        return within(field.get("taggedVersions"), self.version)

    def default(self, field: dict[str, Any]) -> Any:
        """Return Kafka's default; of a structure, None."""
        kind, text = field["type"], field.get("default")
        if text == "null":
            return None
        if kind.startswith("[]"):
            return []
        if kind in ("string", "bytes", "records", "uuid"):
            empty = {"string": "", "bytes": b"", "records": b"", "uuid": bytes(16)}
            return text or empty[kind]
        if kind == "bool":
            return text in ("true", True)
        return int(str(text or 0), 0) if kind in _FIXED else None

    # --- invent -----------------------------------------------------------------------------------

    def invent(self, draw: random.Random) -> dict[str, Any]:
        """Return a random value of the message."""
        return self._invent_fields(self.fields, draw)

    def _invent_fields(self, fields: list[dict[str, Any]], draw: random.Random) -> dict[str, Any]:
        return {
            snake_case(field["name"]): self._invent(field, draw) for field in self._present(fields)
        }

    def _invent(self, field: dict[str, Any], draw: random.Random) -> Any:
        if self._tagged(field) and draw.random() < 0.4:
            return self.default(field)
        if self._nullable(field) and draw.random() < 0.25:
            return None
        if field["type"].startswith("[]"):
            element = {**field, "type": field["type"][2:], "nullableVersions": "none"}
            element.pop("taggedVersions", None)
            length = draw.choice((0, 1, 1, 2, 3, 130 if self._inner(field) is None else 4))
            return [self._invent(element, draw) for _ in range(length)]
        kind = field["type"]
        if kind in ("int8", "int16", "int32", "int64"):
            bits = int(kind[3:])
            return draw.choice((0, 1, -1, draw.getrandbits(bits) - 2 ** (bits - 1)))
        if kind == "bool":
            return draw.random() < 0.5
        if kind == "uuid":
            return draw.choice((bytes(16), draw.randbytes(16)))
        length = draw.choice((0, 1, 5, 126, 127, 128, 300))
        if kind == "string":
            return "".join(draw.choices(_LETTERS, k=length))
        if kind in ("bytes", "records"):
            return draw.randbytes(draw.choice((length, 20_000)))
        return self._invent_fields(self._inner(field), draw)

    # --- write ------------------------------------------------------------------------------------

    def write(self, value: dict[str, Any]) -> bytes:
        """Return the bytes of the message."""
        return self._write_fields(self.fields, value)

    def _write_fields(self, fields: list[dict[str, Any]], value: dict[str, Any]) -> bytes:
        plain, tagged = b"", {}
        for field in self._present(fields):
            field_value = value[snake_case(field["name"])]
            if not self._tagged(field):
                plain += self._write(field, field_value)
            elif field_value != self.default(field):
                tagged[field["tag"]] = self._write(field, field_value)
        if not self.flexible:
            return plain
        plain += write_varint(len(tagged))
        for tag in sorted(tagged):
            plain += write_varint(tag) + write_varint(len(tagged[tag])) + tagged[tag]
        return plain

    def _write_length(self, length: int | None, old: str) -> bytes:
        if self.flexible:
            return write_varint(0 if length is None else length + 1)
        return struct.pack(old, -1 if length is None else length)

    def _write(self, field: dict[str, Any], value: Any) -> bytes:
        kind = field["type"]
        assert value is not None or self._nullable(field)
        if kind.startswith("[]"):
            head = self._write_length(None if value is None else len(value), ">i")
            element = {**field, "type": kind[2:], "nullableVersions": "none"}
            return head + b"".join(self._write(element, item) for item in value or ())
        if kind in _FIXED:
            return struct.pack(f">{_FIXED[kind]}", value)
        if kind in ("string", "bytes", "records"):
            data = value.encode() if isinstance(value, str) else value
            old = ">h" if kind == "string" else ">i"
            return self._write_length(None if data is None else len(data), old) + (data or b"")
        if value is None:
            return b"\xff"
        inner = self._write_fields(self._inner(field), value)
        return b"\x01" + inner if self._nullable(field) else inner

    # --- read -------------------------------------------------------------------------------------

    def read(self, data: bytes) -> dict[str, Any]:
        """Return the value of bytes that `write` or a client made."""
        value, position = self._read_fields(self.fields, data, 0)
        assert position == len(data)
        return value

    def _read_fields(
        self, fields: list[dict[str, Any]], data: bytes, position: int
    ) -> tuple[dict, int]:
        present = self._present(fields)
        value = {
            snake_case(field["name"]): self.default(field)
            for field in present
            if self._tagged(field)
        }
        for field in present:
            if not self._tagged(field):
                value[snake_case(field["name"])], position = self._read(field, data, position)
        if self.flexible:
            field_by_tag = {field["tag"]: field for field in present if self._tagged(field)}
            count, position = read_varint(data, position)
            for _ in range(count):
                tag, position = read_varint(data, position)
                size, position = read_varint(data, position)
                if tag in field_by_tag:
                    value[snake_case(field_by_tag[tag]["name"])], _ = self._read(
                        field_by_tag[tag], data, position
                    )
                position += size
        return value, position

    def _read_length(self, data: bytes, position: int, old: str) -> tuple[int, int]:
        if self.flexible:
            length, position = read_varint(data, position)
            return length - 1, position
        (length,) = struct.unpack_from(old, data, position)
        return length, position + struct.calcsize(old)

    def _read(self, field: dict[str, Any], data: bytes, position: int) -> tuple[Any, int]:
        kind = field["type"]
        if kind.startswith("[]"):
            length, position = self._read_length(data, position, ">i")
            element = {**field, "type": kind[2:], "nullableVersions": "none"}
            values = []
            for _ in range(length):
                item, position = self._read(element, data, position)
                values.append(item)
            return (None if length < 0 else values), position
        if kind in _FIXED:
            (value,) = struct.unpack_from(f">{_FIXED[kind]}", data, position)
            return value, position + struct.calcsize(f">{_FIXED[kind]}")
        if kind in ("string", "bytes", "records"):
            length, position = self._read_length(data, position, ">h" if kind == "string" else ">i")
            if length < 0:
                return None, position
            part = data[position : position + length]
            assert len(part) == length
            return (part.decode() if kind == "string" else part), position + length
        if self._nullable(field):
            position += 1
            if data[position - 1] > 0x7F:
                return None, position
        return self._read_fields(self._inner(field), data, position)


def write_varint(number: int) -> bytes:
    """Write an unsigned varint."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Read an unsigned varint; returns it and the position behind it."""
    number = 0
    for index in range(5):
        number |= (data[position + index] & 0x7F) << 7 * index
        if data[position + index] < 0x80:
            return number, position + index + 1
    raise AssertionError("a varint has more than five bytes")
