"""The end of a run: nothing fails any more, and now everything must come right."""

import asyncio
import io
import itertools
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from tests.sim import history
from tests.sim.clients import TOPIC, Client, Producer, reads_of
from tests.sim.history import Read, Written
from tests.sim.members import Member, Worker, ask_for
from tests.sim.network import Refusal, Silence
from tests.sim.stores import files_at
from tests.sim.world import Broker, World
from tidelog.compaction.garbage import Grace
from tidelog.compaction.scrub import scrub
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import LogSettings

if TYPE_CHECKING:
    from tests.sim.runs import Run

SETTLE_S = 40.0
"""In which every broker starts, answers and takes a record: more than any timeout of theirs."""


async def finish(run: "Run") -> None:
    world = run.world
    world.calm()
    for slot in range(run.plan.brokers):
        run._start(slot)
    await _everyone_serves(run)
    for client in run.clients:
        if not isinstance(client, Member):
            client.is_over = True
    while not all(client.is_done or isinstance(client, Member) for client in run.clients):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(2.0)  # work without a waiting client ends
    await _groups_are_read(run)
    for carer in run.carers:
        carer.kill()
    await asyncio.sleep(2.0)
    scan(world)
    await _final(run)
    scan(world)


async def _everyone_serves(run: "Run") -> None:
    """Each broker takes a record, soon.

    A process may still learn here that a copy of it ran, and end: then its successor takes a
    record.
    """
    world = run.world
    deadline_s = world.now_s + SETTLE_S
    served: set[Broker] = set()
    attempts = itertools.count()
    while True:
        ready = world.ready()
        waiting = [broker for broker in ready if broker not in served]
        if not waiting and len(ready) >= run.plan.brokers:
            return
        for broker in waiting:
            attempt = next(attempts)
            producer = Producer(world, f"last{attempt}", run.plan.load)
            record = Written(TOPIC, f"last/{attempt}", 0, "last")
            if await producer.once([record], broker=broker):
                served.add(broker)
        if world.now_s > deadline_s:
            names = [broker.name for broker in world.ready()]
            served_names = [broker.name for broker in served]
            world.bug(
                f"of {run.plan.brokers} brokers {names} run, and {served_names} took a record"
            )
            return
        await asyncio.sleep(0.5)


async def _groups_are_read(run: "Run") -> None:
    members = [client for client in run.clients if isinstance(client, Member)]
    workers = {member.group for member in members if isinstance(member, Worker)}
    groups = {member.group: member.habits.pattern for member in members}
    topics = {
        group: sorted(run.world.inputs()) if pattern else [TOPIC]
        for group, pattern in groups.items()
    }
    deadline_s = run.world.now_s + SETTLE_S
    while groups and not all(
        _is_committed(run.world, group) if group in workers else _is_read(run.world, group, names)
        for group, names in topics.items()
    ):
        await asyncio.sleep(0.5)
        if run.world.now_s > deadline_s:
            break  # the checker will say what was not
    for member in members:
        member.is_over = True
    while not all(member.is_done for member in members):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    for group in sorted(groups):
        run.world.record(history.Drained(run.world.now_s, group, topics[group]))


def _is_committed(world: World, group: str) -> bool:
    topic = world.truth.topic(TOPIC)
    committed = world.truth.committed_offsets.of_group(group).get(topic.topic_id, {})
    return all(
        not partition.high_watermark
        or (number in committed and committed[number].offset == partition.high_watermark)
        for number, partition in enumerate(topic.partitions)
    )


def _is_read(world: World, group: str, topics: list[str]) -> bool:
    ops = {
        event.op
        for event in world.recorder.events
        if isinstance(event, history.Poll) and event.group == group
    }
    reached: dict[tuple[str, int], int] = {}
    for event in world.recorder.events:
        if isinstance(event, history.Polled) and event.op in ops:
            for portion in event.portions:
                topic_partition = (portion.topic, portion.partition)
                reached[topic_partition] = max(reached.get(topic_partition, 0), portion.next_offset)
    return all(
        reached.get((topic, number), 0) >= partition.high_watermark
        for topic in topics
        for number, partition in enumerate(world.truth.topic(topic).partitions)
    )


def scan(world: World) -> None:
    """The tables at this very moment, against the chain at this very moment (I7)."""
    topic = world.truth.topic(TOPIC)
    commits = world.bucket.tables.get(topic.prefix, [])
    rows: dict[int, list[Read]] = {}
    for file in files_at(commits, len(commits) - 1):
        key = f"{topic.prefix}/{file.path}"
        try:
            table = pq.read_table(io.BytesIO(world.bucket.read(key)), columns=["offset", "headers"])
        except LogError as error:
            world.bug(f"I9: the table names {key}, which is gone: {error!r}")
            continue
        offsets: list[Any] = table.column("offset").to_pylist()
        headers: list[Any] = table.column("headers").to_pylist()
        rows.setdefault(file.partition, []).extend(
            Read(offset, str(record_headers[0]["value"], "ascii"))
            for offset, record_headers in zip(offsets, headers, strict=True)
        )
    for number, partition in enumerate(topic.partitions):
        op = world.recorder.next_op()
        world.record(history.Scan(world.now_s, op, "scan", TOPIC, number))
        start, end = partition.log_start_offset, partition.sealed_end
        reads = sorted(rows.get(number, []))
        world.record(history.Scanned(world.now_s, op, reads, start, end))


async def _final(run: "Run") -> None:
    world = run.world
    fresh = await read_back(world, run.plan.settings)
    if fresh is None:
        return
    for group in sorted({client.group for client in run.clients if isinstance(client, Member)}):
        _ = await ask_for(Client(world, "last", run.plan.load), group, fresh)
    await scrub_all(world, run.plan.grace)


async def read_back(world: World, settings: LogSettings) -> Broker | None:
    """A broker that knows nothing reads everything; and all know the same.

    The broker, if it starts.
    """
    fresh = world.start(99, settings._replace(is_sealing=False))
    while not fresh.is_ready:
        await asyncio.sleep(0.2)
        if fresh.process.is_dead:
            return None
    for broker in world.ready():
        newest = world.truth.seq
        try:
            await world.ask(broker.address, lambda broker: broker.log._log.wal.refresh())
        except LogError as error:
            world.bug(f"{broker.name} cannot read the chain any more: {error}")
            continue
        if broker.log.state.seq < newest:
            world.bug(f"I3: {broker.name} has read up to {broker.log.state.seq}, not to {newest}")
    world.check_states()
    for topic in world.truth.topics.values():
        for number in range(len(topic.partitions)):
            await _read_all(world, fresh, topic.name, number)
    return fresh


async def scrub_all(world: World, grace: Grace) -> None:
    """Nothing that the cluster names is damaged or gone."""
    try:
        cluster = await world.cluster()
        report = await scrub(cluster, None, grace)
        if damage := [finding for finding in report.findings if finding.is_damage]:
            world.bug(f"scrub finds {damage}")
    except LogError as error:
        world.bug(f"scrub fails: {error!r}")


async def _read_all(world: World, fresh: Broker, topic: str, number: int) -> None:
    async def read(broker: Broker) -> tuple[int, list[Read]]:
        start = offset = (await broker.log.records.offsets(topic, number)).log_start_offset
        reads: list[Read] = []
        while True:
            fetched = await broker.log.records.fetch(topic, number, offset, bytes_max=1 << 20)
            if not fetched.pieces and fetched.next_offset == offset:
                return start, reads
            reads += reads_of(fetched)
            offset = fetched.next_offset

    try:
        start, reads = await world.ask(fresh.address, read)
    except (LogError, Refusal, Silence) as error:
        world.bug(f"I1: {topic}-{number} cannot be read in the end: {error!r}")
    else:
        world.record(history.Final(world.now_s, topic, number, start, reads))
