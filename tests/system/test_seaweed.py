"""Brokers on a real S3 server: the whole way of a record, kills, several brokers, lost answers."""

import contextlib
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker, tidelog
from tests.support.history import Log, Request, Written, violations
from tests.support.seaweed import REGION, Seaweed
from tests.system.checks import check_retries, new_topic, table_at, the_log, wait_for_commits
from tests.system.client import Client, wait_until
from tests.system.load import Load, Mix
from tests.system.lossy import LossyProxy
from tests.system.several import stopped
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options

PARTITIONS = 3
MEETING = {"broker_heartbeat_interval_ms": 200, "broker_timeout_ms": 2000}
"""Of brokers that are to know each other soon."""

pytestmark = pytest.mark.seaweed


@pytest.fixture
def store(seaweed: Seaweed) -> str:
    """A prefix of its own."""
    return f"s3://{seaweed.bucket}/{secrets.token_hex(4)}/logs"


async def table_in(seaweed: Seaweed, store: str) -> Log:
    """The rows of the only topic's table, by deltalake alone."""
    options = S3Options(endpoint_url=seaweed.endpoint_url, region=REGION)
    prefix = store.removeprefix(f"s3://{seaweed.bucket}/")
    opened_store = await S3Store.open(seaweed.bucket, prefix, options)
    try:
        keys = [info.key async for info in opened_store.list("topics/")]
        (topic,) = {key.split("/")[1] for key in keys}
        options_of_delta = await opened_store.deltalake_options()
        return table_at(opened_store.table_uri(f"topics/{topic}"), PARTITIONS, options_of_delta)
    finally:
        await opened_store.close()


async def test_a_record_goes_all_the_way(seaweed: Seaweed, store: str, tmp_path: Path) -> None:
    """Produced, sealed, read over both tiers after a kill, and seen by others in the table."""
    topic, seed = new_topic(), secrets.randbits(32)
    mix = Mix(topic, PARTITIONS, acks=("all", "1"))
    endpoint = {"s3_endpoint": seaweed.endpoint_url}
    with Broker(tmp_path, store, hot_dir=tmp_path / "hot", **endpoint) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            with Load(broker.base_url, mix, seed) as load:
                load.wait_for_acks(100)
                sent = load.finish()
            assert client.call("POST", f"/admin/topics/{topic}/seal").status == 200
            wait_for_commits(broker)
            metrics = client.metrics()
        assert metrics["tidelog_sealed_records_total"] > 0
        assert metrics["tidelog_wal_puts_total"] == metrics["tidelog_wal_seq"]
        assert metrics["tidelog_requests_per_flush"] == 1.0
        with Load(broker.base_url, mix._replace(first=mix.producers), seed) as load:
            load.wait_for_acks(20)
            broker.restart()
            load.wait_for_acks(20)
            sent += load.finish()
        wait_for_commits(broker)
        log = the_log(broker, topic, PARTITIONS)
        requests = [sending.request for sending in sent]
        assert violations(requests, log) == []
        table = await table_in(seaweed, store)
        assert any(table.values())
        for partition, records in table.items():
            assert records == log[partition][: len(records)]
        check_retries(
            broker, topic, [sending for sending in sent if sending.request.is_acked][-10:]
        )
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []
        assert broker.stop() == 0


def test_i3_two_brokers_on_one_prefix_are_one_log(
    seaweed: Seaweed, store: str, tmp_path: Path
) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    endpoint = {"s3_endpoint": seaweed.endpoint_url, **MEETING}
    with (
        Broker(tmp_path / "a", store, hot_dir=tmp_path / "hot-a", **endpoint) as our_broker,
        Broker(tmp_path / "b", store, hot_dir=tmp_path / "hot-b", **endpoint) as their_broker,
        Client(our_broker.base_url) as ours,
        Client(their_broker.base_url) as theirs,
    ):
        ours.create_topic(topic, PARTITIONS, segment_ms=500)
        assert topic in theirs.call("GET", "/topics").json()
        alone = []
        with (
            Load(our_broker.base_url, Mix(topic, PARTITIONS, 1, pause_s=0.01), seed) as load,
            Load(
                their_broker.base_url, Mix(topic, PARTITIONS, 1, pause_s=0.01, first=1), seed
            ) as load_2,
        ):
            for number in range(10):
                writer, reader = (ours, theirs) if number % 2 else (theirs, ours)
                request = Request([Written(b'"alone %d"' % number)], producer=-1)
                key = f"{topic}-alone-{number}"
                writer.send(topic, request, key=key)
                ((place,),) = request.acks
                records = reader.read(topic, place.partition, place.offset)
                assert records[0].value == request.records[0].value, "seen right after its ack"
                reader.send(topic, request, key=key)  # a retry on another broker
                alone.append(request)
            load_2.wait_for_acks(5)
            their_broker.restart()
            load.wait_for_acks(10)
            load_2.wait_for_acks(10)
            sent = [*load.finish(), *load_2.finish()]
        logs = [the_log(broker, topic, PARTITIONS) for broker in (our_broker, their_broker)]
        assert logs[0] == logs[1]
        assert violations([*alone, *(sending.request for sending in sent)], logs[0]) == []
        with Client(their_broker.base_url) as again:
            handed_over = [it.metrics()["tidelog_handovers_total"] for it in (ours, again)]
        assert sum(handed_over) > 0, "they never met"


def wait_for_one_sequencer(clients: list[Client]) -> int:
    """Wait until all brokers agree on the live brokers and one sequencer; return its place."""
    flags: list[float] = []

    def agree() -> bool:
        metrics = [client.metrics() for client in clients]
        flags[:] = [series["tidelog_is_sequencer"] for series in metrics]
        live = [series["tidelog_live_brokers"] for series in metrics]
        return sum(flags) == 1 and live == [len(clients)] * len(clients)

    wait_until(agree, "one sequencer")
    return flags.index(1)


def test_unknown_put_outcomes_at_the_sequencer_are_resolved(
    seaweed: Seaweed, store: str, tmp_path: Path
) -> None:
    """The sequencer commits for three brokers.

    Its connections to the store break within requests and within answers, so the outcomes of many
    stored PUTs are unknown to it.
    """
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    # Long, so that late heartbeats of a busy machine do not move the sequencer to another broker.
    settings = MEETING | {"broker_timeout_ms": 60_000}
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(LossyProxy(seaweed.endpoint_url, seed + i)) for i in range(3)]
        brokers = [
            stack.enter_context(
                Broker(folder, store, s3_endpoint=way.url, hot_dir=folder / "hot", **settings)
            )
            for way, folder in zip(
                ways, (tmp_path / "a", tmp_path / "b", tmp_path / "c"), strict=True
            )
        ]
        clients = [stack.enter_context(Client(broker.base_url)) for broker in brokers]
        clients[0].create_topic(topic, PARTITIONS)
        first = wait_for_one_sequencer(clients)
        loads = [
            stack.enter_context(
                Load(broker.base_url, Mix(topic, PARTITIONS, 2, first=10 * number), seed)
            )
            for number, broker in enumerate(brokers)
        ]
        with ways[first].losing(answers=0.1, requests=0.1):
            unknown = "tidelog_wal_unknown_total"
            wait_until(lambda: clients[first].metrics()[unknown] >= 20, "unknown outcomes")
            for load in loads:
                load.wait_for_acks(20)
        sent = [sending for load in loads for sending in load.finish()]
        logs = [the_log(broker, topic, PARTITIONS) for broker in brokers]
        assert logs[0] == logs[1] == logs[2]
        assert violations([sending.request for sending in sent], logs[0]) == []


def test_answers_that_get_lost_lose_and_double_nothing(
    seaweed: Seaweed, store: str, tmp_path: Path
) -> None:
    """Connections to the store break in the middle of requests and of answers.

    Outcomes of PUTs are unknown, and found out (DESIGN 4).
    """
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    with (
        LossyProxy(seaweed.endpoint_url, seed) as proxy,
        Broker(tmp_path, store, s3_endpoint=proxy.url, hot_dir=tmp_path / "hot") as broker,
        Client(broker.base_url) as client,
    ):
        client.create_topic(topic, PARTITIONS, segment_ms=300)
        mix = Mix(topic, PARTITIONS, acks=("all", "1"))
        with Load(broker.base_url, mix, seed) as load, proxy.losing(answers=0.1, requests=0.1):
            unknown = "tidelog_wal_unknown_total"
            wait_until(lambda: client.metrics()[unknown] >= 20, "unknown outcomes")
            load.wait_for_acks(20)
            with proxy.losing(answers=0, requests=0):
                sent = load.finish()
        assert client.metrics()["tidelog_requests_per_flush"] > 1.0
        requests = [sending.request for sending in sent]
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []
        broker.restart()
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []


def test_a_broker_that_stops_while_the_store_is_silent(
    seaweed: Seaweed, store: str, tmp_path: Path
) -> None:
    """Its clients get `outcome unknown` in time, and it ends once the store answers."""
    topic = new_topic()
    unknown, local = (Request([Written(b'"%d"' % it)], is_keyed=False) for it in range(2))
    endpoint = {"s3_endpoint": seaweed.endpoint_url}
    with Broker(tmp_path, store, hot_dir=tmp_path / "hot", **endpoint) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
        with ThreadPoolExecutor(2) as pool:
            with stopped(seaweed):
                status = pool.submit(_send_alone, broker, topic, unknown, "all")
                assert _send_alone(broker, topic, local, "1") == 200
                stopping = pool.submit(broker.stop)
                assert status.result() == 504
            assert stopping.result() == 0
        assert "Traceback" not in broker.log()
        broker.settings["hot_dir"] = tmp_path / "another"
        broker.start()
        assert violations([unknown, local], the_log(broker, topic, PARTITIONS)) == []


def _send_alone(broker: Broker, topic: str, request: Request, acks: str) -> int:
    with Client(broker.base_url) as client:
        return client.send(topic, request, acks=acks)


def test_a_running_cluster_is_backed_up_to_s3_and_restored_to_another_prefix(
    seaweed: Seaweed, store: str, tmp_path: Path
) -> None:
    """A whole backup, then an incremental one with another old one removed, under load.

    The restored cluster has all that was acked.
    """
    topic = new_topic()
    endpoint = {"s3_endpoint": seaweed.endpoint_url}
    place, new = f"{store}-backups", f"{store}-new"

    def command(*arguments: str) -> bytes:
        process = tidelog(*arguments, TIDELOG_S3_ENDPOINT=seaweed.endpoint_url)
        return process.stdout

    def backup(*options: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(
            command("backup", place, "--store", store, "--verify", "--json", *options)
        )
        return report

    def seal(broker: Broker) -> None:
        with Client(broker.base_url) as client:
            assert client.call("POST", f"/admin/topics/{topic}/seal").status == 200

    with Broker(tmp_path, store, **endpoint) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
        # A backup copies each entry that is written meanwhile, and reads it again.
        mix = Mix(topic, PARTITIONS, producers=2, pause_s=0.3)
        with Load(broker.base_url, mix, secrets.randbits(32)) as load:
            load.wait_for_acks(20)
            seal(broker)
            first = backup()
            assert first["copied_objects"] == first["objects"] > 0
            load.wait_for_acks(20)
            seal(broker)
            load.finish()
        second = backup("--keep", "1", "--max-bytes-per-s", "100000000")
        assert 0 < second["copied_objects"] < second["objects"]
        assert (second["removed_backups"], second["doubts"]) == (1, [])
        expected = the_log(broker, topic, PARTITIONS)
    command("restore", place, "--store", new)
    assert b"whole" in command("scrub", "--store", new)
    with Broker(tmp_path / "restored", new, **endpoint) as broker:
        assert the_log(broker, topic, PARTITIONS) == expected
