"""The header of a request, and the frame of a response.

A frame is a size of four bytes, a header and a message. The size does not count its own four bytes.
A request's header has version 1. If the request is flexible, the header has version 2, with tagged
fields at its end. The client id is a string with a length of two bytes in both.
"""

import struct
from typing import NamedTuple

from tidelog.service.kafka.messages.primitives import ELEMENTS_MAX, MalformedMessage, skip_tags
from tidelog.service.kafka.messages.schema import FIRST_FLEXIBLE

API_VERSIONS = 18

CLIENT_ID_CHARS_MAX = 255
"""Characters of a client id that the broker keeps (I10). A client may send 32,767 bytes, on each of
thousands of connections, before it has proved its principal."""

_HEAD = struct.Struct(">hhih")
_SIZE_AND_ID = struct.Struct(">ii")
_SIZE_ID_AND_NO_TAGS = struct.Struct(">iix")
_NEVER = 0x8000


class RequestHeader(NamedTuple):
    """The header of a request; the message begins at `position` of its frame."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    position: int


def decode_header(frame: bytes | bytearray) -> RequestHeader:
    """Read the header of a request from its frame without the size.

    Does not check whether the broker serves the version. Raises `MalformedMessage`.
    """
    try:
        api_key, version, correlation_id, length = _HEAD.unpack_from(frame)
        position = _HEAD.size
        client_id = None
        if length >= 0:
            client_id = frame[position : position + length].decode()[:CLIENT_ID_CHARS_MAX]
            position += length
        elif length != -1:
            raise MalformedMessage(f"request header: the client id has {length} bytes")
        if version >= FIRST_FLEXIBLE.get(api_key, _NEVER):
            if frame[position] == 0:
                position += 1
            else:
                _, position = skip_tags(frame, position, ELEMENTS_MAX)
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise MalformedMessage(f"request header: {error}") from None
    if position > len(frame):
        raise MalformedMessage("request header: the client id is cut off")
    return RequestHeader(api_key, version, correlation_id, client_id, position)


def frame_response(
    api_key: int, api_version: int, correlation_id: int, message: list[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Return the frame of an encoded response, in pieces: size, header, message.

    The header ends with tagged fields where the response is flexible, but never for ApiVersions: a
    client reads that answer before it knows the versions of the broker.
    """
    size = sum(map(len, message))
    if api_key != API_VERSIONS and api_version >= FIRST_FLEXIBLE.get(api_key, _NEVER):
        return [_SIZE_ID_AND_NO_TAGS.pack(size + 5, correlation_id), *message]
    return [_SIZE_AND_ID.pack(size + 4, correlation_id), *message]
