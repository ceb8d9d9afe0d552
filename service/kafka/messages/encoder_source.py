"""The Python source of encoders. `compiler` makes functions from the source. Pure."""

import struct
from typing import Any

from tidelog.service.kafka.messages.decoder_source import is_fixed
from tidelog.service.kafka.messages.schema import CompiledField, Message, Structure, members_of


def source(message: type[Message], version: int) -> tuple[str, dict[str, Any]]:
    """Return the source of `run(message)`, and the constants that the source names."""
    writer = _EncoderSource(message, version)
    writer.message()
    return "\n".join([*writer.lines, ""]), writer.constants


class _EncoderSource:
    """Collects the lines of one encoder.

    The names in the source: w appends a piece, v with a depth is a structure, s a value, n its
    length.
    """

    def __init__(self, message: type[Message], version: int) -> None:
        self.title = message
        self.version = version
        self.flexible = version in message.flexible
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.indent = 0
        self.fixed: list[tuple[str, str]] = []
        """Values of fixed size that are not written yet: (`struct`'s letter, expression)."""

    def message(self) -> None:
        self.line("def run(v0):")
        self.indent = 1
        self.line("pieces = []")
        self.line("try:")
        self.indent = 2
        self.line("w = pieces.append")
        self.structure(self.title, 0)
        self.write_fixed()
        self.indent = 1
        self.line("except (AttributeError, TypeError, UnicodeEncodeError, struct.error) as error:")
        name = f"{self.title.__name__} version {self.version}"
        self.line(f"    raise ValueError(f'{name} cannot hold a value: {{error}}') from error")
        self.line("return pieces")

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def write_fixed(self) -> None:
        """Write the code that encodes the values in `fixed`, with one call."""
        fixed, self.fixed = self.fixed, []
        letters = "".join(letter for letter, _ in fixed)
        values = ", ".join(value for _, value in fixed if value)
        if not values and letters:
            self.line(f"w({bytes(len(letters))!r})")
        elif letters:
            pack = f"pack_{letters.replace('?', 't')}"
            self.constants[pack] = struct.Struct(f">{letters}").pack
            self.line(f"w({pack}({values}))")

    def structure(self, structure: type[Structure], depth: int) -> None:
        present = [member for member in members_of(structure) if self.version in member.versions]
        for member in present:
            if member.tag is None:
                self.member(member, f"v{depth}.{member.name}", depth)
        if self.flexible:
            self.tags([member for member in present if member.tag is not None], depth)

    def member(self, member: CompiledField, value: str, depth: int) -> None:
        nullable = self.version in member.null_versions
        if member.is_array:
            self.array(member, value, depth, nullable)
        elif isinstance(member.form, type):
            self.single(member.form, value, depth, nullable)
        elif is_fixed(member.form):
            self.fixed.append((member.form, value))
        elif member.name == "error_message":
            self.content(member.form, f"shown({value})", nullable)
        else:
            self.content(member.form, value, nullable)

    def content(self, form: str, value: str, nullable: bool) -> None:
        """Write the length and the bytes of a string, of bytes or of records."""
        encoded = ".encode()" if form == "text" else ""
        length = "sum(map(len, s))" if form == "pieces" else "len(s)"
        null = "()" if form == "pieces" else "b''"
        if not self.flexible:
            if nullable:
                self.line(f"s = {value}")
                self.line(f"if s is None: s = {null}; n = -1")
                self.line(f"else: s = s{encoded}; n = {length}")
            else:
                self.line(f"s = {value}{encoded}; n = {length}")
            self.fixed.append(("h" if form == "text" else "i", "n"))
            self.write_fixed()
            self.line("pieces += s" if form == "pieces" else "w(s)")
            return
        self.write_fixed()
        self.line(f"s = {value}")
        if nullable:
            self.line("if s is None: w(b'\\0')")
            self.line("else:")
            self.indent += 1
        if encoded:
            self.line("s = s.encode()")
        self.line(f"n = {length} + 1")
        if form == "text":
            self.line("if n > TEXT_BYTES_MAX + 1: raise TypeError(f'a string of {n - 1} bytes')")
            self.line("w(encode_varint(n) + s)")
        else:
            self.line("w(encode_varint(n))")
            self.line("pieces += s" if form == "pieces" else "w(s)")
        if nullable:
            self.indent -= 1

    def array(self, member: CompiledField, value: str, depth: int, nullable: bool) -> None:
        form, values = member.form, f"a{depth}"
        self.line(f"{values} = {value}")
        if not self.flexible:
            length = f"len({values})"
            self.fixed.append(
                ("i", f"-1 if {values} is None else {length}" if nullable else length)
            )
            self.write_fixed()
        else:
            self.write_fixed()
            length = f"encode_varint(len({values}) + 1)"
            self.line(
                f"w(b'\\0' if {values} is None else {length})" if nullable else f"w({length})"
            )
        if is_fixed(form):
            self.line(f"if {values}: w(struct.pack(f'>{{len({values})}}{form}', *{values}))")
            return
        self.line(f"for v{depth + 1} in {values}{' or ()' if nullable else ''}:")
        self.indent += 1
        if isinstance(form, type):
            self.structure(form, depth + 1)
        else:
            self.content(form, f"v{depth + 1}", False)
        self.write_fixed()
        self.indent -= 1

    def single(self, form: type[Structure], value: str, depth: int, nullable: bool) -> None:
        self.write_fixed()
        self.line(f"v{depth + 1} = {value}")
        if nullable:
            self.line(f"if v{depth + 1} is None: w(b'\\xff')")
            self.line("else:")
            self.indent += 1
            self.line("w(b'\\1')")
        self.structure(form, depth + 1)
        self.write_fixed()
        if nullable:
            self.indent -= 1

    def tags(self, tagged: list[CompiledField], depth: int) -> None:
        if not tagged:
            self.fixed.append(("x", ""))
            return
        self.write_fixed()
        conditions = {member: _is_set(member, f"v{depth}.{member.name}") for member in tagged}
        self.line(f"if {' or '.join(conditions.values())}:")
        self.indent += 1
        self.line(f"outer{depth} = pieces; tags{depth} = []")
        for member in sorted(tagged, key=lambda member: member.tag or 0):
            self.line(f"if {conditions[member]}:")
            self.indent += 1
            self.line("pieces = []; w = pieces.append")
            self.member(member, f"v{depth}.{member.name}", depth)
            self.write_fixed()
            self.line(f"tags{depth}.append(({member.tag}, pieces))")
            self.indent -= 1
        self.line(f"pieces = outer{depth}; w = pieces.append")
        self.line(f"w(encode_tags(tags{depth}))")
        self.indent -= 1
        self.line("else: w(b'\\0')")


def _is_set(member: CompiledField, value: str) -> str:
    """Return the condition under which a tagged field is written."""
    if member.is_array:
        return value
    return f"{value} is not None" if member.default is None else f"{value} != {member.default!r}"
