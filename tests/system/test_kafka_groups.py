"""Groups of unchanged Kafka clients at `tidelog serve --kafka-port`: assignors, joins, ends."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka as librdkafka
import kafka as kafka_python
import pytest
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from confluent_kafka.admin import AdminClient

from tests.support.broker import Broker
from tests.support.ports import free_port
from tests.system.several import QUICK, brokers
from tests.system.test_kafka_clients import QUIET, Cluster, _produce

PARTITIONS = 6
WAIT_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port = free_port()
    with Broker(tmp_path_factory.mktemp("kafka"), kafka_port=port) as broker:
        broker.create_topic("t", PARTITIONS)
        yield Cluster(broker, port)


class Member:
    """A consumer of librdkafka, and the partitions that it was given."""

    def __init__(
        self, cluster: Cluster, group: str, name: str, address: str = "", **options: Any
    ) -> None:
        self.owned: set[int] = set()
        self.values: list[bytes] = []
        config = {
            "bootstrap.servers": address or cluster.address,
            "group.id": group,
            "client.id": name,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 300,
            **options,
            **QUIET,
        }
        self.consumer = librdkafka.Consumer(config)
        self.consumer.subscribe(
            ["t"], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def _assigned(self, _: Any, partitions: list[Any]) -> None:
        self.owned |= {partition.partition for partition in partitions}

    def _revoked(self, _: Any, partitions: list[Any]) -> None:
        self.owned -= {partition.partition for partition in partitions}

    def poll(self) -> None:
        message = self.consumer.poll(0.01)
        if message is not None and message.error() is None:
            self.values.append(message.value())


def poll_until(members: list[Member], is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline, [member.owned for member in members]
        for member in members:
            member.poll()


def are_shared(members: list[Member]) -> bool:
    sizes = sorted(len(member.owned) for member in members)
    numbers = sorted(number for member in members for number in member.owned)
    return numbers == [*range(PARTITIONS)] and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
def test_librdkafka_members_join_and_leave(cluster: Cluster, assignor: str) -> None:
    sent = [b"%d" % number for number in range(30)]
    _produce(cluster.address, "t", sent)
    options = {"partition.assignment.strategy": assignor}
    members = [Member(cluster, assignor, name, **options) for name in "abc"]
    poll_until(members, lambda: are_shared(members))
    poll_until(members, lambda: {*sent} <= {v for member in members for v in member.values})
    described = json.loads(cluster.broker.cli("groups", "describe", assignor, "--json").stdout)
    assert described["state"] == "STABLE"
    assert described["assignor"] == assignor
    assert sorted(member["client"] for member in described["members"]) == ["a", "b", "c"]
    assert {member["host"] for member in described["members"]} == {"127.0.0.1"}
    assert sorted(name for member in described["members"] for name in member["partitions"]) == [
        f"t-{number}" for number in range(PARTITIONS)
    ]
    members.pop().consumer.close()
    poll_until(members, lambda: are_shared(members))
    for member in members:
        member.consumer.close()  # it commits
    lags = json.loads(cluster.broker.cli("groups", "lag", assignor, "--json").stdout)
    assert sum(partition["offset"] for partition in lags["partitions"]) >= len(sent)


def test_a_static_member_that_restarts_moves_no_partitions(cluster: Cluster) -> None:
    def member(name: str) -> Member:
        return Member(cluster, "static", name, **{"group.instance.id": name})

    members = [member("one"), member("two")]
    poll_until(members, lambda: are_shared(members))
    old_partitions = [set(group_member.owned) for group_member in members]
    members.pop().consumer.close()
    members.append(member("two"))
    poll_until(members, lambda: members[1].owned == old_partitions[1])
    assert members[0].owned == old_partitions[0]
    group = json.loads(cluster.broker.cli("groups", "describe", "static", "--json").stdout)
    assert group["generation"] <= 2
    for group_member in members:
        group_member.consumer.close()


def test_members_go_on_when_their_coordinator_is_killed(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    own = [{"kafka_port": port} for port in ports]
    with brokers(tmp_path, 2, own=own, **QUICK) as both:
        both[0].create_topic("t", PARTITIONS)
        address = ",".join(f"127.0.0.1:{port}" for port in ports)
        members = [Member(Cluster(both[0], ports[0]), "moved", name, address) for name in "ab"]
        poll_until(members, lambda: are_shared(members))
        coordinator = json.loads(both[0].cli("groups", "describe", "moved", "--json").stdout)
        admin = AdminClient({"bootstrap.servers": address}, **QUIET)
        (described,) = (
            future.result() for future in admin.describe_consumer_groups(["moved"]).values()
        )
        coordinator_index = ports.index(described.coordinator.port)
        generation = coordinator["generation"]
        both[coordinator_index].kill()
        survivor = 1 - coordinator_index
        _produce(f"127.0.0.1:{ports[survivor]}", "t", [b"after"])
        poll_until(members, lambda: any(b"after" in member.values for member in members))
        poll_until(members, lambda: are_shared(members))
        again = json.loads(both[survivor].cli("groups", "describe", "moved", "--json").stdout)
        assert again["generation"] in range(generation, generation + 2)
        for member in members:
            member.consumer.close()


DYING = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "dying",
                     "session.timeout.ms": 6000, "auto.offset.reset": "earliest"})
consumer.subscribe(["t"], on_assign=lambda _, found: print(len(found), flush=True))
while True:
    consumer.poll(0.1)
"""


def test_partitions_of_a_killed_member_move_after_its_session(cluster: Cluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DYING, cluster.address], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        survivor = Member(cluster, "dying", "survivor")
        poll_until([survivor], lambda: len(survivor.owned) == PARTITIONS // 2)
        process.kill()
        poll_until([survivor], lambda: are_shared([survivor]))
        survivor.consumer.close()


@pytest.mark.parametrize(
    "assignor", [RoundRobinPartitionAssignor, StickyPartitionAssignor], ids=["turns", "sticky"]
)
def test_aiokafka_and_kafka_python_in_groups(cluster: Cluster, assignor: Any) -> None:
    group = f"aio-{assignor.name}"
    _produce(cluster.address, "t", [b"x"] * 6)

    async def run() -> None:
        members = [
            aiokafka.AIOKafkaConsumer(
                "t",
                bootstrap_servers=cluster.address,
                group_id=group,
                auto_offset_reset="earliest",
                partition_assignment_strategy=[assignor],
                heartbeat_interval_ms=300,
            )
            for _ in range(2)
        ]
        for member in members:
            await member.start()
        deadline = time.monotonic() + WAIT_S
        while sorted(len(member.assignment()) for member in members) != [3, 3]:
            assert time.monotonic() < deadline
            await asyncio.gather(*(member.getmany(timeout_ms=100) for member in members))
        assert not members[0].assignment() & members[1].assignment()
        for member in members:
            await member.commit()
            await member.stop()

    asyncio.run(run())
    consumer = kafka_python.KafkaConsumer(
        "t",
        bootstrap_servers=cluster.address,
        group_id=group,
        auto_offset_reset="earliest",
        consumer_timeout_ms=10_000,
    )
    _produce(cluster.address, "t", [b"after"])
    assert any(message.value == b"after" for message in consumer)
    consumer.close()


def test_admin_clients_see_groups(cluster: Cluster) -> None:
    member = Member(cluster, "seen", "me")
    poll_until([member], lambda: are_shared([member]))
    admin = AdminClient({"bootstrap.servers": cluster.address}, **QUIET)
    listed = admin.list_consumer_groups().result()
    assert "seen" in [group.group_id for group in listed.valid]
    (group_description,) = (
        future.result() for future in admin.describe_consumer_groups(["seen"]).values()
    )
    assert group_description.state.name == "STABLE"
    (member_description,) = group_description.members
    assert member_description.client_id == "me"
    assert len(member_description.assignment.topic_partitions) == PARTITIONS
    with pytest.raises(librdkafka.KafkaException):
        admin.delete_consumer_groups(["seen"])["seen"].result()
    member.consumer.commit(offsets=[librdkafka.TopicPartition("t", 0, 1)], asynchronous=False)
    member.consumer.close()
    request = [librdkafka.ConsumerGroupTopicPartitions("seen")]
    (offsets,) = (future.result() for future in admin.list_consumer_group_offsets(request).values())
    committed = {(part.topic, part.partition): part.offset for part in offsets.topic_partitions}
    assert committed["t", 0] == 1
    admin.delete_consumer_groups(["seen"])["seen"].result()


def test_librdkafka_shows_at_once_that_kip_848_is_not_served(cluster: Cluster) -> None:
    config = {"bootstrap.servers": cluster.address, "group.id": "kip-848", **QUIET}
    consumer = librdkafka.Consumer({**config, "group.protocol": "consumer"})
    consumer.subscribe(["any"])
    message = consumer.poll(20)  # without the refusal, the client says nothing
    assert message is not None
    assert message.error().code() == librdkafka.KafkaError._FATAL
    assert "ConsumerGroupHeartbeat fatal error: Broker: API version not supported" in str(
        message.error()
    )
    consumer.close()
    assert "set group.protocol=classic" in cluster.broker.log()
