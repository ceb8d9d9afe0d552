"""Frames that real clients sent, byte for byte: their meaning, and the same bytes again.

Recorded from confluent-kafka 2.16.1 (librdkafka 2.16.0), kafka-python 3.0.12 and aiokafka 0.14.0.
"""

import pytest

from tests.service.kafka.every_message import every_message
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
from tidelog.service.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.service.kafka.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.service.kafka.messages.schema import Message
from tidelog.storage.codec.consumer_protocol import assigned

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
                    group_id="g",
                    topics=[OffsetFetchRequestTopics(name="t", partition_indexes=[0])],
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
