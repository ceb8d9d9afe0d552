"""Brokers on machines of their own with pulled cables: answers are true (I1 to I4).

The remaining brokers continue.
"""

import contextlib
import secrets
import time
from pathlib import Path

import pytest

from tests.sim.groupcheck import check_all
from tests.support import hosts
from tests.support.history import violations
from tests.support.seaweed import Seaweed
from tests.system.checks import new_topic, the_log
from tests.system.client import AnswerLost, Client, NotSent, wait_until
from tests.system.fault_proxy import FaultProxy
from tests.system.load import Load, Mix
from tests.system.recorded import Witness, history_of
from tests.system.several import QUICK, live, sequencer_first, total

PARTITIONS = 2
CUT_S = 2.0
"""Longer than it takes to be counted out."""

pytestmark = [pytest.mark.seaweed, pytest.mark.slow]


def test_cut_off_and_cut_apart(seaweed: Seaweed, tmp_path: Path) -> None:
    missing = hosts.why_not()
    if missing:
        pytest.skip(missing)
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    store = f"s3://{seaweed.bucket}/{secrets.token_hex(4)}/logs"
    with contextlib.ExitStack() as stack:
        address, machines = stack.enter_context(hosts.hosts(3))
        way = stack.enter_context(FaultProxy(seaweed.endpoint_url, seed, address))
        settings = QUICK | {"s3_endpoint": way.url, "poll_interval_ms": 200}
        cluster = [
            stack.enter_context(
                hosts.HostBroker(machine, tmp_path / name, store, broker_id=name, **settings)
            )
            for name, machine in zip("abc", machines, strict=True)
        ]
        wait_until(lambda: all(live(broker) == 3 for broker in cluster), "meeting")
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS, segment_ms=1500)
        urls = [broker.base_url for broker in cluster]
        mix = Mix(topic, PARTITIONS, producers=1, pause_s=0.05)
        load = Load(urls, mix, seed)
        faithful = [
            Load([url], mix._replace(first=number), seed) for number, url in enumerate(urls, 1)
        ]
        witnesses = [Witness(urls, topic, number, 100 + number) for number in range(PARTITIONS)]
        with contextlib.ExitStack() as running:
            for context in (load, *faithful, *witnesses):
                running.enter_context(context)
            load.wait_for_acks(20)
            first, *other_brokers = sequencer_first(cluster)
            for broker in (first, other_brokers[0]):
                broker.host.cut()
                load.wait_for_acks(20)  # by those who are left
                time.sleep(CUT_S)
                with pytest.raises((NotSent, AnswerLost)), Client(broker.base_url, 0.5) as client:
                    client.call("GET", "/ready")
                broker.host.mend()
                wait_until(lambda: all(live(broker) == 3 for broker in cluster), "meeting again")
                load.wait_for_acks(20)
            alone = total(cluster, "own_commits")
            for machine in machines:
                machine.isolate(True)  # all of them reach the store, and no broker another
            for writer in faithful:
                writer.wait_for_acks(8)
            assert total(cluster, "own_commits") > alone
            for machine in machines:
                machine.isolate(False)
            load.wait_for_acks(20)
            sent = [sending for writer in (load, *faithful) for sending in writer.finish()]
        assert [witness.failures for witness in witnesses] == [[]] * PARTITIONS
        logs = [the_log(broker, topic, PARTITIONS) for broker in cluster]
        assert logs[0] == logs[1] == logs[2]
        assert violations([sending.request for sending in sent], logs[0]) == []
        told = [events for writer in (load, *faithful) for events in writer.events]
        told += [witness.events for witness in witnesses]
        assert check_all(history_of(topic, told, logs[0])) == []
        for broker in cluster:
            assert broker.stop() == 0, broker.log()[-3000:]
