"""A group of 100 members on 1,000 partitions, over REST, under load: one more joins, one crashes.

Disturbed until every partition was read by its owner in the new generation: the producer goes on
all the time, so each partition always has something new.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from tests.tools.bench.broker import Broker
from tests.tools.bench.load import Caller, request
from tests.tools.bench.report import Row

MEMBERS = 100
PARTITIONS = 1000
JOIN_S = 2.0
SESSION_MS = 3000
BEYOND_S = 1.0
PRODUCE_EVERY_S = 0.1
PATIENCE_S = 60.0
HEADERS = {"content-type": "application/vnd.kafka.v2+json"}
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    members = MEMBERS // 10 if is_quick else MEMBERS
    with Broker(f"file://{folder}") as broker:
        broker.create_topic("bench", PARTITIONS)
        joined_s, moved, least, gone_s = asyncio.run(_measured(broker.port, members))
    title = f"{members} on {PARTITIONS} partitions"
    return [
        Row(
            "groups",
            f"one more joins {title}: all partitions read by their owners again",
            joined_s,
            "s",
            JOIN_S,
            note=f"{moved} partitions moved, {least} is the least",
            is_smaller_better=True,
        ),
        Row(
            "groups",
            f"one of {members + 1} killed: all of its partitions read by others",
            gone_s,
            "s",
            SESSION_MS / 1000 + BEYOND_S,
            note=f"session.timeout.ms {SESSION_MS}",
            is_smaller_better=True,
        ),
    ]


class Group:
    """The members, each in its read loop, and what they saw."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen: dict[int, tuple[int, int]] = {}
        """The last generation and member that each partition was read in."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    async def join(self, member: int) -> None:
        call = Caller(self.port)
        body = {
            "name": f"m{member}",
            "format": "json",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_MS,
        }
        answer = await call(_post("/consumers/g", body))
        assert answer.status == 200, answer
        subscription = await call(_post(f"{_at(member)}/subscription", {"topics": ["bench"]}))
        assert subscription.status == 204, subscription
        self.tasks[member] = asyncio.create_task(self._read(member, call))

    async def _read(self, member: int, call: Caller) -> None:
        ask = request("GET", f"{_at(member)}/records?timeout=2000", headers={})
        try:
            while True:
                answer = await call(ask)
                assert answer.status == 200, answer
                generation = int(answer.headers["tidelog-generation"])
                for record in json.loads(answer.body):
                    self.seen[record["partition"]] = (generation, member)
                self._news.set()
        finally:
            call.close()  # in the middle of a read: what a kill looks like from here

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._news.clear()
                await self._news.wait()
                if any(task.done() for task in self.tasks.values()):
                    await asyncio.gather(*self.tasks.values())

    def all_in(self, generation: int) -> bool:
        return len(self.seen) == PARTITIONS and all(
            seen >= generation for seen, _ in self.seen.values()
        )

    @property
    def owners(self) -> dict[int, int]:
        return {partition: member for partition, (_, member) in self.seen.items()}


async def _measured(port: int, members: int) -> tuple[float, int, int, float]:
    group = Group(port)
    for member in range(members):
        await group.join(member)
    producing = asyncio.create_task(_produce(port))
    await group.until(lambda: group.all_in(members))
    await asyncio.sleep(1.0)  # the flood of the beginning is over
    old_owners = group.owners

    started = time.perf_counter()
    await group.join(members)
    await group.until(lambda: group.all_in(members + 1))
    joined_s = time.perf_counter() - started
    new_owners = group.owners
    moved = sum(new_owners[partition] != owner for partition, owner in old_owners.items())

    started = time.perf_counter()
    group.tasks.pop(0).cancel()
    await group.until(lambda: group.all_in(members + 2))
    gone_s = time.perf_counter() - started

    producing.cancel()
    for task in group.tasks.values():
        task.cancel()
    await asyncio.gather(producing, *group.tasks.values(), return_exceptions=True)
    return joined_s, moved, PARTITIONS // (members + 1), gone_s


async def _produce(port: int) -> None:
    """A record for every partition, again and again."""
    call = Caller(port)
    records = [{"value": number, "partition": number} for number in range(PARTITIONS)]
    body = _post("/topics/bench", {"records": records}, JSON)
    while True:
        answer = await call(body)
        assert answer.status == 200, answer
        await asyncio.sleep(PRODUCE_EVERY_S)


def _at(member: int) -> str:
    return f"/consumers/g/instances/m{member}"


def _post(path: str, body: object, headers: dict[str, str] = HEADERS) -> bytes:
    return request("POST", path, body=json.dumps(body).encode(), headers=headers)
