"""Kafka clients of three brokers that are killed, stopped and started again.

Nothing acked is lost or doubled, the order is kept, and the clients go on by themselves.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka as librdkafka
import pytest
from confluent_kafka.admin import AdminClient

from tests.sim.groupcheck import check_all
from tests.support.broker import Broker, tidelog
from tests.support.history import violations
from tests.support.pace import is_within
from tests.support.ports import free_port
from tests.support.versions import variables_of
from tests.system.checks import new_topic, the_log
from tests.system.client import wait_until
from tests.system.kafka_load import QUIET, KafkaGroup, KafkaProducer
from tests.system.load import Load, Mix
from tests.system.recorded import history_of
from tests.system.several import QUICK, brokers
from tidelog.storage.core import format_levels

PARTITIONS = 6
ACKS = 200
PATIENT = QUICK | {"broker_heartbeat_interval_ms": 1000, "broker_timeout_ms": 240_000}
"""The store alone would name a killed broker for four minutes."""


class Cluster:
    """Three brokers with listeners for Kafka clients, and what their clients see of them."""

    def __init__(self, cluster_brokers: list[Broker], ports: list[int]) -> None:
        self.brokers = cluster_brokers
        self.ports = ports
        self.addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._admins = [
            AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", **QUIET}) for port in ports
        ]

    def connect(self) -> None:
        """Connect every admin client.

        A new client of librdkafka that learns of a broker which is then killed sends its first
        request there, again and again until the timeout.
        """
        self.wait_until_named(self.ports, list(range(len(self.ports))))

    def named(self, number: int) -> set[int]:
        """The ports of the brokers that Metadata of one broker names."""
        brokers = self._admins[number].list_topics(timeout=60).brokers
        return {broker.port for broker in brokers.values()}

    def wait_until_named(self, ports: list[int], by: list[int]) -> None:
        wait_until(
            lambda: all(self.named(number) == set(ports) for number in by), "the new Metadata"
        )

    def coordinator(self, group: str) -> int:
        """The number of the broker that coordinates a group."""
        futures = self._admins[0].describe_consumer_groups([group], request_timeout=60)
        port: int = futures[group].result().coordinator.port
        return self.ports.index(port)

    def committed(self, group: str, number: int) -> dict[int, int]:
        """The committed offsets by partition.

        The client begins at one broker, and is new: an admin client of librdkafka waits for the
        coordinator that it knows, also if that was killed.
        """
        group_partitions = librdkafka.ConsumerGroupTopicPartitions(group)
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.ports[number]}", **QUIET})
        futures = admin.list_consumer_group_offsets([group_partitions], request_timeout=60)
        return {
            partition.partition: partition.offset
            for partition in futures[group].result().topic_partitions
        }


class Clients(NamedTuple):
    """Two producers and a group, whose topic has PARTITIONS partitions."""

    topic: str
    producers: list[KafkaProducer]
    group: KafkaGroup

    def wait_for_acks(self, count: int = ACKS) -> None:
        for producer in self.producers:
            producer.wait_for_acks(count)

    def check(self, cluster: Cluster, rest_load: Load | None = None) -> None:
        """End the producers, also REST's, wait for the group, and compare all with the log."""
        requests = [request for producer in self.producers for request in producer.finish()]
        if rest_load is not None:
            requests += [sent.request for sent in rest_load.finish()]
        log = the_log(cluster.brokers[1], self.topic, PARTITIONS)
        assert violations(requests, log) == []
        events = [producer.events for producer in self.producers] + (
            rest_load.events if rest_load else []
        )
        assert check_all(history_of(self.topic, events, log)) == []
        self.group.wait_for([len(log[number]) for number in range(PARTITIONS)])
        assert self.group.wrong(log) == []


@contextlib.contextmanager
def under_load(
    folder: Path, variables: Mapping[str, str] | None = None, **configs: Any
) -> Iterator[tuple[Cluster, Clients]]:
    """Three brokers, with these variables (Broker.use), and clients at work.

    `configs` are those of the topic.
    """
    ports, topic = [free_port() for _ in range(3)], new_topic()
    own = [{"kafka_port": port, "kafka_node_id": n} for n, port in enumerate(ports, start=1)]
    with (
        brokers(folder, own=own, variables=variables, **PATIENT) as cluster_brokers,
        contextlib.ExitStack() as running,
    ):
        cluster = Cluster(cluster_brokers, ports)
        cluster_brokers[0].create_topic(topic, PARTITIONS, **configs)
        producers = [KafkaProducer(cluster.addresses, topic, PARTITIONS, n) for n in (1, 2)]
        group = running.enter_context(KafkaGroup(cluster.addresses, topic, "g"))
        for producer in producers:
            running.enter_context(producer).wait_for_acks(ACKS)
        cluster.connect()
        yield cluster, Clients(topic, producers, group)


def test_kafka_clients_survive_the_kill_and_the_stop_of_brokers(tmp_path: Path) -> None:
    """The first broker that is killed coordinates the group, and leaves the others' Metadata."""
    with under_load(tmp_path) as (cluster, clients):
        group = clients.group
        group.wait_for([1] * PARTITIONS)
        killed = cluster.coordinator("g")
        other_numbers = [number for number in range(3) if number != killed]
        old_offsets = cluster.committed("g", other_numbers[0])
        rebalances = group.rebalances
        group.start_gap()
        cluster.brokers[killed].kill()
        killed_s = time.monotonic()
        ports = [cluster.ports[number] for number in other_numbers]
        cluster.wait_until_named(ports, other_numbers)
        out_s = time.monotonic() - killed_s
        assert is_within(out_s, 2.0), f"{out_s:.2f} s until the killed broker left Metadata"
        clients.wait_for_acks()
        acks = [round(producer.longest_ack_s, 2) for producer in clients.producers]
        print(f"out of Metadata after {out_s:.2f} s, longest acks {acks} s, longest gap", end=" ")
        print(f"of a partition {group.longest_gap_s:.2f} s, assignments {rebalances}", end=" ")
        print(f"before, {group.rebalances} after")
        new_offsets = cluster.committed("g", other_numbers[0])
        assert all(new_offsets[number] >= offset for number, offset in old_offsets.items())
        assert group.rebalances <= rebalances + 3, "one rebalance of three members"
        cluster.brokers[killed].start()
        cluster.wait_until_named(cluster.ports, [*range(3)])
        assert cluster.brokers[other_numbers[0]].stop() == 0
        clients.wait_for_acks()
        cluster.brokers[other_numbers[0]].start()
        clients.check(cluster)


def test_a_rolling_restart_is_no_error_for_kafka_clients(tmp_path: Path) -> None:
    """The group moves from coordinator to coordinator, without a new generation."""
    with under_load(tmp_path) as (cluster, clients):
        group = clients.group
        group.wait_for([1] * PARTITIONS)
        rebalances = group.rebalances
        group.start_gap()
        for broker in cluster.brokers:
            assert broker.stop() == 0, broker.log()
            clients.wait_for_acks(ACKS // 4)
            broker.start()
            clients.wait_for_acks(ACKS // 4)
        clients.check(cluster)
        acks = [round(producer.longest_ack_s, 2) for producer in clients.producers]
        print(f"longest acks {acks} s, longest gap of a partition {group.longest_gap_s:.2f} s,")
        print(f"assignments {rebalances} before, {group.rebalances} after")
        assert group.errors == []
        assert group.rebalances <= rebalances + 3, "at most one rebalance of three members"


def test_kafka_clients_go_on_while_the_level_of_the_format_rises(tmp_path: Path) -> None:
    """Below level 4, brokers store the columns of record batches, from level 4 on the batches."""
    store = tmp_path / "store"
    store.mkdir()
    identity = {"format": format_levels.KAFKA - 1, "cluster_id": "c0ffee", "created_ms": 1}
    (store / "cluster.json").write_text(json.dumps(identity))
    with under_load(tmp_path, segment_ms="1000") as (cluster, clients):
        for broker in cluster.brokers:  # the roll: each broker stops and starts under load
            assert broker.stop() == 0
            broker.start()
            clients.wait_for_acks(ACKS // 4)
        fast = {
            f"TIDELOG_{name.upper()}": str(value)
            for name, value in PATIENT.items()
            if name.startswith("broker")
        }
        process = tidelog("upgrade", "--yes", "--store", cluster.brokers[0].store, **fast)
        old_level, new_level = format_levels.KAFKA - 1, format_levels.NEWEST
        assert process.stdout == b"level of the format: %d to %d\n" % (old_level, new_level)
        clients.wait_for_acks()
        clients.check(cluster)


def test_brokers_of_an_older_version_are_replaced_under_load(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One broker after the other, and one of them goes back for a while.

    In between, brokers of both versions serve the same topic.
    """
    revision = request.config.getoption("--old-version")
    if revision is None:
        pytest.skip("--old-version names no revision")
    old = variables_of(revision, tmp_path / "old")
    with under_load(tmp_path, old, segment_ms="1000") as (cluster, clients):
        a, b, c = cluster.brokers
        urls = [broker.base_url for broker in cluster.brokers]
        with Load(urls, Mix(clients.topic, PARTITIONS, 2, first=50), seed=1) as load:
            for broker, variables in ((a, None), (b, None), (a, old), (c, None), (a, None)):
                assert broker.stop() == 0, broker.log()
                clients.wait_for_acks()
                broker.use(variables)
                broker.start()
                clients.wait_for_acks()
                load.wait_for_acks(ACKS // 4)
            clients.check(cluster, load)
            acks = [producer.acks for producer in clients.producers]
            print(f"{acks} records of Kafka clients and {load.acked()} requests of REST acked,")
            print(f"{clients.group.count()} records read, {clients.group.errors}")


@pytest.fixture(autouse=True)
def _no_traceback(tmp_path: Path) -> Iterator[None]:
    """No broker's log has a traceback at the end of a test."""
    yield
    for log in tmp_path.glob("*/broker.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
