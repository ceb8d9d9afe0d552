"""The subscriptions and assignments that consumers send each other within group messages.

A broker reads them to show them and to learn the topics of a group. Each begins with its version.
A consumer may send a version that is newer than ours: its fields begin with those of the newest
version that we know, so what follows them is ignored.
"""

import struct
from typing import Annotated, TypeVar

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


M = TypeVar("M", ConsumerProtocolSubscription, ConsumerProtocolAssignment)


def decode_subscription(data: bytes) -> ConsumerProtocolSubscription:
    """Read the metadata of a member's protocol. Raises `MalformedMessage`."""
    return _decode(ConsumerProtocolSubscription, data)


def decode_assignment(data: bytes) -> ConsumerProtocolAssignment:
    """Read the assignment of a member. Raises `MalformedMessage`."""
    return _decode(ConsumerProtocolAssignment, data)


def encode(message: M, version: int) -> bytes:
    """Write a subscription or an assignment with its version."""
    return b"".join([_VERSION.pack(version), *encoder(type(message), version)(message)])


_VERSION = struct.Struct(">h")


def _decode(message: type[M], data: bytes) -> M:
    if len(data) < _VERSION.size:
        raise MalformedMessage(f"{message.__name__}: {len(data)} bytes, too few for a version")
    (version,) = _VERSION.unpack_from(data)
    if version < 0:
        raise MalformedMessage(f"{message.__name__}: the version is {version}")
    known = min(version, message.versions[-1])
    return decoder(message, known, to_the_end=False)(data, _VERSION.size)
