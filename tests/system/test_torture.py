"""Three brokers on a real S3 server, killed and stopped at random: answers are true.

The way from each to the server fails, too (I1 to I7).

`make torture MINUTES=10` runs it for longer. A run is drawn from a seed; processes and threads are
not, so the same seed gives the same deeds, not the same run.
"""

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sim.groupcheck import check_all
from tests.sim.history import Event, Fetched
from tests.support.broker import Broker, tidelog
from tests.support.history import violations
from tests.support.ports import free_port, free_port_pairs
from tests.support.seaweed import Seaweed
from tests.system.checks import check_retries, new_topic, the_log
from tests.system.client import Client
from tests.system.fault_proxy import FaultProxy
from tests.system.kafka_load import KafkaGroup, KafkaProducer
from tests.system.load import Load, Mix, Reading, Sent
from tests.system.nemesis import OFTEN, VIEW_AGE_S, YOUNG, Nemesis
from tests.system.recorded import Witness, history_of
from tests.system.several import QUICK, brokers, metrics
from tests.system.transform import Found, Names, Worker, check

PARTITIONS = 3
PAUSE_S = 0.03
"""Of each producer after a request, so that a run of minutes can still be checked."""

pytestmark = pytest.mark.seaweed


@pytest.mark.slow
def test_answers_to_clients_are_true(
    seaweed: Seaweed, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seconds = 60 * float(request.config.getoption("--torture-minutes"))
    seed = request.config.getoption("--torture-seed") or secrets.randbits(32)
    print(f"seed {seed}")
    topic = new_topic()
    names = Names(topic, new_topic(), new_topic(), "workers")
    store = f"s3://{seaweed.bucket}/{secrets.token_hex(4)}/logs"
    direct = {"TIDELOG_S3_ENDPOINT": seaweed.endpoint_url}
    variables = direct | {f"TIDELOG_{name.upper()}": str(value) for name, value in YOUNG.items()}
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(FaultProxy(seaweed.endpoint_url, seed + i)) for i in range(3)]
        ports = free_port_pairs(3)
        peers = [
            stack.enter_context(FaultProxy(f"http://127.0.0.1:{port}", seed - port))
            for port in ports
        ]
        kafka_ports = [free_port() for _ in ways]
        own = [
            {
                "s3_endpoint": way.url,
                "peer_port": port,
                "peer_address": peer.url,
                "kafka_port": kafka,
            }
            for way, port, peer, kafka in zip(ways, ports, peers, kafka_ports, strict=True)
        ]
        cluster = stack.enter_context(
            brokers(tmp_path, store=store, own=own, **QUICK, **YOUNG, **OFTEN)
        )
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS, segment_ms=1500)
            client.create_topic(names.made, PARTITIONS, segment_ms=3000)
            client.create_topic(names.audit, 1)
        urls = [broker.base_url for broker in cluster]
        mix = Mix(topic, PARTITIONS, pause_s=PAUSE_S)
        loads = [Load(urls, mix._replace(producers=3), seed)]
        loads += [
            Load([url], mix._replace(producers=1, acks=("all", "1"), first=10 * number), seed)
            for number, url in enumerate(urls, start=1)
        ]
        workers = [
            Worker(
                urls[number:] + urls[:number],
                names,
                number,
                end=None,
                seed=seed + number,
                pause_s=PAUSE_S,
            )
            for number in range(PARTITIONS)
        ]
        addresses = ",".join(f"127.0.0.1:{port}" for port in kafka_ports)
        producers = [
            KafkaProducer(addresses, topic, PARTITIONS, 200 + number, pause_s=PAUSE_S)
            for number in range(2)
        ]
        group = KafkaGroup(addresses, topic, "kafka")
        readings = [Reading(url, topic, number) for number, url in enumerate(urls)]
        witnesses = [
            Witness(urls[number:] + urls[:number], topic, number, 100 + number)
            for number in range(PARTITIONS)
        ]
        nemesis = Nemesis(
            cluster, ways, peers, view_age_s=VIEW_AGE_S, seed=seed, variables=variables
        )
        with contextlib.ExitStack() as running:
            for context in (*loads, *workers, *readings, *witnesses, *producers, group):
                running.enter_context(context)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                nemesis.step()
                loads[0].wait_for_acks(20)
                assert [failure for reading in readings for failure in reading.failures] == []
                assert [worker.failure for worker in workers] == [None] * PARTITIONS
            sent = [sending for load in loads for sending in load.finish()]
            by_kafka = [request for producer in producers for request in producer.finish()]
            ends = [len(records) for records in the_log(cluster[0], topic, PARTITIONS).values()]
            group.wait_for(ends)
        assert [worker.failure for worker in workers] == [None] * PARTITIONS
        assert [reader.failures for reader in (*readings, *witnesses)] == [[]] * 2 * PARTITIONS
        logs = [the_log(broker, topic, PARTITIONS) for broker in cluster]
        assert logs[0] == logs[1] == logs[2]
        requests = [sending.request for sending in sent]
        assert violations(requests + by_kafka, logs[0]) == []
        assert group.wrong(logs[0]) == []
        recorded = [events for load in loads for events in load.events]
        recorded += [producer.events for producer in producers]
        recorded += [witness.events for witness in witnesses]
        events = history_of(topic, recorded, logs[0])
        assert check_all(events) == []
        check_retries(
            cluster[0], topic, [sending for sending in sent if sending.request.is_acked][-20:]
        )
        check(_transformed(urls[1], names))
        merged = {"segments": sum(_merged_segments(broker) for broker in cluster)}
        for broker in cluster:
            assert broker.stop() == 0, broker.log()[-3000:]
        scrubbed = tidelog("scrub", "--store", store, "--json", **variables)
        assert json.loads(scrubbed.stdout)["is_whole"], scrubbed.stdout
        print(
            json.dumps(
                _counted(sent, workers, events, (ways, peers), nemesis)
                | _kafka(producers, group)
                | {"merged since the last start": merged},
                indent=2,
            )
        )


def _merged_segments(broker: Broker) -> int:
    return round(metrics(broker)["tidelog_merged_segments_total"])


def _transformed(url: str, names: Names) -> Found:
    with Client(url) as client:
        values = {
            name: [
                (read.value or b"").decode()
                for records in client.read_all(name, partitions).values()
                for read in records
            ]
            for name, partitions in ((names.made, PARTITIONS), (names.audit, 1))
        }
        offsets = client.committed(names.group)
    return Found(offsets, values[names.made], values[names.audit])


def _kafka(producers: Sequence[KafkaProducer], group: KafkaGroup) -> dict[str, dict[str, int]]:
    return {
        "Kafka clients": {
            "records": sum(len(producer.requests) for producer in producers),
            "acked": sum(producer.acks for producer in producers),
            "read by the group": group.count(),
            "assignments": group.rebalances,
            "longest ack, ms": max(round(1000 * producer.longest_ack_s) for producer in producers),
        }
    }


def _counted(
    sent: Sequence[Sent],
    workers: Sequence[Worker],
    events: Sequence[Event],
    ways: tuple[Sequence[FaultProxy], Sequence[FaultProxy]],
    nemesis: Nemesis,
) -> dict[str, dict[str, int]]:
    requests = [sending.request for sending in sent]
    return {
        "produce requests": {
            "all": len(requests),
            "records": sum(len(request.records) for request in requests),
            "acked": sum(request.is_acked for request in requests),
            "attempts refused": sum(request.refusals for request in requests),
            "attempts of unknown outcome": sum(request.unknown for request in requests),
        },
        "history": {
            "events": len(events),
            "fetches answered": sum(isinstance(event, Fetched) for event in events),
        },
        "transactions": {
            "committed": sum(worker.commits for worker in workers),
            "attempts of unknown outcome": sum(worker.unknown for worker in workers),
        },
        "ways to the store": dict(sum((way.counts for way in ways[0]), Counter())),
        "ways between brokers": dict(sum((way.counts for way in ways[1]), Counter())),
        "deeds": dict(nemesis.counts),
    }
