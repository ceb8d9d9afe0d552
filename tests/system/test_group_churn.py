"""Twelve partitions under load, consumers that come and go, brokers that are killed.

Consumers come, pause, vanish and leave at random. Every record is read at least once, by one owner
in a generation; and where results and offsets go in one request, each result is there once.

Seconds, by default, and one broker killed; `TIDELOG_CHURN_S=120` runs for so long and kills all the
time.
"""

import asyncio
import contextlib
import itertools
import os
import random
import secrets
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

from tests.support.broker import Broker
from tests.system.checks import new_topic
from tests.system.client import Client
from tests.system.several import QUICK, brokers

SECONDS = float(os.environ.get("TIDELOG_CHURN_S", "5"))
KILL_EVERY_S = max(3.0, SECONDS / 20)
PARTITIONS = 12
SESSION_MS = 1500
MEMBERS = 6
"""Of each group, at a time."""
BATCH = 30
DRAIN_S = 60.0
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}
PLAIN = {"content-type": "application/vnd.kafka.v2+json"}
OVER = (429, 503, 504)


class Gone(Exception):
    """The instance is no longer a member, or no longer owns what it read."""


class Anywhere:
    """A client whose requests go to brokers at random, each repeated until one answers."""

    def __init__(self, cluster: list[Broker], draw: random.Random) -> None:
        self._found = cluster
        self._draw = draw
        self._http = httpx.AsyncClient(timeout=20)
        self.repeated = 0

    async def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with asyncio.timeout(DRAIN_S):
            while True:
                broker = self._draw.choice(self._found)
                with contextlib.suppress(httpx.TransportError):
                    answer = await self._http.request(method, f"{broker.base_url}{path}", **options)
                    if answer.status_code not in OVER:
                        return answer
                self.repeated += 1
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._http.aclose()


class Run:
    """Produced records, and those that each group read."""

    def __init__(self, ask: Anywhere, draw: random.Random, topic: str) -> None:
        self.ask = ask
        self.draw = draw
        self.topic = topic
        self.results = f"{topic}-results"
        self.cluster = ""
        self.produced: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.owners: dict[tuple[str, int, int], set[str]] = defaultdict(set)
        self.counts: Counter[str] = Counter()
        self.is_enough = False
        """Nothing more is produced; then `is_over`: all that will be is."""
        self.is_over = False
        self._names = itertools.count()

    # -- producing

    async def produce(self) -> None:
        for number in itertools.count():
            if self.is_enough:
                return
            values = [f"{number}-{n}" for n in range(BATCH)]
            records = [
                {"value": value, "partition": n % PARTITIONS} for n, value in enumerate(values)
            ]
            headers = JSON | {"idempotency-key": f'"{self.topic}-{number}"'}
            path = f"/topics/{self.topic}"
            answer = await self.ask("POST", path, json={"records": records}, headers=headers)
            assert answer.status_code == 200, answer.text
            self.produced |= set(values)
            await asyncio.sleep(self.draw.uniform(0, 0.05))

    # -- consuming

    async def member_of(self, group: str) -> None:
        """One life after the other, until all is read."""
        while not self.is_done(group):
            path = await self.join(group)
            try:
                await self.live(group, path)
            except Gone:
                self.counts["gone"] += 1
            if self.draw.random() < 0.6:
                await self.ask("DELETE", path)
                self.counts["left"] += 1
            else:
                self.counts["vanished"] += 1

    async def join(self, group: str) -> str:
        """The path of a new member."""
        name = f"c{next(self._names)}"
        body = {
            "name": name,
            "client.id": name,  # else its joins would wait (storage.groups.join_backoff)
            "format": "json",
            "auto.offset.reset": "earliest",
            "auto.commit.enable": group == "least" and self.draw.random() < 0.5,
            "session.timeout.ms": SESSION_MS,
        }
        answer = await self.ask("POST", f"/consumers/{group}", json=body, headers=PLAIN)
        # A retry after a lost answer finds it: no other client uses its name.
        assert answer.status_code in (200, 409), answer.text
        return f"/consumers/{group}/instances/{name}"

    async def live(self, group: str, path: str) -> None:
        topics = {"topics": [self.topic]}
        _ours(await self.ask("POST", f"{path}/subscription", json=topics, headers=PLAIN), 204)
        for _ in range(self.draw.randrange(1, 30)):
            if self.is_done(group):
                return
            generation, records = await self.read(path)
            if self.draw.random() < 0.03 and not self.is_over:
                await asyncio.sleep(self.draw.choice([0.5, 1.5]) * SESSION_MS / 1000)
                self.counts["paused"] += 1
            if group == "least":
                await self.commit(path, records)
            elif records:
                await self.transact(path, generation, records)
            await asyncio.sleep(self.draw.choice([0, 0, 0.05]))

    async def read(self, path: str) -> tuple[int, list[dict[str, Any]]]:
        """The generation, and records; who they were read by is written down."""
        size = self.draw.choice([1, 200, 100_000])
        query = f"timeout=300&max_bytes={size}"
        answer = _ours(await self.ask("GET", f"{path}/records?{query}", headers=PLAIN), 200)
        generation = int(answer.headers["tidelog-generation"])
        _, _, group, _, name = path.split("/")
        for record in answer.json():
            self.owners[group, generation, record["partition"]].add(name)
        return generation, answer.json()

    async def commit(self, path: str, records: list[dict[str, Any]]) -> None:
        self.seen.update(record["value"] for record in records)
        if self.draw.random() < 0.3:
            _ours(await self.ask("POST", f"{path}/offsets", headers=PLAIN), 200)

    async def transact(self, path: str, generation: int, records: list[dict[str, Any]]) -> None:
        """Results and offsets in one request. A refused member leaves with its records."""
        ends = {record["partition"]: record["offset"] + 1 for record in records}
        body = {
            "topics": [
                {
                    "topic_name": self.results,
                    "records": [
                        {"value": {"type": "JSON", "data": record["value"]}} for record in records
                    ],
                }
            ],
            "consumer_groups": [
                {
                    "consumer_group_id": "once",
                    "consumer_id": path.rpartition("/")[2],
                    "generation": generation,
                    "offsets": [
                        {"topic_name": self.topic, "partition_id": number, "offset": end}
                        for number, end in ends.items()
                    ],
                }
            ],
        }
        headers = {"idempotency-key": f'"{self.topic}-{self.draw.getrandbits(64):x}"'}
        path = f"/v3/clusters/{self.cluster}/transactions"
        _ours(await self.ask("POST", path, json=body, headers=headers), 200)
        self.counts["transactions"] += 1
        self.seen.update(f"once {record['value']}" for record in records)

    def is_done(self, group: str) -> bool:
        prefix = "once " if group == "once" else ""
        return self.is_over and all(f"{prefix}{value}" in self.seen for value in self.produced)


def _ours(answer: httpx.Response, status: int) -> httpx.Response:
    """An answer to a member; raises Gone for the two that say that it has lost its place.

    It is no member, or does not own the partition any more.
    """
    if answer.status_code in (404, 409) and answer.json()["error_code"] in (40403, 40903):
        raise Gone
    assert answer.status_code == status, answer.text
    return answer


async def _kill(cluster: list[Broker], draw: random.Random, run: Run) -> None:
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        broker = draw.choice(cluster)
        broker.kill()
        run.counts["killed"] += 1
        await asyncio.sleep(draw.uniform(0, 1))
        await asyncio.to_thread(broker.start)


async def _churn(cluster: list[Broker], topic: str, seed: int) -> None:
    draw = random.Random(seed)
    ask = Anywhere(cluster, draw)
    run = Run(ask, draw, topic)
    run.cluster = (await ask("GET", "/v3/clusters")).json()["data"][0]["cluster_id"]
    killing = asyncio.create_task(_kill(cluster, draw, run))
    try:
        async with asyncio.TaskGroup() as tasks:
            producing = tasks.create_task(run.produce())
            for _ in range(MEMBERS):
                tasks.create_task(run.member_of("least"))
                tasks.create_task(run.member_of("once"))
            await asyncio.sleep(SECONDS)
            killing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killing
            run.is_enough = True
            await producing
            run.is_over = True
        await _check(run)
    finally:
        killing.cancel()
        await ask.close()


async def _check(run: Run) -> None:
    results = []
    while True:
        path = f"/topics/{run.results}/partitions/0/records?offset={len(results)}"
        records = (await run.ask("GET", path, headers={"accept": JSON["content-type"]})).json()
        if not records:
            break
        results += [record["value"] for record in records]
    least = sum(count for value, count in run.seen.items() if not value.startswith("once "))
    print(
        f"{len(run.produced)} records, {least} reads at least once, {len(results)} results, "
        f"{len(run.owners)} partitions owned in generations, {run.ask.repeated} requests repeated, "
        f"{dict(run.counts)}"
    )
    assert run.produced <= run.seen.keys()
    assert Counter(results) == Counter(run.produced)
    shared_partitions = {
        owned_partition: names for owned_partition, names in run.owners.items() if len(names) > 1
    }
    assert not shared_partitions, "two owners of one generation"
    assert run.counts["gone"], "no member was refused: the test had no effect"


def test_consumers_come_and_go_while_brokers_die(tmp_path: Path) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    with brokers(tmp_path, **QUICK) as cluster:
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
            client.create_topic(f"{topic}-results", 1)
        asyncio.run(_churn(cluster, topic, seed))
        bugs = [broker.log()[-3000:] for broker in cluster if "Traceback" in broker.log()]
        assert not bugs, bugs[0]
