"""The Python source of decoders. `compiler` makes functions from the source. Pure."""

import struct
from typing import Any

from msgspec import NODEFAULT

from tidelog.service.kafka.messages.schema import CompiledField, Message, Structure, members_of

_FIXED_MAX = 3
"""Most characters of a form of fixed size, such as "q" or "16s". Other forms are longer words."""


def is_fixed(form: str | type[Structure]) -> bool:
    """Whether a value of this form always has the same size."""
    return isinstance(form, str) and len(form) <= _FIXED_MAX


def source(message: type[Message], version: int, to_the_end: bool) -> tuple[str, dict[str, Any]]:
    """Return the source of `run(b, p)`, and the constants that the source names."""
    writer = _DecoderSource(message, version)
    writer.message(to_the_end)
    return "\n".join([*writer.lines, ""]), writer.constants


def smallest_size(structure: type[Structure], version: int, flexible: bool) -> int:
    """Bytes of the smallest value of a structure; at least 1."""
    size = int(flexible)
    for member in members_of(structure):
        if version in member.versions and member.tag is None:
            size += _smallest_of(member, version, flexible)
    return max(size, 1)


def _smallest_of(member: CompiledField, version: int, flexible: bool) -> int:
    if not member.is_array and isinstance(member.form, type):
        nullable = version in member.null_versions
        return 1 if nullable else smallest_size(member.form, version, flexible)
    if not member.is_array and is_fixed(member.form):
        return struct.calcsize(f">{member.form}")
    if flexible:
        return 1
    return 2 if member.form == "text" and not member.is_array else 4


class _DecoderSource:
    """Collects the lines of one decoder.

    The names in the source: b is the frame, m its memoryview, p the position, q the end of a value,
    size the end of the frame. left is the number of elements and tags that may still come. n is a
    length, t a count of tags, k and e a tagged field's number and end. The variable of a field is
    its name and the depth of its structure.
    """

    def __init__(self, message: type[Message], version: int) -> None:
        self.title = message
        self.version = version
        self.flexible = version in message.flexible
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.indent = 0
        self.fixed: list[tuple[str, str]] = []
        """Values of fixed size that are not read yet: (`struct`'s letter, name)."""
        self.has_slices = False

    def message(self, to_the_end: bool) -> None:
        name = f"{self.title.__name__} version {self.version}"
        self.line("def run(b, p):")
        self.indent = 1
        self.line("size = len(b)")
        self.line(f"left = {self.title.elements_max}")
        self.line("try:")
        self.indent = 2
        expression = self.structure(self.title, 0)
        self.line(f"made = {expression}")
        self.indent = 1
        if self.has_slices:
            self.lines.insert(1, "    m = memoryview(b)")
        self.line("except MalformedMessage as error:")
        self.line(f"    raise MalformedMessage(f'{name}: {{error}}') from None")
        self.line("except (IndexError, UnicodeDecodeError, struct.error) as error:")
        self.line(f"    raise MalformedMessage(f'{name}: near byte {{p}}: {{error}}') from None")
        self.line(f"if p {'!=' if to_the_end else '>'} size:")
        self.line(
            f"    raise MalformedMessage(f'{name}: ends at byte {{p}}, the frame at {{size}}')"
        )
        self.line("return made")

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def constant(self, name: str, value: Any) -> str:
        self.constants[name] = value
        return name

    def read_fixed(self) -> None:
        """Write the code that reads the values in `fixed`."""
        fixed, self.fixed = self.fixed, []
        letters = "".join(letter for letter, _ in fixed)
        if letters == "B":
            self.line(f"{fixed[0][1]} = b[p]; p += 1")
        elif letters:
            layout = struct.Struct(f">{letters}")
            read = self.constant(f"unpack_{letters.replace('?', 't')}", layout.unpack_from)
            names = "".join(f"{name}, " for _, name in fixed)
            self.line(f"{names}= {read}(b, p); p += {layout.size}")

    def structure(self, structure: type[Structure], depth: int) -> str:
        """Write the code that reads all fields. Return the expression of the new instance."""
        present = [member for member in members_of(structure) if self.version in member.versions]
        for member in members_of(structure):
            optional = self.version not in member.versions or member.tag is not None
            if optional and member.default is NODEFAULT:
                raise TypeError(f"{structure.__name__}.{member.name} needs a default")
        tagged = [member for member in present if member.tag is not None]
        for member in present:
            if member.tag is None:
                self.member(member, depth)
        if self.flexible:
            self.tags(structure, tagged, depth)
        self.read_fixed()
        name = self.constant(structure.__name__, structure)
        return f"{name}({', '.join(f'{member.name}={member.name}{depth}' for member in present)})"

    def member(self, member: CompiledField, depth: int) -> None:
        target = f"{member.name}{depth}"
        if member.is_array:
            self.array(member, target, depth)
        elif isinstance(member.form, type):
            self.single(member, member.form, target, depth)
        elif is_fixed(member.form):
            self.fixed.append((member.form, target))
        else:
            self.length(small=member.form == "text")
            self.content(
                member.form,
                target,
                f"{member.name} is null or has a length below 0",
                self.can_be_null(member),
            )

    def can_be_null(self, member: CompiledField) -> bool:
        return self.version in member.null_versions

    def length(self, *, small: bool) -> None:
        """Write the code that reads a length: n is the length, plus one in flexible versions."""
        self.fixed.append(("B" if self.flexible else "h" if small else "i", "n"))
        self.read_fixed()
        if self.flexible:
            read = "text_length" if small else "varint"
            self.line(f"if n > 127: n, p = {read}(b, p - 1)")

    def content(self, form: str, target: str, fault: str, nullable: bool) -> None:
        """Write the code that reads n bytes."""
        end = "p + n - 1" if self.flexible else "p + n"
        empty = 1 if self.flexible else 0
        nothing = {"text": "''", "bytes": "b''", "records": "m[:0]", "pieces": "[m[:0]]"}[form]
        slices = {
            "text": "b[p:q].decode()",
            "bytes": "bytes(b[p:q])",
            "records": "m[p:q]",
            "pieces": "[m[p:q]]",
        }
        self.has_slices |= form in ("records", "pieces")
        self.line(f"if n > {empty}: q = {end}; {target} = {slices[form]}; p = q")
        self.line(f"elif n == {empty}: {target} = {nothing}")
        if nullable:
            self.line(f"elif n == {empty - 1}: {target} = None")
        self.line(f"else: raise MalformedMessage({fault!r})")

    def array(self, member: CompiledField, target: str, depth: int) -> None:
        self.length(small=False)
        if self.flexible:
            self.line("n -= 1")
        form = member.form
        if isinstance(form, type):
            smallest = smallest_size(form, self.version, self.flexible)
        elif is_fixed(form):
            smallest = struct.calcsize(f">{form}")
        else:
            smallest = 1 if self.flexible else 2
        many = f"MalformedMessage(f'{member.name} has {{n}} elements, too many for the frame')"
        self.line("if n >= 0:")
        self.indent += 1
        fixed = is_fixed(form)
        self.line(f"if n * {smallest} > size - p: raise {many}")
        self.line("left -= n")
        self.line(f"if left < 0: raise {many}")
        if fixed:
            self.line(f"q = p + n * {smallest}")
            self.line(f"{target} = list(struct.unpack_from(f'>{{n}}{form}', b, p)); p = q")
        else:
            self.line(f"{target} = []")
            self.line("for _ in range(n):")
            self.indent += 1
            if isinstance(form, type):
                expression = self.structure(form, depth + 1)
            else:
                expression = "element"
                self.length(small=form == "text")
                self.content(form, expression, f"{member.name} has null inside", False)
            self.line(f"{target}.append({expression})")
            self.indent -= 1
        self.indent -= 1
        if self.can_be_null(member):
            self.line(f"elif n == -1: {target} = None")
        self.line(f"else: raise MalformedMessage(f'{member.name} has {{n}} elements')")

    def single(self, member: CompiledField, form: type[Structure], target: str, depth: int) -> None:
        """Write the code that reads a structure that is not an element of an array.

        If the structure can be null, a signed byte is before it, which is negative for null.
        """
        if not self.can_be_null(member):
            expression = self.structure(form, depth + 1)
            self.line(f"{target} = {expression}")
            return
        self.fixed.append(("b", "n"))
        self.read_fixed()
        self.line(f"if n < 0: {target} = None")
        self.line("else:")
        self.indent += 1
        expression = self.structure(form, depth + 1)
        self.line(f"{target} = {expression}")
        self.indent -= 1

    def tags(self, structure: type[Structure], tagged: list[CompiledField], depth: int) -> None:
        for member in tagged:
            default = "[]" if member.is_array else repr(member.default)
            self.line(f"{member.name}{depth} = {default}")
        self.fixed.append(("B", "t"))
        self.read_fixed()
        if not tagged:
            self.line("if t: left, p = skip_tags(b, p - 1, left)")
            return
        end, count = f"e{depth}", f"t{depth}"
        self.line("if t:")
        self.indent += 1
        self.line(f"left, {count}, p = tag_count(b, p - 1, left)")
        self.line(f"for _ in range({count}):")
        self.indent += 1
        self.line(f"k, p, {end} = tag_header(b, p)")
        for index, member in enumerate(tagged):
            self.line(f"{'elif' if index else 'if'} k == {member.tag}:")
            self.indent += 1
            self.member(member, depth)
            self.read_fixed()
            self.indent -= 1
        self.line(f"else: p = {end}")
        self.line(
            f"if p != {end}: raise MalformedMessage(f'tag {{k}} of {structure.__name__} does"
            f" not fill its size')"
        )
        self.indent -= 2
