"""Brokers that are killed: acked records are there, once, at their offsets.

A request without an ack is there whole or not at all (I1, I2, I4, I6, I7).
"""

import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.support.broker import Broker
from tests.support.history import Request, Written, violations
from tests.system.checks import (
    Starting,
    check_chain,
    check_retries,
    hot_files,
    new_topic,
    table_of,
    the_log,
    wait_for_commits,
)
from tests.system.client import Client, Form, wait_until
from tests.system.load import Load, Mix, Reading, Sent

Result = TypeVar("Result")

KILLS = 4
PARTITIONS = 3


def test_under_load_every_ack_is_kept(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder, topic = tmp_path / "store", new_topic()
    often = {"wal": {"checkpoint_entries": 20, "checkpoint_interval_s": 0.0}}
    with Broker(tmp_path, hot_dir=tmp_path / "hot", tuning=often) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
        with Load(broker.base_url, Mix(topic, PARTITIONS), seed) as load:
            for kill in range(KILLS):
                load.wait_for_acks(draw.randrange(2, 100))
                if kill % 2:
                    broker.settings["hot_dir"] = tmp_path / f"hot-{kill}"
                broker.restart()
            load.wait_for_acks(10)
            sent = load.finish()
        requests = [sending.request for sending in sent]
        log = the_log(broker, topic, PARTITIONS)
        assert violations(requests, log) == []
        assert any(request.unknown for request in requests), "no kill met a request"
        acked = [sending for sending in sent if sending.request.is_acked]
        check_retries(broker, topic, draw.sample(acked, 30))
        broker.restart()
        assert the_log(broker, topic, PARTITIONS) == log
        check_retries(broker, topic, draw.sample(acked, 30))
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []
    check_chain(folder)


# -- acks=1

HELD_BACK = {"flush_interval_ms": 60_000, "produce_timeout_ms": 120_000}
"""The first flush comes at once, and is spent on making the topic; what is acked locally later
stays in the hot log alone."""


def acked_locally(
    client: Client, topic: str, name: str, count: int, *, is_keyed: bool
) -> list[Sent]:
    """Requests of three records each, acks=1, answered without offsets."""
    sent = []
    for number in range(count):
        form = list(Form)[number % 2]
        records = [
            Written(b'"%s/%d/%d"' % (name.encode(), number, index), None, index % PARTITIONS)
            for index in range(3)
        ]
        request = Request(records, is_keyed=is_keyed, is_acked_in_turn=True)
        key = f"{topic}-{name}-{number}"
        client.send(topic, request, acks="1", key=key if is_keyed else None, form=form)
        assert request.acks_without_offsets == 1
        sent.append(Sent(request, key, form))
    return sent


def test_what_was_acked_locally_is_there_once_after_a_kill(tmp_path: Path) -> None:
    topic, hot = new_topic(), tmp_path / "hot"
    with Broker(tmp_path, hot_dir=hot, **HELD_BACK) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            unkeyed = acked_locally(client, topic, "unkeyed", 10, is_keyed=False)
            keyed = acked_locally(client, topic, "keyed", 10, is_keyed=True)
            for request, key, form in keyed[:3]:  # durable already: no need to wait for the commit
                assert client.send(topic, request, acks="1", key=key, form=form) == 200
                assert request.acks_without_offsets == 2
            assert client.read_all(topic, PARTITIONS) == {0: [], 1: [], 2: []}, "I3"
        requests = [sending.request for sending in unkeyed + keyed]
        broker.restart()
        log = the_log(broker, topic, PARTITIONS)
        assert violations(requests, log) == []
        assert hot_files(hot) == set()
        broker.restart()
        assert the_log(broker, topic, PARTITIONS) == log
        check_retries(broker, topic, keyed)
        assert all(len(sending.request.acks) == 1 for sending in keyed), "a retry gets the offsets"
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []


def test_a_kill_in_the_middle_of_the_recovery_doubles_nothing(tmp_path: Path) -> None:
    topic, hot, folder = new_topic(), tmp_path / "hot", tmp_path / "store"
    with Broker(tmp_path, hot_dir=hot, **HELD_BACK) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            sent = acked_locally(client, topic, "a", 50, is_keyed=False)
        broker.kill()
        dying = Starting(tmp_path / "dying", broker.store, hot_dir=hot, **HELD_BACK)
        entries = len(list((folder / "wal").iterdir()))
        with dying:
            wait_until(lambda: len(list((folder / "wal").iterdir())) > entries, "the commit")
        with dying:
            wait_until(lambda: not hot_files(hot), "the removal of the hot log")
        with dying:
            time.sleep(secrets.randbelow(1000) / 1000)
        broker.start()
        with Client(broker.base_url) as client:
            sent += acked_locally(client, topic, "b", 5, is_keyed=False)
        broker.restart()
        assert (
            violations([sending.request for sending in sent], the_log(broker, topic, PARTITIONS))
            == []
        )
    check_chain(folder)


def test_brokers_that_share_a_hot_dir_adopt_only_files_of_ended_brokers(tmp_path: Path) -> None:
    """The first has more than one file of acked records when the second starts beside it."""
    topic, hot = new_topic(), tmp_path / "hot"
    sizes = ("flush_bytes", "flush_bytes_max", "buffer_bytes_max")
    large = {"writer": dict.fromkeys(sizes, 2**30)}
    with Broker(tmp_path, hot_dir=hot, **HELD_BACK, tuning=large) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, 1, max_message_bytes=16 * 2**20)
            requests = []
            while len(hot_files(hot)) < 2 or len(requests) < 8:
                value = b'"%d%s"' % (len(requests), b"x" * 12 * 2**20)
                requests.append(Request([Written(value, None, 0)], is_keyed=False))
                client.send(topic, requests[-1], acks="1", form=Form.ARROW)
        files = hot_files(hot)
        with Broker(tmp_path / "other", broker.store, hot_dir=hot) as other:
            assert the_log(other, topic, 1) == {0: []}, "the other's records are not its to commit"
            assert hot_files(hot) == files
            assert broker.stop() == 0
            assert violations(requests, the_log(other, topic, 1)) == []


# -- SIGTERM


def test_a_terminated_broker_keeps_all_it_acked(tmp_path: Path) -> None:
    topic, hot = new_topic(), tmp_path / "hot"
    seed = secrets.randbits(32)
    mix = Mix(topic, PARTITIONS, acks=("all", "1"))
    with Broker(tmp_path, hot_dir=hot) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
        with Load(broker.base_url, mix, seed) as load:
            for _ in range(2):
                load.wait_for_acks(100)
                assert broker.stop() == 0, broker.log()
                assert "Traceback" not in broker.log()
                assert list(hot.iterdir()) == [], "nothing is left for a recovery"
                broker.settings["hot_dir"] = hot = tmp_path / "another"
                broker.start()
            load.wait_for_acks(10)
            sent = load.finish()
        wait_for_commits(broker)
        check_retries(
            broker, topic, [sending for sending in sent if sending.request.is_acked][-50:]
        )
        assert (
            violations([sending.request for sending in sent], the_log(broker, topic, PARTITIONS))
            == []
        )
    check_chain(tmp_path / "store")


def test_a_terminating_broker_answers_its_waiting_clients(tmp_path: Path) -> None:
    """A flush that is held back, a long poll and a follower: none of them is cut off in the end."""
    topic, hot = new_topic(), tmp_path / "hot"
    records = f"/topics/{topic}/partitions/0/records?offset=0"
    with Broker(tmp_path, hot_dir=hot, **HELD_BACK) as broker, ThreadPoolExecutor(3) as pool:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            sent = acked_locally(client, topic, "a", 10, is_keyed=False)
            waiting = Request([Written(b'"waiting"', None, 1)], is_keyed=False)
            produced = pool.submit(_alone, broker, lambda own: own.send(topic, waiting))
            polled = pool.submit(
                _alone, broker, lambda own: own.call("GET", f"{records}&timeout=30000")
            )
            followed = pool.submit(
                _alone,
                broker,
                lambda own: own.call("GET", records, headers={"Accept": "text/event-stream"}),
            )
            wait_until(lambda: client.metrics()["tidelog_append_requests_total"] == 12, "its entry")
        time.sleep(0.5)  # the readers most likely wait by now; if not, they are refused
        assert broker.stop() == 0
        assert produced.result() == 200
        assert polled.result().status in {200, 503}
        assert followed.result().status in {200, 503}
        assert "Traceback" not in broker.log()
        assert "timeout graceful shutdown exceeded" not in broker.log()
        assert list(hot.iterdir()) == []
        broker.settings["hot_dir"] = tmp_path / "another"
        broker.start()
        requests = [*(sending.request for sending in sent), waiting]
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []


def _alone(broker: Broker, call: Callable[[Client], Result]) -> Result:
    with Client(broker.base_url) as own:
        return call(own)


# -- sealing


def test_i7_kills_while_sealing_leave_no_row_twice_and_none_missing(tmp_path: Path) -> None:
    topic, folder, seed = new_topic(), tmp_path / "store", secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    often = {"sealer": {"check_interval_s": 0.01}}
    with Broker(tmp_path, tuning=often, tail_cache_bytes=0) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS, segment_bytes=20_000, segment_ms=200)
        tables, mix = [], Mix(topic, PARTITIONS, pad_bytes=200)
        reading = Reading(broker.base_url, topic, 0)
        with Load(broker.base_url, mix, seed) as load, reading:
            for _ in range(KILLS):
                load.wait_for_acks(5)
                with Client(broker.base_url) as client:
                    sealed = "tidelog_sealed_segments_total"
                    goal = client.metrics()[sealed] + draw.randrange(1, 8)
                    wait_until(lambda: client.metrics()[sealed] >= goal, "sealing")  # noqa: B023
                time.sleep(draw.random() / 20)
                broker.kill()
                tables.append(table_of(folder, PARTITIONS))
                broker.start()
            load.wait_for_acks(10)
            sent = load.finish()
        assert reading.failures == []
        requests = [sending.request for sending in sent]
        log = the_log(broker, topic, PARTITIONS)
        assert violations(requests, log) == []
        unsealed = f'tidelog_unsealed_bytes{{topic="{topic}"}}'
        with Client(broker.base_url) as client:
            wait_until(lambda: client.metrics()[unsealed] == 0, "the end of sealing")
        assert table_of(folder, PARTITIONS) == log
        for table in tables:
            for partition, records in table.items():
                assert records == log[partition][: len(records)], "a table held what never was"
        assert any(map(any, (table.values() for table in tables))), "no kill came after a seal"
        broker.restart()
        assert the_log(broker, topic, PARTITIONS) == log
    check_chain(folder)
