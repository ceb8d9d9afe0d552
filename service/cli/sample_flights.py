"""Departures of invented flights: `tidelog dev` produces them, and reads them in two groups."""

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidelog.service.client.admin import AsyncAdmin
from tidelog.service.client.connection import Connection
from tidelog.service.client.consumer import AsyncConsumer
from tidelog.service.client.errors import NotFound
from tidelog.service.client.producer import ProducerOptions, send_batch
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import together

TOPIC = "departures"
PARTITIONS = 4
CONFIGS = {"segment.ms": "60000", "retention.ms": "86400000"}
"""After a minute, the topic has a table to look at. After a day, departures are deleted."""
SEED = 2013
PRODUCE_S = 0.2
"""Time between two requests of the producer: each is a commit, and an object in the folder."""
POLL_S = 2.0
SESSION_MS = 10_000
"""If this process was killed, the next one gets the partitions after this time."""
_CARRIERS = ("AA", "B6", "DL", "EV", "MQ", "UA", "US", "WN")
_ORIGINS = ("EWR", "JFK", "LGA")
_AIRPORTS = (("ATL", 762), ("BOS", 187), ("LAX", 2475), ("MIA", 1089), ("ORD", 733), ("SFO", 2586))
_PLANES = 400


class Group(NamedTuple):
    """A group of one member, which reads at most `fetch_bytes` each `pause_s` seconds."""

    name: str
    fetch_bytes: int
    pause_s: float


GROUPS = (Group("dashboard", 1024 * 1024, 0.5), Group("report", 1000, 0.5))
"""The group `report` reads about 10 records a second, so it lags."""


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


async def live(connection: Connection, members: Sequence["DepartureReader"], rate: int) -> None:
    """Produce and read without end.

    Raises ClientError. When the task is cancelled, the members leave their groups.
    """
    first = await _create(connection)
    await together(_produce(connection, first, rate), *(member.run() for member in members))


async def _create(connection: Connection) -> int:
    """Create the topic if it does not exist; return the number of its records so far."""
    admin = AsyncAdmin(connection)
    try:
        return sum(end for _, end in (await admin.offsets(TOPIC)).values())
    except NotFound:
        await admin.create_topic(TOPIC, PARTITIONS, CONFIGS)
        return 0


async def _produce(connection: Connection, number: int, rate: int) -> None:
    """Produce departures from `number` on, `rate` of them each second."""
    options = ProducerOptions(format="json", delivery_s=math.inf)
    run_id = SystemClock().new_id().hex()
    loop = asyncio.get_running_loop()
    due, sent_s = 0.0, loop.time()
    while True:
        # If the machine was suspended, do not produce the departures of that time all at once.
        now_s = loop.time()
        due, sent_s = due + min(now_s - sent_s, 1.0) * rate, now_s
        count = int(due)
        if count:
            due -= count
            texts = [msgspec.json.encode(departure(number + index)) for index in range(count)]
            await send_batch(connection, TOPIC, texts, f"dev-{run_id}-{number}", options)
            number += count
        await asyncio.sleep(PRODUCE_S)


class DepartureReader:
    """The member of one group. `has_read` is set after its first commit."""

    def __init__(self, connection: Connection, group: Group) -> None:
        self.has_read = asyncio.Event()
        self._connection = connection
        self._group = group

    async def run(self) -> None:
        """Read and commit until the task is cancelled.

        Then leave the group, so that the next start gets the partitions at once. Raises
        ClientError.
        """
        async with AsyncConsumer(
            self._connection,
            TOPIC,
            self._group.name,
            auto_commit=False,
            session_timeout_ms=SESSION_MS,
            fetch_bytes=self._group.fetch_bytes,
            client_id="tidelog-dev",
        ) as consumer:
            while True:
                if await consumer.poll(POLL_S):
                    await consumer.commit()
                    self.has_read.set()
                await asyncio.sleep(self._group.pause_s)
