"""Messages against Kafka's own definitions, for every version, and frames of real clients."""

import random
import traceback

import pytest

from tests.service.kafka.definitions import Interpreter, load, snake_case, within
from tests.service.kafka.every_message import every_message, every_version, instance_of
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.consumer_protocol import (
    AssignedPartitions,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    decode_subscription,
    encode,
)
from tidelog.service.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.service.kafka.messages.group_offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from tidelog.service.kafka.messages.groups import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    MemberIdentity,
)
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest
from tidelog.service.kafka.messages.header import decode_header
from tidelog.service.kafka.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)
from tidelog.service.kafka.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.service.kafka.messages.schema import Message, Structure, members_of
from tidelog.storage.codec.consumer_protocol import assigned

VALUES = 12
"""Random values of each message and version."""
NOT_SERVED = {"InitProducerId": 6, "DescribeLogDirs": 5}
"""The newest version of Kafka's, by API, where it is not ours."""
NOT_KAFKAS_DEFAULT = {"eligible_leader_replicas", "last_known_elr"}
"""Their default is null, at which clients fail."""


def title(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def test_all_messages_are_found() -> None:
    assert len(every_message()) >= 72
    assert len({message.api_key for message in every_message()} - {None}) >= 35


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


# -- frames that real clients sent


TOPIC_ID = bytes(range(16))
BATCH = bytes.fromhex(
    "00000000000000000000003a00000000025ce132e6000000000000000001a20a7c8028000001a20a7c80280000"
    "0000000000050000000000000000000110000000026b027600"
)
OLD_BATCH = bytes.fromhex(
    "00000000000000000000003affffffff02935489b2000000000000000001a20a7c9ea0000001a20a7c9ea0ffff"
    "ffffffffffffffff000000000000000110000000026b027600"
)
SUBSCRIPTION = "0003 00000001 0001 74 00000000 00000000 ffffffff 0000"
OLD_SUBSCRIPTION = "0000 00000001 0001 74 00000000"


def produce(index: int, batch: bytes) -> list[TopicProduceData]:
    return [
        TopicProduceData(
            name="t", partition_data=[PartitionProduceData(index=index, records=memoryview(batch))]
        )
    ]


FRAMES: dict[str, tuple[str, Message]] = {
    "confluent ApiVersions 3": (
        "001200030000000100016300 17636f6e666c75656e742d6b61666b612d707974686f6e"
        "16322e31362e312d72646b61666b612d322e31362e30 00",
        ApiVersionsRequest(
            client_software_name="confluent-kafka-python",
            client_software_version="2.16.1-rdkafka-2.16.0",
        ),
    ),
    "aiokafka ApiVersions 0": ("0012000000000001000163", ApiVersionsRequest()),
    "confluent Metadata 13": (
        "0003000d00000002000163000200000000000000000000000000000000027400010000",
        MetadataRequest(topics=[MetadataRequestTopic(name="t")]),
    ),
    "aiokafka Metadata 5": ("00030005000000020001630000000001", MetadataRequest(topics=[])),
    "confluent InitProducerId 4": (
        "00160004000000020001630000ffffffffffffffffffffffffffff00",
        InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=-1),
    ),
    "confluent Produce 10": (
        f"0000000a000000030001630000ffff00007530020274020000000047 {BATCH.hex()} 000000",
        ProduceRequest(acks=-1, timeout_ms=30000, topic_data=produce(0, BATCH)),
    ),
    "aiokafka Produce 7": (
        "0000000700000002000163ffff000100009c40000000010001740000000100000000 00000046"
        f"{OLD_BATCH.hex()}",
        ProduceRequest(acks=1, timeout_ms=40000, topic_data=produce(0, OLD_BATCH)),
    ),
    "confluent Fetch 16": (
        "000100100000000600016300000001f400000001032000000100000000ffffffff02"
        "000102030405060708090a0b0c0d0e0f0200000000000000000000000000000000ffffffffffffffffffffffff"
        "001000000000010100",
        FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=52_428_800,
            isolation_level=1,
            topics=[
                FetchTopic(
                    topic_id=TOPIC_ID,
                    partitions=[
                        FetchPartition(
                            partition=0,
                            current_leader_epoch=0,
                            fetch_offset=0,
                            partition_max_bytes=1 << 20,
                        )
                    ],
                )
            ],
        ),
    ),
    "aiokafka Fetch 11": (
        "0001000b00000005000163ffffffff000001f400000001032000000000000000ffffffff00000001000174"
        "0000000100000000ffffffff0000000000000000ffffffffffffffff00100000000000000000",
        FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=52_428_800,
            topics=[
                FetchTopic(
                    topic="t",
                    partitions=[
                        FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
                    ],
                )
            ],
        ),
    ),
    "confluent JoinGroup 5": (
        "000b0005000000030001630001670000afc8000493e00000ffff0008636f6e73756d65720000000200"
        f"0572616e676500000017{SUBSCRIPTION}000a726f756e64726f62696e00000017{SUBSCRIPTION}",
        JoinGroupRequest(
            group_id="g",
            session_timeout_ms=45_000,
            rebalance_timeout_ms=300_000,
            member_id="",
            protocol_type="consumer",
            protocols=[
                JoinGroupRequestProtocol(name=name, metadata=bytes.fromhex(SUBSCRIPTION))
                for name in ("range", "roundrobin")
            ],
        ),
    ),
    "confluent OffsetFetch 9": (
        "00090009000000070001630002026700ffffffff020274020000000000000100",
        OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id="g", topics=[OffsetFetchRequestTopics(name="t", partition_indexes=[0])]
                )
            ],
            require_stable=True,
        ),
    ),
    "kafka-python OffsetCommit 8": (
        "000800080000000500016300026700000001036d310002027402000000000000000000000000ffffffff"
        "01000000",
        OffsetCommitRequest(
            group_id="g",
            generation_id_or_member_epoch=1,
            member_id="m1",
            topics=[
                OffsetCommitRequestTopic(
                    name="t",
                    partitions=[
                        OffsetCommitRequestPartition(
                            partition_index=0, committed_offset=0, committed_metadata=""
                        )
                    ],
                )
            ],
        ),
    ),
    "kafka-python LeaveGroup 5": (
        "000d00050000000900016300026702036d3100000000",
        LeaveGroupRequest(group_id="g", members=[MemberIdentity(member_id="m1")]),
    ),
}


@pytest.mark.parametrize(("text", "message"), FRAMES.values(), ids=FRAMES)
def test_a_frame_is_read_as_its_client_meant_it(text: str, message: Message) -> None:
    frame = bytes.fromhex(text)
    header = decode_header(frame)
    assert header.client_id == "c"
    requests = {
        request.api_key: request
        for request in every_message()
        if request.__name__.endswith("Request")
    }
    kind = requests[header.api_key]
    read = decoder(kind, header.api_version)(frame, header.position)
    assert read == message
    assert b"".join(encoder(kind, header.api_version)(read)) == frame[header.position :]


def test_records_are_slices_of_the_frame() -> None:
    frame = bytes.fromhex(FRAMES["confluent Produce 10"][0])
    header = decode_header(frame)
    read = decoder(ProduceRequest, 10)(frame, header.position)
    records = read.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    assert records.obj is frame


def test_a_subscription_is_read() -> None:
    subscription = ConsumerProtocolSubscription(topics=["t"], user_data=b"")
    assert decode_subscription(bytes.fromhex(OLD_SUBSCRIPTION)) == subscription
    newest = ConsumerProtocolSubscription(topics=["t"], user_data=b"", rack_id="")
    assert decode_subscription(bytes.fromhex(SUBSCRIPTION)) == newest
    assert encode(newest, 3) == bytes.fromhex(SUBSCRIPTION)


def test_an_assignment_is_read() -> None:
    data = bytes.fromhex("0000 00000001 0001 74 00000001 00000000 00000000")
    assert assigned(data) == [("t", (0,))]
    written = ConsumerProtocolAssignment(
        assigned_partitions=[AssignedPartitions(topic="t", partitions=[0])], user_data=b""
    )
    assert encode(written, 0) == data


def test_a_newer_subscription_is_read_as_far_as_it_is_known() -> None:
    newer = b"\0\x09" + bytes.fromhex(SUBSCRIPTION)[2:] + b"more"
    assert decode_subscription(newer) == decode_subscription(bytes.fromhex(SUBSCRIPTION))
