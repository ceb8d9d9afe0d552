"""Hostile bytes and requests: messages, refusals and answers, in bounded memory."""

import contextlib
import random
import tracemalloc
from functools import cache

import pytest

from tests.service.kafka.conftest import Kafka
from tests.service.kafka.definitions import Interpreter, load, write_varint
from tests.service.kafka.every_message import every_version, instance_of
from tests.tools.attack.kafka_values import wrong_values
from tests.tools.fuzz.mutations import mutated
from tidelog.service.kafka.admin.topics import CREATED_MAX
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import group_offsets, groups, metadata, offsets, topics
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.consumer_protocol import decode_subscription
from tidelog.service.kafka.messages.fetch import FetchRequest
from tidelog.service.kafka.messages.group_offsets import OffsetFetchRequest
from tidelog.service.kafka.messages.header import decode_header
from tidelog.service.kafka.messages.metadata import MetadataRequest
from tidelog.service.kafka.messages.primitives import (
    ELEMENTS_MAX,
    ERROR_CHARS_MAX,
    MalformedMessage,
    shown,
)
from tidelog.service.kafka.messages.produce import PRODUCE_ELEMENTS_MAX, ProduceRequest
from tidelog.service.kafka.messages.schema import Message
from tidelog.storage.codec.consumer_protocol import assigned

INPUTS = 20_000
MEMORY_MAX = 32 * 1024 * 1024
"""Bytes in use for one frame: `ELEMENTS_MAX` elements take half of it."""
VERSIONS = every_version()


@cache
def interpreter(message: type[Message], version: int) -> Interpreter:
    return Interpreter(load(message.__name__), version)


@cache
def seeds(message: type[Message], version: int) -> list[bytes]:
    oracle = interpreter(message, version)
    draw = random.Random(f"{message.__name__} {version}")
    return [oracle.write(oracle.invent(draw))[:4096] for _ in range(3)]


def check(message: type[Message], version: int, data: bytes) -> bool:
    """Decode; whether it was a message. A message is the oracle's, also after a round trip."""
    try:
        made = decoder(message, version)(data, 0)
    except MalformedMessage as error:
        refusal = str(error)
    else:
        written = b"".join(encoder(message, version)(made))
        assert decoder(message, version)(written, 0) == made
        assert instance_of(message, interpreter(message, version).read(data)) == made
        return True
    assert refusal.startswith(f"{message.__name__} version {version}: ")
    assert len(refusal) < 300
    return False


def check_mutations(draw: random.Random, count: int) -> int:
    """Check mutated bytes of random messages; returns how many of them are messages."""
    message_count = 0
    for _ in range(count):
        message, version = draw.choice(VERSIONS)
        data = mutated(seeds(message, version), draw)
        try:
            message_count += check(message, version, data)
        except BaseException as error:
            error.add_note(f"{message.__name__} version {version}, input {data.hex()}")
            raise
    return message_count


def test_mutated_bytes_are_refused_or_a_message() -> None:
    assert 0 < check_mutations(random.Random(11), INPUTS) < INPUTS


@pytest.mark.parametrize("fill", ["00", "01", "02", "7f", "81", "ff", "0100", "7fffffff", "ffff7f"])
def test_a_frame_of_one_pattern_uses_bounded_memory(fill: str) -> None:
    pattern = bytes.fromhex(fill)
    data = pattern * (256 * 1024 // len(pattern))
    for message, version in VERSIONS:
        decode = decoder(message, version)
        tracemalloc.start()
        with contextlib.suppress(MalformedMessage):
            decode(data, 0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY_MAX, (message, version)


def test_an_arrays_length_is_checked_before_a_list_is_made() -> None:
    for length in (2**31 - 1, -(2**31), -2, 1_000_000):
        frame = b"\xff\xff\xff\xff\0\0\x75\x30" + length.to_bytes(4, "big", signed=True)
        assert_refused(ProduceRequest, 3, frame, "topic_data has")
    for length in (2**31 - 2, 1_000_000):
        frame = b"\0\xff\xff\0\0\x75\x30" + write_varint(length + 1)
        assert_refused(ProduceRequest, 13, frame, "topic_data has")
    assert_refused(ProduceRequest, 13, b"\0\xff\xff\0\0\x75\x30\0", "topic_data has -1 elements")
    assert_refused(MetadataRequest, 0, b"\xff" * 4, "topics has -1 elements")


def test_the_elements_of_all_arrays_are_bounded() -> None:
    topic = b"\1\1\0"  # no name, no partitions, no tags

    def frame(topics: int) -> bytes:
        return b"\0\xff\xff\0\0\x75\x30" + write_varint(topics + 1) + topic * topics + b"\0"

    tracemalloc.start()
    made = decoder(ProduceRequest, 9)(frame(PRODUCE_ELEMENTS_MAX), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.topic_data) == PRODUCE_ELEMENTS_MAX
    assert peak < MEMORY_MAX
    assert_refused(ProduceRequest, 9, frame(PRODUCE_ELEMENTS_MAX + 1), "too many")


def test_integers_are_elements_too() -> None:
    group = b"\2\2g\2\2t"  # one group with one topic

    def asked(count: int) -> bytes:
        return group + write_varint(count + 1) + bytes(4 * count) + b"\0\0\0\0"

    made = decoder(OffsetFetchRequest, 8)(asked(ELEMENTS_MAX - 2), 0)
    assert made.groups[0].topics is not None
    assert len(made.groups[0].topics[0].partition_indexes) == ELEMENTS_MAX - 2
    assert_refused(OffsetFetchRequest, 8, asked(ELEMENTS_MAX - 1), "too many")


def test_a_varint_without_end_is_refused() -> None:
    assert_refused(ProduceRequest, 9, b"\xff" * 100, "varint")
    assert_refused(ProduceRequest, 9, b"\xff\xff\xff\xff\x08", "varint")
    assert_refused(ProduceRequest, 9, b"\xff\xff", "near byte")


def test_a_string_is_bounded_and_is_utf_8() -> None:
    assert_refused(ProduceRequest, 9, write_varint(0x8001) + b"x" * 0x8000, "32768 bytes")
    assert_refused(ProduceRequest, 3, b"\0\1\xff\xff\xff\0\0\0\0\0\0\0\0", "codec can't decode")
    assert_refused(ProduceRequest, 3, b"\xff\xfe" + b"\0" * 20, "length below 0")


def test_a_message_ends_where_its_frame_ends() -> None:
    frame = b"\0\xff\xff\0\0\x75\x30\1\0"
    decode = decoder(ProduceRequest, 9)
    assert decode(frame, 0).topic_data == []
    assert_refused(ProduceRequest, 9, frame + b"\0", "ends at byte 9, the frame at 10")
    for end in range(len(frame)):
        assert_refused(ProduceRequest, 9, frame[:end], "version 9")
    records = b"\0\xff\xff\0\0\x75\x30\2\2t\2\0\0\0\0\x0aabc"  # nine bytes of records, and three
    assert_refused(ProduceRequest, 9, records, "ProduceRequest version 9")


def test_tagged_fields_are_bounded() -> None:
    body = b"\0\xff\xff\0\0\x75\x30\1"
    unknown = b"\x64\3abc"
    for count in (1, 200, PRODUCE_ELEMENTS_MAX):
        tagged_body = body + write_varint(count) + unknown * count
        assert decoder(ProduceRequest, 9)(tagged_body, 0).acks == -1
    many = PRODUCE_ELEMENTS_MAX + 1
    assert_refused(ProduceRequest, 9, body + write_varint(many) + unknown * many, "too many")
    assert_refused(ProduceRequest, 9, body + b"\1\x64\4abc", "cut off")
    assert_refused(ProduceRequest, 9, body + b"\1\x64\xff\xff\xff\xff\x07abc", "cut off")
    topic = b"\1\1\2" + unknown * 2  # no name, no partitions, two tags: three elements
    topics = PRODUCE_ELEMENTS_MAX // 3 + 1
    all_topics = body[:-1] + write_varint(topics + 1) + topic * topics
    assert_refused(ProduceRequest, 9, all_topics + b"\0", "2 tagged fields at byte .* are too many")


def test_a_known_tagged_field_fills_its_size() -> None:
    draw = random.Random(3)
    oracle = Interpreter(load("FetchRequest"), 12)
    value = oracle.invent(draw) | {"cluster_id": None}
    body = oracle.write(value)[:-1]
    decode = decoder(FetchRequest, 12)
    assert decode(body + b"\1\0\2\2c", 0).cluster_id == "c"
    assert decode(body + b"\1\0\1\0", 0).cluster_id is None
    assert_refused(FetchRequest, 12, body + b"\1\0\3\2cc", "does not fill its size")
    assert_refused(FetchRequest, 12, body + b"\1\0\1\2c", "does not fill its size")


def test_a_consumers_metadata_is_refused_or_read() -> None:
    draw = random.Random(5)
    valid = []
    for name in ("ConsumerProtocolSubscription", "ConsumerProtocolAssignment"):
        for version in range(4):
            oracle = Interpreter(load(name), version)
            valid.append(version.to_bytes(2, "big") + oracle.write(oracle.invent(draw))[:500])
    for _ in range(2_000):
        data = mutated(valid, draw)
        for read in (decode_subscription, decode_header):
            with contextlib.suppress(MalformedMessage):
                read(data)
        assigned(data)


def assert_refused(message: type[Message], version: int, data: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason):
        decoder(message, version)(data, 0)


TIMES = 50


async def test_metadata_describes_a_topic_once(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    for named in ({"name": "t"}, {"name": None, "topic_id": topic_id}, {"name": "unknown"}):
        asked = [metadata.MetadataRequestTopic(**named) for _ in range(TIMES)]  # type: ignore[arg-type]
        request = metadata.MetadataRequest(topics=asked)
        response = await kafka.client().ask(request, metadata.MetadataResponse, 12)
        assert len(response.topics) == 1


async def test_offset_fetch_answers_each_partition_once(kafka: Kafka) -> None:
    asked = [
        group_offsets.OffsetFetchRequestTopics(name=name, partition_indexes=[0, 1, 0] * TIMES)
        for name in ("t", "none") * 5
    ]
    request = group_offsets.OffsetFetchRequest(
        groups=[
            group_offsets.OffsetFetchRequestGroup(group_id="g", topics=wanted)
            for wanted in (asked, None) * 5
        ]
    )
    response = await kafka.client().ask(request, group_offsets.OffsetFetchResponse, 8)
    group, every_topic = response.groups
    assert [
        [partition.partition_index for partition in topic.partitions] for topic in group.topics
    ] == [[0, 1], [0, 1]]
    assert every_topic.topics == []
    old = [
        group_offsets.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 0]) for _ in range(9)
    ]
    request = group_offsets.OffsetFetchRequest(group_id="g", topics=old)
    response = await kafka.client().ask(request, group_offsets.OffsetFetchResponse, 5)
    assert [len(topic.partitions) for topic in response.topics] == [1]


async def test_groups_are_described_and_deleted_once(kafka: Kafka) -> None:
    request = groups.DescribeGroupsRequest(groups=["g"] * TIMES)
    described = await kafka.client().ask(request, groups.DescribeGroupsResponse, 5)
    assert [group.group_id for group in described.groups] == ["g"]
    deletion = groups.DeleteGroupsRequest(groups_names=["g"] * TIMES)
    deleted = await kafka.client().ask(deletion, groups.DeleteGroupsResponse, 2)
    assert [group.group_id for group in deleted.results] == ["g"]


async def test_list_offsets_searches_a_partition_once(kafka: Kafka) -> None:
    parts = [offsets.ListOffsetsPartition(partition_index=0, timestamp=-1) for _ in range(3)]
    request = offsets.ListOffsetsRequest(
        replica_id=-1, topics=[offsets.ListOffsetsTopic(name="t", partitions=parts)]
    )
    response = await kafka.client().ask(request, offsets.ListOffsetsResponse, 7)
    codes = [partition.error_code for partition in response.topics[0].partitions]
    assert codes == [Code.NONE, Code.INVALID_REQUEST, Code.INVALID_REQUEST]


async def test_a_request_creates_a_bounded_number_of_topics(kafka: Kafka) -> None:
    wanted = [
        topics.CreatableTopic(
            name=f"n{number}", num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        for number in range(CREATED_MAX + 1)
    ]
    request = topics.CreateTopicsRequest(topics=wanted, validate_only=True)
    response = await kafka.client().ask(request, topics.CreateTopicsResponse, 5)
    assert {topic.error_code for topic in response.topics} == {Code.INVALID_REQUEST}
    request.topics.pop()
    response = await kafka.client().ask(request, topics.CreateTopicsResponse, 5)
    assert {topic.error_code for topic in response.topics} == {Code.NONE}


async def test_wrong_values_are_answered(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    apis = kafka.server.listener.server.apis
    for request, version in wrong_values():
        key = request.api_key
        assert key is not None
        await kafka.client().ask(request, apis[key].response, version)
    assert "bug in" not in caplog.text


def test_an_errors_message_is_cut() -> None:
    assert shown(None) is None
    assert shown("x" * ERROR_CHARS_MAX) == "x" * ERROR_CHARS_MAX
    assert shown("x" * 40_000) == "x" * ERROR_CHARS_MAX + "..."
