"""Brokers that are killed: what was acked is there, once, at its offset; what was not, is whole or
not at all (I1, I2, I4, I6, I7)."""

import asyncio
import random
import secrets
import time
from pathlib import Path

from service.broker_process import BrokerProcess
from storage.folder import FolderStore
from tests.support.history import Log, Request, Written, violations
from tests.support.records import entries_of
from tests.system.client import Client, Form, wait_until
from tests.system.load import Load, Mix, Sent

KILLS = 4
PARTITIONS = 3


def new_topic() -> str:
    """A name that no other test has: while a broker is dead, its port may be another's."""
    return f"t-{secrets.token_hex(4)}"


def the_log(broker: BrokerProcess, topic: str, partitions: int = PARTITIONS) -> Log:
    with Client(broker.base_url) as client:
        return client.read_all(topic, partitions)


async def _check_chain(folder: Path) -> None:
    store = FolderStore(folder)
    try:
        found = [key for key, _ in await entries_of(store)]
        there = [info.key async for info in store.list("wal/")]
        assert found == there, "the chain ends before the last entry"
    finally:
        await store.close()


def check_chain(folder: Path) -> None:
    """Every entry names the one before it, and none lies beyond a missing one (I2)."""
    asyncio.run(_check_chain(folder))


def check_retries(broker: BrokerProcess, topic: str, sent: list[Sent]) -> None:
    """A retry of what was acked is told the same, and writes nothing."""
    with Client(broker.base_url) as client:
        for request, key, form in sent:
            client.send(topic, request, key=key, form=form)


def test_under_load_every_ack_is_kept(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder, topic = tmp_path / "store", new_topic()
    settings = {
        "hot_dir": tmp_path / "hot",
        "checkpoint_entries": 20,
        "checkpoint_interval_ms": 0,
    }
    with BrokerProcess(str(folder), tmp_path / "log", settings) as broker:
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
        requests = [each.request for each in sent]
        log = the_log(broker, topic)
        assert violations(requests, log) == []
        assert any(request.unknown for request in requests), "no kill met a request"
        acked = [each for each in sent if each.request.is_acked]
        check_retries(broker, topic, draw.sample(acked, 30))
        broker.restart()
        assert the_log(broker, topic) == log
        check_retries(broker, topic, draw.sample(acked, 30))
        assert violations(requests, the_log(broker, topic)) == []
    check_chain(folder)


# -- acks=1

HELD_BACK = {"flush_interval_ms": 60_000}
"""The first flush comes at once, and is spent on making the topic; what is acked locally later
stays in the hot log alone."""


class Starting(BrokerProcess):
    """A broker whose start nobody waits for."""

    def _wait_until_ready(self) -> None:
        pass


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


def hot_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.hot")}


def test_what_was_acked_locally_is_there_once_after_a_kill(tmp_path: Path) -> None:
    topic, hot = new_topic(), tmp_path / "hot"
    settings = {"hot_dir": hot, **HELD_BACK}
    with BrokerProcess(str(tmp_path / "store"), tmp_path / "log", settings) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            unkeyed = acked_locally(client, topic, "unkeyed", 10, is_keyed=False)
            keyed = acked_locally(client, topic, "keyed", 10, is_keyed=True)
            for request, key, form in keyed[:3]:  # durable already: no need to wait for the commit
                assert client.send(topic, request, acks="1", key=key, form=form) == 200
                assert request.acks_without_offsets == 2
            assert client.read_all(topic, PARTITIONS) == {0: [], 1: [], 2: []}, "I3"
        requests = [each.request for each in unkeyed + keyed]
        broker.restart()
        log = the_log(broker, topic)
        assert violations(requests, log) == []
        assert hot_files(hot) == set()
        broker.restart()
        assert the_log(broker, topic) == log
        check_retries(broker, topic, keyed)
        assert all(len(each.request.acks) == 1 for each in keyed), "a retry is told the offsets"
        assert violations(requests, the_log(broker, topic)) == []


def test_a_kill_in_the_middle_of_the_recovery_doubles_nothing(tmp_path: Path) -> None:
    topic, hot, folder = new_topic(), tmp_path / "hot", tmp_path / "store"
    settings = {"hot_dir": hot, **HELD_BACK}
    with BrokerProcess(str(folder), tmp_path / "log", settings) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, PARTITIONS)
            sent = acked_locally(client, topic, "a", 50, is_keyed=False)
        broker.kill()
        with Starting(str(folder), tmp_path / "log-of-dying", settings) as dying:
            entries = len(list((folder / "wal").iterdir()))
            dying.start()
            wait_until(lambda: len(list((folder / "wal").iterdir())) > entries, "the commit")
            dying.kill()
            dying.start()
            wait_until(lambda: not hot_files(hot), "the removal of the hot log")
            dying.kill()
            dying.start()
            time.sleep(secrets.randbelow(1000) / 1000)
        broker.start()
        with Client(broker.base_url) as client:
            sent += acked_locally(client, topic, "b", 5, is_keyed=False)
        broker.restart()
        assert violations([each.request for each in sent], the_log(broker, topic)) == []
    check_chain(folder)


def test_brokers_that_share_a_hot_dir_take_only_what_the_dead_left(tmp_path: Path) -> None:
    """The first has more than one file of acked records when the second starts beside it."""
    topic, hot, folder = new_topic(), tmp_path / "hot", tmp_path / "store"
    large = {"flush_bytes": 2**30, "flush_bytes_max": 2**30, "buffer_bytes": 2**30}
    settings = {"hot_dir": hot, "sealing": False, **HELD_BACK, **large}
    with BrokerProcess(str(folder), tmp_path / "log", settings) as broker:
        with Client(broker.base_url) as client:
            client.create_topic(topic, 1, max_message_bytes=16 * 2**20)
            requests = []
            while len(hot_files(hot)) < 2 or len(requests) < 8:
                value = b'"%d%s"' % (len(requests), b"x" * 12 * 2**20)
                requests.append(Request([Written(value, None, 0)], is_keyed=False))
                client.send(topic, requests[-1], acks="1", form=Form.ARROW)
        held = hot_files(hot)
        other_settings = {"hot_dir": hot, "sealing": False}
        with BrokerProcess(str(folder), tmp_path / "log-2", other_settings) as other:
            assert the_log(other, topic, 1) == {0: []}, "the other's records are not its to commit"
            assert hot_files(hot) == held
            assert broker.stop() == 0
            assert violations(requests, the_log(other, topic, 1)) == []
