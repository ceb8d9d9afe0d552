"""Headers of requests and frames of responses."""

import pytest

from tests.service.kafka.every_message import every_message
from tidelog.service.kafka.messages.header import (
    API_VERSIONS,
    FIRST_FLEXIBLE,
    RequestHeader,
    decode_header,
    frame_response,
)
from tidelog.service.kafka.messages.primitives import MalformedMessage

METADATA = 3
SASL_HANDSHAKE = 17


def test_the_first_flexible_versions_are_those_of_the_messages() -> None:
    served = [message for message in every_message() if message.api_key is not None]
    flexible = {message.api_key: message.flexible[0] for message in served if message.flexible}
    assert flexible == FIRST_FLEXIBLE


def request(api_key: int, version: int, after: str, client_id: str = "0001 63") -> bytes:
    head = f"{api_key:04x} {version:04x} 00000007 {client_id} {after}"
    return bytes.fromhex(head)


def test_a_header_has_tags_where_its_api_is_flexible() -> None:
    assert decode_header(request(METADATA, 8, "ff")) == RequestHeader(METADATA, 8, 7, "c", 11)
    assert decode_header(request(METADATA, 9, "00 ff")) == RequestHeader(METADATA, 9, 7, "c", 12)
    tagged = decode_header(request(METADATA, 9, "02 00 02 aabb 05 00 ff"))
    assert tagged == RequestHeader(METADATA, 9, 7, "c", 18)
    assert decode_header(request(SASL_HANDSHAKE, 1, "")).position == 11


def test_a_client_id_may_be_null_or_empty() -> None:
    assert decode_header(request(METADATA, 8, "", "ffff")) == RequestHeader(
        METADATA, 8, 7, None, 10
    )
    assert decode_header(request(METADATA, 9, "00", "0000")) == RequestHeader(
        METADATA, 9, 7, "", 11
    )


def test_a_header_of_an_unknown_api_or_version_is_read() -> None:
    assert decode_header(request(0x7FFF, 0, "")) == RequestHeader(0x7FFF, 0, 7, "c", 11)
    assert decode_header(request(API_VERSIONS, 99, "00")) == RequestHeader(18, 99, 7, "c", 12)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        request(METADATA, 8, "", "00")[:9],
        request(METADATA, 8, "", "fffe"),
        request(METADATA, 8, "", "0002 63"),
        request(METADATA, 8, "", "7fff"),
        request(METADATA, 8, "", "0001 ff"),
        request(METADATA, 9, ""),
        request(METADATA, 9, "01 00"),
        request(METADATA, 9, "01 00 05 aa"),
        request(METADATA, 9, "ffffffffff"),
    ],
    ids=bytes.hex,
)
def test_a_broken_header_is_refused(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_header(frame)


def test_a_response_is_framed_with_tags_where_it_is_flexible() -> None:
    records = memoryview(b"cd")
    pieces = frame_response(METADATA, 8, 7, [b"ab", records])
    assert pieces == [bytes.fromhex("00000008 00000007"), b"ab", records]
    assert pieces[2] is records
    flexible = b"".join(frame_response(METADATA, 9, 7, [b"ab"]))
    assert flexible == bytes.fromhex("00000007 00000007 00") + b"ab"


def test_the_response_of_api_versions_never_has_tags() -> None:
    for version in (0, 3, 4):
        frame = b"".join(frame_response(API_VERSIONS, version, 7, [b"ab"]))
        assert frame == bytes.fromhex("00000006 00000007") + b"ab"
