"""The live data of `tidelog dev`: departures of invented flights, and two groups that read them.

The departures are numbered from 0; a later start continues with the next number.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.service.cli.requests import quoted
from tidelog.service.cli.results import CommandError, NotThere

if TYPE_CHECKING:
    from tidelog.service.cli.client import Client

TOPIC = "departures"
PARTITIONS = 4
CONFIGS = {"segment.ms": "60000", "retention.ms": "86400000"}
"""After a minute, the topic has a table to look at. After a day, departures are deleted."""
MEDIA_TYPE = "application/vnd.kafka.json.v2+json"
SEED = 2013
PRODUCE_S = 0.2
"""Time between two requests of the producer: each is a commit, and an object in the folder."""
POLL_MS = 2000
SESSION_MS = 10_000
"""If this process was killed, the next one gets the partitions after this time."""

_CARRIERS = ("AA", "B6", "DL", "EV", "MQ", "UA", "US", "WN")
_ORIGINS = ("EWR", "JFK", "LGA")
_AIRPORTS = (("ATL", 762), ("BOS", 187), ("LAX", 2475), ("MIA", 1089), ("ORD", 733), ("SFO", 2586))
_PLANES = 400


class Group(NamedTuple):
    """A group of one member. A member reads at most `records` records each `pause_s` seconds."""

    name: str
    records: int
    pause_s: float


GROUPS = (Group("dashboard", 1000, 0.5), Group("report", 5, 0.5))
"""The group `report` reads 10 records a second, so it lags."""


def departure(number: int) -> dict[str, Any]:
    """Return the record of one departure. The record follows from the number alone."""
    chance = random.Random(SEED * 1_000_003 + number)
    carrier = chance.choice(_CARRIERS)
    plane = chance.randrange(_PLANES)
    airport, distance = chance.choice(_AIRPORTS)
    value = {
        "number": number,
        "carrier": carrier,
        "flight": f"{carrier}{100 + plane}",
        "origin": chance.choice(_ORIGINS),
        "destination": airport,
        "distance": distance,
        "delay": round(chance.expovariate(1 / 18)) - 5,  # minutes; 18 is a usual mean
    }
    return {"key": f"N{10_000 + plane}{carrier}", "value": value}


async def live(client: "Client", members: Sequence["Member"], rate: int) -> None:
    """Produce and read without end. Raises CommandError."""
    from tidelog.storage.io.tasks import together

    first = await _create(client)
    await together(_produce(client, first, rate), *(member.run() for member in members))


async def _create(client: "Client") -> int:
    """Create the topic if it does not exist; return the number of its records so far."""
    path = f"/topics/{TOPIC}"
    try:
        partitions = await client.get_json(f"{path}/partitions")
    except NotThere:
        configs = [{"name": name, "value": value} for name, value in CONFIGS.items()]
        body = {"topic_name": TOPIC, "partitions_count": PARTITIONS, "configs": configs}
        await client.post(f"{await client.cluster()}/topics", json=body)
        return 0
    ends = [
        (await client.get_json(f"{path}/partitions/{each['partition']}/offsets"))["end_offset"]
        for each in partitions
    ]
    return int(sum(ends))


async def _produce(client: "Client", number: int, rate: int) -> None:
    """Produce departures from `number` on, `rate` of them each second."""
    from tidelog.storage.io.clock import SystemClock

    run_id = SystemClock().new_id().hex()
    loop = asyncio.get_running_loop()
    due, sent_s = 0.0, loop.time()
    while True:
        # After a pause of the machine, continue at the same rate: omit the departures of the pause.
        now_s = loop.time()
        due, sent_s = due + min(now_s - sent_s, 1.0) * rate, now_s
        count = int(due)
        if count:
            due -= count
            body = {"records": [departure(number + each) for each in range(count)]}
            headers = {"content-type": MEDIA_TYPE, "idempotency-key": f'"dev-{run_id}-{number}"'}
            await client.post(f"/topics/{TOPIC}", json=body, headers=headers)
            number += count
        await asyncio.sleep(PRODUCE_S)


class Member:
    """The member of one group, from `run` to `leave`. `has_read` is set after its first commit."""

    def __init__(self, client: "Client", group: Group) -> None:
        self.has_read = asyncio.Event()
        self._client = client
        self._group = group
        self._base = f"/consumers/{quoted(group.name)}"
        self._instance = ""

    async def run(self) -> None:
        """Read and commit until the task is cancelled. Raises CommandError."""
        while True:
            try:
                await self._join()
                while True:
                    await self._read()
                    await asyncio.sleep(self._group.pause_s)
            except NotThere:
                self._instance = ""  # it expired, as after a suspend of the machine: join again

    async def leave(self) -> None:
        """Delete the instance, so that the next start gets its partitions at once."""
        if self._instance:
            with contextlib.suppress(CommandError):  # without a broker, it expires
                await self._client.call("DELETE", self._instance)

    async def _join(self) -> None:
        body = {
            "format": "json",
            "auto.offset.reset": "earliest",
            "auto.commit.enable": False,
            "max.poll.records": self._group.records,
            "session.timeout.ms": SESSION_MS,
            "on.error": "skip",  # records that a user produced in another form
            "client.id": "tidelog-dev",
        }
        created = self._client.json_of(await self._client.post(self._base, json=body))
        self._instance = f"{self._base}/instances/{quoted(created['instance_id'])}"
        await self._client.post(f"{self._instance}/subscription", json={"topics": [TOPIC]})

    async def _read(self) -> None:
        path = f"{self._instance}/records"
        answer = await self._client.get(
            path, params={"timeout": POLL_MS}, headers={"accept": MEDIA_TYPE}
        )
        if self._client.json_of(answer):
            await self._client.post(f"{self._instance}/offsets")  # all that was read
            self.has_read.set()
