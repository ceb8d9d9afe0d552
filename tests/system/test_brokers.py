"""Several brokers on one store, as processes: one and the same log at each of them, whichever of
them is killed, stopped or told to end (I1 to I6)."""

import contextlib
import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import Broker
from tests.support.history import violations
from tests.system.checks import check_chain, check_retries, new_topic, the_log
from tests.system.client import Client, wait_until
from tests.system.load import Load, Mix

PARTITIONS = 3
QUICK = {"heartbeat_interval_ms": 200, "member_timeout_ms": 1500, "handover_timeout_ms": 500}


@contextlib.contextmanager
def brokers(folder: Path, count: int = 3, **settings: object) -> Iterator[list[Broker]]:
    """So many that all know each other."""
    store = (folder / "store").as_uri()
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(
                Broker(folder / name, store, broker_id=name, hot_dir=folder / name, **settings)
            )
            for name in "abcdefgh"[:count]
        ]
        wait_until(lambda: all(live(broker) == count for broker in found), "meeting")
        yield found


def metrics(broker: Broker) -> dict[str, float]:
    with Client(broker.base_url) as client:
        return client.metrics()


def live(broker: Broker) -> float:
    return metrics(broker)["tidelog_live_brokers"]


def sequencer_first(found: list[Broker]) -> list[Broker]:
    return sorted(found, key=lambda broker: -metrics(broker)["tidelog_is_sequencer"])


def total(found: list[Broker], name: str) -> float:
    return sum(metrics(broker)[f"tidelog_{name}_total"] for broker in found)


def test_three_brokers_one_log(tmp_path: Path) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    patient = QUICK | {"handover_timeout_ms": 10_000}  # of a machine that does a lot besides
    with brokers(tmp_path, **patient) as found:
        with Client(found[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
        with contextlib.ExitStack() as stack:
            loads = [
                stack.enter_context(
                    Load(broker.base_url, Mix(topic, PARTITIONS, 2, first=10 * number), seed)
                )
                for number, broker in enumerate(found)
            ]
            for load in loads:
                load.wait_for_acks(100)
            sent = [each for load in loads for each in load.finish()]
        logs = [the_log(broker, topic, PARTITIONS) for broker in found]
        assert logs[0] == logs[1] == logs[2]
        assert violations([each.request for each in sent], logs[0]) == []
        for broker in found:  # I3, and keys hold at every broker
            check_retries(broker, topic, [each for each in sent if each.request.is_acked][-20:])
        assert (
            violations([each.request for each in sent], the_log(found[0], topic, PARTITIONS)) == []
        )
        puts, committed = total(found, "wal_puts"), total(found, "wal_entries_committed")
        assert puts <= 1.1 * committed
        assert total(found, "drafts") > 1.05 * committed, "nothing rode with another's"
        for broker in found:
            started = time.monotonic()
            assert broker.stop() == 0, broker.log()
            assert time.monotonic() - started < 10
            assert "Traceback" not in broker.log()
    assert list((tmp_path / "store" / "brokers").iterdir()) == []
    check_chain(tmp_path / "store")


@pytest.mark.slow
def test_brokers_that_are_killed_and_stopped_at_random(tmp_path: Path) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    often = {"checkpoint_entries": 50, "checkpoint_interval_ms": 0}
    with brokers(tmp_path, **QUICK, **often) as found:
        with Client(found[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
        urls = [broker.base_url for broker in found]
        with Load(urls, Mix(topic, PARTITIONS, 6), seed) as load:
            for step in range(6):
                load.wait_for_acks(draw.randrange(20, 80))
                victim = sequencer_first(found)[0] if step % 2 else draw.choice(found)
                if draw.random() < 0.5:
                    victim.kill()
                    load.wait_for_acks(20)  # the others go on meanwhile
                    victim.start()
                else:
                    with stopped(victim):
                        load.wait_for_acks(20)
            load.wait_for_acks(50)
            sent = load.finish()
        logs = [the_log(broker, topic, PARTITIONS) for broker in found]
        assert logs[0] == logs[1] == logs[2]
        requests = [each.request for each in sent]
        assert violations(requests, logs[0]) == []
        check_retries(found[0], topic, [each for each in sent if each.request.is_acked][-30:])
        assert violations(requests, the_log(found[1], topic, PARTITIONS)) == []
    check_chain(tmp_path / "store")


@contextlib.contextmanager
def stopped(broker: Broker) -> Iterator[None]:
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


@pytest.mark.parametrize("role", [0, 1])
def test_a_broker_stopped_for_longer_than_its_view_may_be_old(tmp_path: Path, role: int) -> None:
    """The sequencer, and one that is not."""
    topic, seed = new_topic(), secrets.randbits(32)
    young = {"wal_view_age_max_ms": 1000, "wal_retention_ms": 4000, "poll_interval_ms": 100}
    with brokers(tmp_path, **QUICK, **young) as found:
        with Client(found[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
        victim = sequencer_first(found)[role]
        others = [broker.base_url for broker in found if broker is not victim]
        with (
            Load([broker.base_url for broker in found], Mix(topic, PARTITIONS, 6), seed) as load,
            Load(others, Mix(topic, PARTITIONS, 2, first=50), seed) as elsewhere,
        ):
            load.wait_for_acks(100)
            with stopped(victim):
                time.sleep(2.5)
                elsewhere.wait_for_acks(20)
                end = [
                    len(records)
                    for records in the_log(
                        next(it for it in found if it is not victim), topic, PARTITIONS
                    ).values()
                ]
            seen = the_log(victim, topic, PARTITIONS)
            assert all(len(seen[number]) >= end[number] for number in seen), "it serves what is old"
            load.wait_for_acks(100)
            sent = [*load.finish(), *elsewhere.finish()]
        logs = [the_log(broker, topic, PARTITIONS) for broker in found]
        assert logs[0] == logs[1] == logs[2]
        assert violations([each.request for each in sent], logs[0]) == []
        assert metrics(victim)["tidelog_wal_void_total"] >= 1
    check_chain(tmp_path / "store")
