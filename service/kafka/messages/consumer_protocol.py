"""The subscriptions and assignments that consumers send each other within group messages.

A broker reads a subscription to learn the topics of a group, and writes subscriptions and
assignments to show the members of a REST group. It reads assignments with
storage.codec.consumer_protocol. A subscription or an assignment begins with its version. A consumer
may send a newer version than the newest one of this module. Its fields begin with the fields of the
newest one of this module, so the decoder ignores the bytes behind them.
"""

import struct
from typing import Annotated

from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.primitives import MalformedMessage
from tidelog.service.kafka.messages.schema import (
    Field,
    Int32,
    Message,
    Structure,
)


class OwnedPartitions(Structure):
    """Partitions of a topic that the member owns."""

    topic: str
    partitions: list[Int32]


class ConsumerProtocolSubscription(Message, versions="0-3", flexible="none"):
    """The topics that a member subscribes to, and what it owns."""

    topics: list[str]
    user_data: bytes | None = None
    owned_partitions: Annotated[list[OwnedPartitions], Field("1+")] = []
    generation_id: Annotated[Int32, Field("2+")] = -1
    rack_id: Annotated[str | None, Field("3+")] = None


class AssignedPartitions(Structure):
    """Partitions of a topic that the member gets."""

    topic: str
    partitions: list[Int32]


class ConsumerProtocolAssignment(Message, versions="0-3", flexible="none"):
    """The partitions that a member gets."""

    assigned_partitions: list[AssignedPartitions]
    user_data: bytes | None = None


def decode_subscription(data: bytes) -> ConsumerProtocolSubscription:
    """Read the metadata of a member's protocol. Raises `MalformedMessage`."""
    name = ConsumerProtocolSubscription.__name__
    if len(data) < _VERSION.size:
        raise MalformedMessage(f"{name}: {len(data)} bytes, too few for a version")
    (version,) = _VERSION.unpack_from(data)
    if version < 0:
        raise MalformedMessage(f"{name}: the version is {version}")
    known_version = min(version, ConsumerProtocolSubscription.versions[-1])
    read = decoder(ConsumerProtocolSubscription, known_version, to_the_end=False)
    return read(data, _VERSION.size)


def encode(
    message: ConsumerProtocolSubscription | ConsumerProtocolAssignment, version: int
) -> bytes:
    """Write a subscription or an assignment with its version."""
    return b"".join([_VERSION.pack(version), *encoder(type(message), version)(message)])


_VERSION = struct.Struct(">h")
