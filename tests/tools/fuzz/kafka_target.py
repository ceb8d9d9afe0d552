"""Frames of Kafka's protocol: a request is refused, or is the same after a round trip."""

import random
from functools import cache

from tests.service.kafka.definitions import Interpreter, load
from tests.service.kafka.every_message import every_message
from tests.tools.fuzz.target import Target
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.header import FIRST_FLEXIBLE, decode_header
from tidelog.service.kafka.messages.primitives import MalformedMessage
from tidelog.service.kafka.messages.schema import Message


@cache
def _requests() -> dict[int, type[Message]]:
    return {
        message.api_key: message
        for message in every_message()
        if message.api_key is not None and message.__name__.endswith("Request")
    }


def frames() -> list[bytes]:
    """A request of each API in each version."""
    encoded_frames = []
    for key, message in _requests().items():
        for version in message.versions:
            draw = random.Random(f"{key} {version}")
            oracle = Interpreter(load(message.__name__), version)
            tags = b"\0" if version >= FIRST_FLEXIBLE.get(key, version + 1) else b""
            head = key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\7\0\1c" + tags
            encoded_frames.append(head + oracle.write(oracle.invent(draw)))
    return encoded_frames


def check_request(data: bytes) -> None:
    try:
        header = decode_header(data)
        message = _requests().get(header.api_key)
        if message is None or header.api_version not in message.versions:
            return
        decode = decoder(message, header.api_version)
        message_object = decode(data, header.position)
    except MalformedMessage:
        return
    assert (
        decode(b"".join(encoder(message, header.api_version)(message_object)), 0) == message_object
    )


TARGETS = [Target("kafka_request", frames, check_request, 300)]
