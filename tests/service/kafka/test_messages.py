"""Messages against Kafka's own definitions, in both directions, for every version."""

import random
import traceback

import pytest

from tests.service.kafka.definitions import Interpreter, load, snake_case, within
from tests.service.kafka.every_message import every_message, every_version, instance_of
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.metadata import MetadataResponse, MetadataResponseTopic
from tidelog.service.kafka.messages.schema import Message, Structure, members_of

VALUES = 12
"""Random values of each message and version."""
NOT_SERVED = {"InitProducerId": 6, "DescribeLogDirs": 5}
"""The newest version of Kafka's, by API, where it is not ours."""
NOT_KAFKAS_DEFAULT = {"eligible_leader_replicas", "last_known_elr"}
"""Their default is null, at which clients fail."""


def title(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def test_all_messages_are_found() -> None:
    assert len(every_message()) == 72
    assert len({message.api_key for message in every_message()} - {None}) == 35


@pytest.mark.parametrize("message", every_message(), ids=title)
def test_a_message_has_kafkas_key_versions_and_defaults(message: type[Message]) -> None:
    definition = load(message.__name__)
    newest = NOT_SERVED.get(message.__name__.removesuffix("Request").removesuffix("Response"))
    versions = set(message.versions) | ({newest} if newest else set())
    for version in range(30):
        assert (version in versions) == within(definition.versions, version)
        assert (version in message.flexible) == within(definition.flexible, version)
    assert message.api_key == definition.api_key
    _compare_defaults(message, definition.fields, Interpreter(definition, message.versions[-1]))


def _compare_defaults(structure: type[Structure], fields: list, oracle: Interpreter) -> None:
    kafkas = {snake_case(field["name"]): field for field in fields}
    for member in members_of(structure):
        field = kafkas[member.name]
        if "default" in field and member.name not in NOT_KAFKAS_DEFAULT:
            assert member.default == oracle.default(field), member.name
        if isinstance(member.form, type):
            kind = field["type"].removeprefix("[]")
            _compare_defaults(member.form, field.get("fields") or oracle.structures[kind], oracle)


@pytest.mark.parametrize(("message", "version"), every_version(), ids=title)
def test_a_message_has_the_bytes_of_kafkas_definition(message: type[Message], version: int) -> None:
    oracle = Interpreter(load(message.__name__), version)
    draw = random.Random(f"{message.__name__} {version}")
    decode, encode = decoder(message, version), encoder(message, version)
    for _ in range(VALUES):
        value = oracle.invent(draw)
        expected = oracle.write(value)
        made = instance_of(message, value)
        written = b"".join(encode(made))
        assert written == expected
        assert oracle.read(written) == value
        assert decode(expected, 0) == made
        assert decode(bytearray(b"head" + expected), 4) == made


def test_an_encoder_omits_fields_that_its_version_lacks() -> None:
    topic = MetadataResponseTopic(error_code=0, name="t", topic_id=b"\1" * 16, partitions=[])
    message = MetadataResponse(throttle_time_ms=7, brokers=[], cluster_id="c", topics=[topic])
    read = decoder(MetadataResponse, 0)(b"".join(encoder(MetadataResponse, 0)(message)), 0)
    topic.topic_id = bytes(16)
    assert read == MetadataResponse(brokers=[], topics=[topic])


def test_an_encoder_refuses_a_value_that_does_not_fit() -> None:
    topic = MetadataResponseTopic(error_code=0, name=None, partitions=[])
    message = MetadataResponse(brokers=[], topics=[topic])
    assert encoder(MetadataResponse, 12)(message)
    for version, change in ((11, {}), (12, {"error_code": 2**15}), (12, {"name": "\ud800"})):
        broken = MetadataResponseTopic(**{"error_code": 0, "name": None, "partitions": []} | change)
        with pytest.raises(ValueError, match=f"MetadataResponse version {version} cannot hold"):
            encoder(MetadataResponse, version)(MetadataResponse(brokers=[], topics=[broken]))
    for version in (8, 9):
        topic.name = "x" * 0x8000
        with pytest.raises(ValueError, match="cannot hold"):
            encoder(MetadataResponse, version)(message)


def test_a_version_that_a_message_lacks_is_refused() -> None:
    for make in (decoder, encoder):
        with pytest.raises(ValueError, match="MetadataResponse has the versions 0 to 13, not 14"):
            make(MetadataResponse, 14)


def test_a_traceback_shows_the_compiled_source() -> None:
    message = MetadataResponse(
        brokers=[], topics=[MetadataResponseTopic(error_code=None, name="t", partitions=[])]
    )
    with pytest.raises(ValueError, match="cannot hold") as raised:
        encoder(MetadataResponse, 8)(message)
    shown = "".join(traceback.format_exception(raised.value))
    assert "<encoder of MetadataResponse version 8>" in shown
    assert "v1.error_code" in shown
