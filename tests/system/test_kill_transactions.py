"""Consume, transform, produce through a broker that is killed at any point.

Each result is there once, and with it how far the group has read, or neither is (I4).
"""

import asyncio
import json
import random
import secrets
import time
from pathlib import Path

from tests.support.broker import Broker
from tests.support.history import Written
from tests.support.records import fold, tail_values
from tests.system.checks import check_chain, new_topic
from tests.system.client import Client, wait_until
from tests.system.transform import Found, Names, Worker, check
from tidelog.storage.store.folder import FolderStore

KILLS = 4
PARTITIONS = 2
RECORDS = 400
"""In each partition."""


def found_in(folder: Path, names: Names) -> Found:
    """As the plainest reader finds it, with no broker's help."""

    async def read() -> Found:
        store = FolderStore(folder)
        try:
            cluster = json.loads(await store.get("cluster.json"))
            state, _ = await fold(store, cluster["cluster_id"])
            topic_id = state.topic(names.source).topic_id
            committed = state.committed_offsets.of_group(names.group).get(topic_id, {})
            values = {
                topic: [
                    str(value or b"", "utf-8")
                    for number in range(len(state.topic(topic).partitions))
                    for value in await tail_values(store, state, topic, number)
                ]
                for topic in (names.made, names.audit)
            }
            offsets = {
                number: committed_offset.offset for number, committed_offset in committed.items()
            }
            return Found(offsets, values[names.made], values[names.audit])
        finally:
            await store.close()

    return asyncio.run(read())


def test_two_topics_and_an_offset_are_there_or_not(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    names = Names(new_topic(), new_topic(), new_topic(), "workers")
    often = {"wal": {"checkpoint_entries": 20, "checkpoint_interval_s": 0.0}}
    with Broker(tmp_path, tuning=often) as broker:
        with Client(broker.base_url) as client:
            for name, partitions in zip(names[:3], (PARTITIONS, 3, 1), strict=True):
                client.create_topic(name, partitions)
            for number in range(PARTITIONS):
                values = [b'"%d/%d"' % (number, n) for n in range(RECORDS)]
                records = [Written(value, None, number) for value in values]
                assert client.post(names.source, records).status == 200
        url = [broker.base_url]
        first = Worker(url, names, 0, end=RECORDS, seed=seed)
        second = Worker(url, names, 1, end=RECORDS, seed=seed + 1)
        with first, second:
            for _ in range(KILLS):
                wanted = first.commits + second.commits + draw.randrange(1, 12)
                wait_until(
                    lambda wanted=wanted: (
                        first.commits + second.commits >= wanted
                        or (first.is_done and second.is_done)
                    ),
                    "more commits",
                )
                time.sleep(draw.random() / 200)
                broker.kill()
                check(found_in(tmp_path / "store", names))
                broker.start()
            wait_until(lambda: first.is_done and second.is_done, "the end")
        assert (first.failure, second.failure) == (None, None)
        broker.kill()
        result = found_in(tmp_path / "store", names)
        check(result)
        assert result.offsets == {0: RECORDS, 1: RECORDS}
    print(f"{first.commits + second.commits} commits, {first.unknown + second.unknown} unknown")
    check_chain(tmp_path / "store")
