"""Responses of a member that arrive, are lost, or arrive though they count as lost.

No record is passed over, and no offset of a lost response is committed. In virtual time.
"""

import asyncio
import random
from collections import defaultdict

import pytest

from tests.support import vloop
from tests.support.instances import BY_HAND, CONFIG, group_of, virtual
from tests.support.logs import append
from tidelog.storage.broker import Broker
from tidelog.storage.core.model import ReadBounds, TopicPartition
from tidelog.storage.groups.coordinator import ADOPT_S
from tidelog.storage.groups.read_result import Read
from tidelog.storage.groups.rest_groups import RestGroups

PARTITIONS = 3
RECORDS = 120


class Known:
    """An arrival that is decided after a time."""

    def __init__(self, *, has_arrived: bool, after_s: float = 0.0) -> None:
        self._has_arrived = has_arrived
        self._after_s = after_s

    async def has_arrived(self) -> bool:
        await asyncio.sleep(self._after_s)
        return self._has_arrived


async def read_offsets(
    consumers: RestGroups, arrival: Known | None, received: str | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """Read as the member "x". Return the read's id, and partition and offset of each record."""
    reading = consumers.reading("g", "x", bounds=ReadBounds(200), wait_s=0.1, received=received)
    async with reading as read:
        read.arrival = arrival
        return read.read_id, places_of(read)


def places_of(read: Read) -> list[tuple[int, int]]:
    return [
        (portion.where.partition, offset)
        for portion in read.portions
        for piece in portion.fetched.pieces
        for offset in piece.batch.column("offset").to_pylist()
    ]


def committed(log: Broker) -> dict[int, int]:
    return {
        topic_partition.partition: committed_offset.offset
        for topic_partition, committed_offset in log.groups.committed_offsets("g").items()
    }


class Careless:
    """A member that reads on after each outcome, and never seeks."""

    def __init__(self, log: Broker, consumers: RestGroups, draws: random.Random) -> None:
        self._log = log
        self._consumers = consumers
        self._draws = draws
        self._names_reads = draws.random() < 0.4
        self._last_read = "0"
        self.next: dict[int, int] = defaultdict(int)
        """By partition: the end of the records that the member has."""
        self.lost = 0

    async def step(self) -> None:
        draws = self._draws
        is_received = draws.random() < 0.6
        # A response may arrive though the broker gets no proof; never the other way round.
        is_proved = is_received and draws.random() < 0.9
        arrival = Known(has_arrived=is_proved, after_s=draws.choice([0, 0, 0.05, 3]))
        if self._names_reads:  # then the proof says nothing: a proxy took the response
            arrival = Known(has_arrived=True)
        received = self._last_read if self._names_reads else None
        read_id, places = await read_offsets(self._consumers, arrival, received)
        if not is_received:
            self.lost += bool(places)
        else:
            self._last_read = read_id or self._last_read
            for partition, offset in places:
                assert offset <= self.next[partition], "records were passed over"
                self.next[partition] = max(self.next[partition], offset + 1)
        match draws.choice(["wait", "commit", "commit all", "read on", "read on"]):
            case "wait":
                await asyncio.sleep(2.5 * ADOPT_S)
            case "commit" if self.next:
                partition = draws.choice(list(self.next))
                offset = draws.randint(0, self.next[partition])
                await self._commit({TopicPartition("t", partition): (offset, "")})
            case "commit all" if not self._names_reads:
                await self._commit(None)
        for partition, offset in committed(self._log).items():
            assert offset <= self.next[partition], "a lost response is committed"

    async def _commit(self, offsets: dict[TopicPartition, tuple[int, str]] | None) -> None:
        session = await self._consumers.heartbeat("g", "x")
        await self._consumers.commit(session, offsets)


@pytest.mark.parametrize("seed", range(40))
def test_member_that_reads_on_after_lost_responses_misses_no_record(seed: int) -> None:
    vloop.run(lambda: _read_all(random.Random(seed)))


async def _read_all(draws: random.Random) -> None:
    async with group_of(PARTITIONS) as (log, consumers):
        config = draws.choice([CONFIG, BY_HAND])
        await consumers.join("g", "x", config)
        await consumers.subscribe("g", "x", ["t"])
        member = Careless(log, consumers, draws)
        for number in range(RECORDS):
            await append(log, f"{number}", partition=draws.randrange(PARTITIONS))
            if draws.random() < 0.3:
                await member.step()
            if draws.random() < 0.02:  # a rebalance: another member comes and goes
                await consumers.join("g", "y", config)
                await consumers.subscribe("g", "y", ["t"])
                await consumers.leave("g", "y")
        ends = [partition.high_watermark for partition in log.state.topic("t").partitions]
        for _ in range(400):
            if [member.next[partition] for partition in range(PARTITIONS)] == ends:
                break
            await member.step()
        assert [member.next[partition] for partition in range(PARTITIONS)] == ends
        assert member.lost


@virtual
async def test_committed_offset_of_a_lost_response_is_the_place_to_read_again() -> None:
    async with group_of(1) as (log, consumers):
        await consumers.join("g", "x", BY_HAND)
        await consumers.subscribe("g", "x", ["t"])
        await append(log, "a", "b", "c")
        _, places = await read_offsets(consumers, Known(has_arrived=False))
        assert places == [(0, 0), (0, 1), (0, 2)]
        session = await consumers.heartbeat("g", "x")
        for offset in range(3):
            await consumers.commit(session, {TopicPartition("t", 0): (offset, "")})
            again = await read_offsets(consumers, Known(has_arrived=False))
            assert again[1] == places[offset:]
        await consumers.commit(session, {TopicPartition("t", 0): (3, "")})
        assert (await read_offsets(consumers, Known(has_arrived=False)))[1] == []


@virtual
async def test_auto_commit_waits_for_the_proof_of_the_arrival() -> None:
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        await read_offsets(consumers, Known(has_arrived=False))
        await read_offsets(consumers, Known(has_arrived=True))
        await asyncio.sleep(3 * ADOPT_S)
        assert committed(log) == {}
        await read_offsets(consumers, None)
        await asyncio.sleep(3 * ADOPT_S)
        assert committed(log) == {0: 2}


@virtual
async def test_departure_during_the_wait_for_a_proof_commits_what_arrived() -> None:
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        await read_offsets(consumers, Known(has_arrived=True, after_s=2))
        await consumers.leave("g", "x")
        assert committed(log) == {0: 2}


@virtual
async def test_two_requests_that_wait_for_one_proof_agree() -> None:
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        _, places = await read_offsets(consumers, Known(has_arrived=False, after_s=2))
        commit = asyncio.create_task(consumers.commit(await consumers.heartbeat("g", "x")))
        again = await read_offsets(consumers, Known(has_arrived=True))
        await commit
        assert again[1] == places
        assert committed(log) == {}


@virtual
async def test_a_read_of_before_a_restore_proves_no_response_after_it() -> None:
    """A restored log gives a term again, and a new process begins to count again."""
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        old_read, _ = await read_offsets(consumers, None)
    async with group_of(1, "x") as (log, consumers):
        await append(log, "c", "d")
        _, lost = await read_offsets(consumers, Known(has_arrived=False), old_read)
        assert (await read_offsets(consumers, None, old_read))[1] == lost
