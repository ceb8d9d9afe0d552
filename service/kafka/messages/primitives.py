"""Varints, tagged fields and the one error of the decoders.

Kafka's compact lengths are unsigned varints: seven bits a byte, the lowest first, the highest bit
set in all bytes but the last. The stored number is the length plus one, and zero stands for null.
"""

ELEMENTS_MAX = 100_000
"""Bound of the elements of all arrays of one message, and of its tagged fields. A small element
uses up to fifty times its bytes in memory. So many elements take 0.1 s of CPU time."""
TEXT_BYTES_MAX = 0x7FFF
"""Bytes of one string, also where its length is a varint (Kafka's own limit)."""
ERROR_CHARS_MAX = 2_000
"""Characters of an error's message. A message quotes the request: four characters for each control
character of a name of TEXT_BYTES_MAX. Without the bound, the answer could not be encoded."""
OPERATIONS_NOT_ASKED = -(2**31)
"""Authorized operations (a bit mask) that the client did not ask for."""
ZERO_UUID = bytes(16)
"""The UUID that means none."""

_LENGTH_MAX = 0x7FFF_FFFF
_SHORT_VARINTS = tuple(bytes([number]) for number in range(128))


class MalformedMessage(Exception):
    """Bytes that are no message of the expected type and version; the text says which."""


def varint(data: bytes | bytearray, position: int) -> tuple[int, int]:
    """Read an unsigned varint of at most five bytes; returns it and the position behind it.

    Raises `MalformedMessage` if it is above 2**31 - 1, `IndexError` if the data end within the
    varint.
    """
    number = shift = 0
    for index in range(position, position + 5):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number > _LENGTH_MAX:
                break
            return number, index + 1
        shift += 7
    raise MalformedMessage(f"the varint at byte {position} is above {_LENGTH_MAX}")


def text_length(data: bytes | bytearray, position: int) -> tuple[int, int]:
    """Read the varint before a string, as `varint`; refuses strings over `TEXT_BYTES_MAX`."""
    number, end = varint(data, position)
    if number > TEXT_BYTES_MAX + 1:
        raise MalformedMessage(f"the string at byte {position} has {number - 1} bytes")
    return number, end


def skip_tags(data: bytes | bytearray, position: int, elements_max: int) -> tuple[int, int]:
    """Skip a structure's tagged fields, the count included.

    Returns `elements_max` minus the count of the fields, and the position behind the fields.
    `elements_max` is the number of elements that the message may still have.
    """
    elements_max, count, position = tag_count(data, position, elements_max)
    for _ in range(count):
        _, _, position = tag_header(data, position)
    return elements_max, position


def tag_count(data: bytes | bytearray, position: int, elements_max: int) -> tuple[int, int, int]:
    """Read the count of tagged fields; returns `elements_max - count`, count, position."""
    count, end = varint(data, position)
    if count > elements_max:
        raise MalformedMessage(f"{count} tagged fields at byte {position} are too many")
    return elements_max - count, count, end


def tag_header(data: bytes | bytearray, position: int) -> tuple[int, int, int]:
    """Read a tagged field's number and size.

    Return the number, and where its value begins and ends.
    """
    number, position = varint(data, position)
    size, position = varint(data, position)
    if size > len(data) - position:
        raise MalformedMessage(f"the tagged field {number} at byte {position} is cut off")
    return number, position, position + size


def shown(message: str | None) -> str | None:
    """Return an error's message within ERROR_CHARS_MAX."""
    if message is None or len(message) <= ERROR_CHARS_MAX:
        return message
    return message[:ERROR_CHARS_MAX] + "..."


def encode_varint(number: int) -> bytes:
    """Write an unsigned varint."""
    if number < 128:
        return _SHORT_VARINTS[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_tags(fields: list[tuple[int, list[bytes | memoryview]]]) -> bytes:
    """Write tagged fields: (number, pieces of the value), by ascending number."""
    encoded = [encode_varint(len(fields))]
    for number, pieces in fields:
        value = b"".join(pieces)
        encoded += (encode_varint(number), encode_varint(len(value)), value)
    return b"".join(encoded)
