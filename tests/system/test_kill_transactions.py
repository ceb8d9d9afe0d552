"""Consume, transform, produce through a broker that is killed at any point: each result is there
once, and with it how far the group has read, or neither is (I4)."""

import asyncio
import json
import random
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from storage.folder import FolderStore
from tests.support.broker import Broker
from tests.support.history import Written
from tests.support.records import fold, tail_values
from tests.system.checks import check_chain, new_topic
from tests.system.client import PATIENCE_S, Answer, AnswerLost, Client, NotSent, wait_until

KILLS = 4
PARTITIONS = 2
RECORDS = 400
"""In each partition."""
RETRY_S = 0.01


class Names(NamedTuple):
    """What is read, what is made of it, and a line for every batch; and who reads."""

    source: str
    made: str
    audit: str
    group: str


class Found(NamedTuple):
    """What a store holds: how far the group has read of each partition, and the results."""

    offsets: dict[int, int]
    made: list[str]
    audit: list[str]


def found_in(folder: Path, names: Names) -> Found:
    """As the plainest reader finds it, with no broker's help."""

    async def read() -> Found:
        store = FolderStore(folder)
        try:
            cluster = json.loads(await store.get("cluster.json"))
            state, _ = await fold(store, cluster["cluster_id"])
            topic_id = state.topic(names.source).topic_id
            committed = state.groups.offsets(names.group).get(topic_id, {})
            values = {
                topic: [
                    str(value or b"", "utf-8")
                    for number in range(len(state.topic(topic).partitions))
                    for value in await tail_values(store, state, topic, number)
                ]
                for topic in (names.made, names.audit)
            }
            offsets = {number: each.offset for number, each in committed.items()}
            return Found(offsets, values[names.made], values[names.audit])
        finally:
            await store.close()

    return asyncio.run(read())


def check(found: Found) -> None:
    """Results are those of exactly what was read, once each; so are the lines of the batches."""
    read = [f"{number}/{n}" for number, end in found.offsets.items() for n in range(end)]
    assert sorted(found.made) == sorted(read)
    for number, end in found.offsets.items():
        batches = [line.split(" ") for line in found.audit if line.startswith(f"{number} ")]
        assert [int(first) for _, first, _ in batches] == [0, *(int(b[2]) for b in batches[:-1])]
        assert int(batches[-1][2]) == end


class Worker:
    """Reads a partition and commits what it makes of it, in a thread; whatever happens, it goes on
    from what is committed."""

    def __init__(self, base_url: str, cluster: str, names: Names, partition: int, seed: int):
        self._path = f"/v3/clusters/{cluster}"
        self._names = names
        self._partition = partition
        self._draw = random.Random(seed)
        self._client = Client(base_url, answer_s=10.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.commits = self.unknown = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._client:
                while not self._stop.is_set() and (where := self._where()) < RECORDS:
                    self._commit(where, self._read(where))
        except BaseException as error:  # noqa: BLE001 - told to whoever looks
            self.failure = error

    def _where(self) -> int:
        path = f"{self._path}/consumer-groups/{self._names.group}/offsets"
        answer = self._ask("GET", path, accepted=(200, 404))
        listed = answer.json()["data"] if answer.status == 200 else []
        return sum(each["offset"] for each in listed if each["partition_id"] == self._partition)

    def _read(self, where: int) -> list[str]:
        path = f"/topics/{self._names.source}/partitions/{self._partition}/records"
        query = f"offset={where}&max_bytes={self._draw.randrange(1, 60)}"
        accept = {"Accept": "application/vnd.kafka.json.v2+json"}
        found = self._ask("GET", f"{path}?{query}", headers=accept).json()
        return [each["value"] for each in found]

    def _commit(self, where: int, values: list[str]) -> None:
        end = where + len(values)
        made = [
            {"key": {"type": "STRING", "data": value}, "value": {"type": "STRING", "data": value}}
            for value in values
        ]
        line = {"value": {"type": "STRING", "data": f"{self._partition} {where} {end}"}}
        offset = {
            "topic_name": self._names.source,
            "partition_id": self._partition,
            "offset": end,
        }
        body = {
            "topics": [
                {"topic_name": self._names.made, "records": made},
                {"topic_name": self._names.audit, "records": [line]},
            ],
            "consumer_groups": [{"consumer_group_id": self._names.group, "offsets": [offset]}],
        }
        key = {"Idempotency-Key": f'"{self._names.group}-{self._partition}-{where}"'}
        self._ask("POST", f"{self._path}/transactions", json.dumps(body).encode(), headers=key)
        self.commits += 1

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        accepted: tuple[int, ...] = (200,),
    ) -> Answer:
        """The same again until it is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self._client.call(method, path, body, headers)
                if answer.status in accepted:
                    return answer
                assert answer.status in {503, 504}, answer
            except NotSent:
                pass
            except AnswerLost:
                self.unknown += method == "POST"
            assert time.monotonic() < deadline, f"{method} {path}: nobody answers"
            time.sleep(RETRY_S)


def cluster_of(client: Client) -> str:
    said: Any = client.call("GET", "/v3/clusters").json()
    return str(said["data"][0]["cluster_id"])


def test_two_topics_and_an_offset_are_there_or_not(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    names = Names(new_topic(), new_topic(), new_topic(), "workers")
    often = {"checkpoint_entries": 20, "checkpoint_interval_ms": 0}
    with Broker(tmp_path, **often) as broker:
        with Client(broker.base_url) as client:
            cluster = cluster_of(client)
            for name, partitions in zip(names[:3], (PARTITIONS, 3, 1), strict=True):
                client.create_topic(name, partitions)
            for number in range(PARTITIONS):
                values = [b'"%d/%d"' % (number, n) for n in range(RECORDS)]
                records = [Written(value, None, number) for value in values]
                assert client.post(names.source, records).status == 200
        first = Worker(broker.base_url, cluster, names, 0, seed)
        second = Worker(broker.base_url, cluster, names, 1, seed + 1)
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
        found = found_in(tmp_path / "store", names)
        check(found)
        assert found.offsets == {0: RECORDS, 1: RECORDS}
    print(f"{first.commits + second.commits} commits, {first.unknown + second.unknown} unknown")
    check_chain(tmp_path / "store")
