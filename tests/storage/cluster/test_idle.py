"""An idle cluster asks the store rarely, and finds at once what makes it doubt.

The real code on virtual time; requests are counted on each broker's way to the store.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support import logs
from tests.support.cluster import Broken, Cluster
from tests.support.faults import Fault
from tests.support.instances import CONFIG, read
from tests.support.maintenance import caring
from tests.support.views import one
from tidelog.service.telemetry.store_costs import MONTH_S, PRICES
from tidelog.storage.broker import Broker, LogSettings
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import (
    QUESTION,
    EntryAnnouncement,
    decode_announcements,
    encode_announcements,
)
from tidelog.storage.cluster.peer_beats import AGREED_S, BEAT_S
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.wal.poll_pace import UNTOLD_S

DEFAULTS = LogSettings(is_sealing=False)
HEARTBEAT_S = DEFAULTS.membership.heartbeat_interval_s
TIMEOUT_S = DEFAULTS.membership.member_timeout_s
QUIET_S = DEFAULTS.membership.quiet_interval_s
MEASURED_S = QUIET_S + HEARTBEAT_S
PROBE_S = 2.0
READERS = 10
"""At each broker."""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(DEFAULTS, latency=lambda _: 0.02) as cluster:
        yield cluster


async def quiet(cluster: Cluster, brokers: int) -> list[Broker]:
    for _ in range(brokers):
        await cluster.start()
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert all(log._sequencer.beats.is_quiet() for log in cluster.logs)
    return cluster.logs


def requests(logs_: list[Broker]) -> Counter[tuple[str, str]]:
    """How many requests these brokers sent, by verb and by the kind of the object."""
    return Counter(
        ("get" if call.verb == "get_range" else call.verb, object_keys.kind(call.key))
        for log in logs_
        for call, _ in logs.store_of(log).answered
    )


async def sent_in(brokers: list[Broker], seconds: float) -> Counter[tuple[str, str]]:
    old = requests(brokers)
    await asyncio.sleep(seconds)
    return requests(brokers) - old


def dollars(sent: Counter[tuple[str, str]], seconds: float) -> float:
    """The price of a month at S3 Standard."""
    return sum(PRICES.get(verb, 0.0) * n * MONTH_S / seconds for (verb, _), n in sent.items())


@pytest.mark.parametrize(("brokers", "dollars_max"), [(1, 0.15), (3, 0.30)])
async def test_an_idle_cluster_costs_cents(
    cluster: Cluster, brokers: int, dollars_max: float
) -> None:
    sent = await sent_in(await quiet(cluster, brokers), MEASURED_S)
    assert dollars(sent, MEASURED_S) <= dollars_max, sent
    assert sent["put", "brokers"] == brokers
    assert sent["list", "brokers"] == 2, "the first in rank alone lists"


async def test_probes_and_waiting_readers_cost_a_few_cents_more(cluster: Cluster) -> None:
    brokers = await quiet(cluster, 3)
    await brokers[0].topics.create("t", 1, {})

    async def probe(log: Broker) -> None:
        while True:
            await log.check_ready()
            await asyncio.sleep(PROBE_S)

    async def wait(log: Broker) -> None:
        while True:
            assert not (await log.records.fetch("t", 0, 0, bytes_max=1000, wait_s=1.0)).pieces

    tasks = [asyncio.create_task(probe(log)) for log in brokers]
    tasks += [asyncio.create_task(wait(log)) for log in brokers for _ in range(READERS)]
    try:
        await asyncio.sleep(10.0)
        sent = await sent_in(brokers, MEASURED_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert dollars(sent, MEASURED_S) <= 0.50, sent


# -- entries


async def test_a_lost_announcement_costs_a_beat(cluster: Cluster) -> None:
    brokers = await quiet(cluster, 3)
    await brokers[0].topics.create("t", 1, {})
    for log in brokers:  # all announcements are lost, beats are not
        log._sequencer.announcer.announce = lambda *_, **__: None  # type: ignore[method-assign]
    reader = cluster.others()[1]
    poll = asyncio.create_task(reader.records.fetch("t", 0, 0, bytes_max=1000, wait_s=20.0))
    await asyncio.sleep(0.1)
    await logs.append(cluster.sequencer(), "now")
    acked_s = asyncio.get_running_loop().time()
    assert (await poll).pieces
    assert asyncio.get_running_loop().time() - acked_s < BEAT_S + 0.1


async def test_brokers_that_do_not_reach_each_other_read_the_log_at_their_usual_interval(
    cluster: Cluster,
) -> None:
    brokers = await quiet(cluster, 3)
    await brokers[0].topics.create("t", 1, {})
    await asyncio.sleep(2 * BEAT_S)
    cluster.net.plan = lambda *_: Broken.LOST
    await asyncio.sleep(AGREED_S)
    sent = await sent_in(brokers, 10.0)
    assert sent["get", "wal"] >= 27
    await logs.append(brokers[0], "now")
    await asyncio.sleep(DEFAULTS.poll_interval_s + 0.1)
    assert {log.state.partition("t", 0).high_watermark for log in brokers} == {1}


async def test_an_entry_of_a_program_is_seen_within_a_minute_and_the_next_one_soon(
    cluster: Cluster,
) -> None:
    brokers = await quiet(cluster, 3)
    await brokers[0].topics.create("t", 1, {})

    async def commit() -> int:
        async with caring(cluster.store) as program:
            await program.wal.commit(one(program.wal, "a"))
            return program.state.seq

    seq = await commit()
    sent = await sent_in(brokers, DEFAULTS.quiet_poll_s + 3.0)
    assert sent["list", "brokers"] >= 1, "the program may be a broker"
    assert {log.state.seq for log in brokers} == {seq}
    await asyncio.sleep(3.0)
    seq = await commit()
    await asyncio.sleep(DEFAULTS.poll_interval_s + BEAT_S + 0.2)
    assert {log.state.seq for log in brokers} == {seq}, "the finder's beats tell the others"
    await asyncio.sleep(UNTOLD_S + 60.0)
    sent = await sent_in(brokers, 120.0)
    assert sent["get", "wal"] <= 9


async def test_each_read_that_does_not_wait_asks_the_store(cluster: Cluster) -> None:
    """I3: a broker that no other knows may have acknowledged a record."""
    (log,) = await quiet(cluster, 1)
    await log.topics.create("t", 1, {})
    async with caring(cluster.store) as program:
        await program.wal.commit(one(program.wal, "a"))
    old = log.state.seq
    fetched = await log.records.fetch("t", 0, 0, bytes_max=1000, wait_s=0.5)
    assert (fetched.pieces, log.state.seq) == ([], old)
    await log.records.fetch("t", 0, 0, bytes_max=1000)
    assert log.state.seq == old + 1


async def test_a_group_that_was_idle_is_read_at_once(cluster: Cluster) -> None:
    """The store's time is not known for a minute then, and so the view may be as old."""
    (log,) = await quiet(cluster, 1)
    await log.topics.create("t", 1, {})
    config = msgspec.structs.replace(CONFIG, max_poll_interval_ms=300_000)
    await log.groups.rest.join("g", "m", config)
    await log.groups.rest.subscribe("g", "m", ["t"])
    for _ in range(25):
        await asyncio.sleep(5.0)
        await log.groups.rest.heartbeat("g", "m")
    await logs.append(log, "a")
    assert await read(log.groups.rest, "m") == ["a"]


# -- brokers


async def test_a_killed_broker_is_not_reached_at_once_and_dead_soon() -> None:
    membership = DEFAULTS.membership._replace(sweep_after_s=100.0)
    async with Cluster(DEFAULTS._replace(membership=membership)) as cluster:
        brokers = list(await quiet(cluster, 3))
        await asyncio.sleep(60.0)
        victim = cluster.sequencer()
        rest = [log for log in brokers if log is not victim]
        await cluster.kill(victim)
        await asyncio.sleep(2.0)
        assert {len(log.cluster.members().peers) for log in rest} == {1}
        await asyncio.sleep(TIMEOUT_S + 2 * HEARTBEAT_S)
        assert {len(log._membership.others) for log in rest} == {1}
        assert not any(log._sequencer.beats.is_quiet() for log in rest), "it may be cut off"
        await asyncio.sleep(membership.sweep_after_s + HEARTBEAT_S)
        assert all(log._sequencer.beats.is_quiet() for log in rest), "its object is swept"


async def test_a_broker_that_starts_asks_who_is_alive(cluster: Cluster) -> None:
    """Objects of live brokers are minutes old, and so is that of a dead one."""
    brokers = list(await quiet(cluster, 3))
    await asyncio.sleep(QUIET_S / 2)
    victim = cluster.sequencer()
    body = await cluster.store.get(object_keys.broker(victim._membership.me.id))
    await cluster.stop(victim)
    await cluster.store.put(object_keys.broker(victim._membership.me.id), [body])
    await asyncio.sleep(QUIET_S / 2)
    began_s = asyncio.get_running_loop().time()
    late = await cluster.start()
    assert asyncio.get_running_loop().time() - began_s < 2.0
    live = {log._membership.me.id for log in brokers if log is not victim}
    assert {member.id for member in late._membership.others} == live
    await asyncio.sleep(2 * BEAT_S)
    assert {len(log._membership.others) for log in cluster.logs} == {2}


async def test_a_broker_whose_messages_reach_nobody_is_found_by_its_object() -> None:
    """No message passes between it and the others, and all of them can reach the store."""
    async with Cluster(DEFAULTS) as cluster:
        first, second = list(await quiet(cluster, 2))
        addresses = {log._membership.me.address for log in (first, second)}
        cluster.net.cut.add("http://b3")
        third = await cluster.start()
        await asyncio.sleep(DEFAULTS.membership.quiet_look_s + 3 * HEARTBEAT_S)
        assert {len(log._membership.others) for log in (first, second)} == {2}
        await asyncio.sleep(2 * TIMEOUT_S)
        assert {member.address for member in third._membership.others} == addresses
        assert {len(log._membership.others) for log in (first, second)} == {2}, "it still lives"


async def test_one_way_that_is_cut_makes_all_write_heartbeats(cluster: Cluster) -> None:
    """The first does not reach the second, which reaches all, and must be seen to live."""
    first, second, third = list(await quiet(cluster, 3))
    cluster.net.cut.add((first._membership.me.address, second._membership.me.address))
    await asyncio.sleep(2 * HEARTBEAT_S)
    sent = await sent_in([second], 60.0)
    assert sent["put", "brokers"] >= 11
    assert {len(log._membership.others) for log in (first, second, third)} == {2}
    assert [peer.id for peer in first.cluster.members().peers].count(second._membership.me.id)


# -- versions


def _older(number: int = 0) -> bytes:
    """The object of a broker of the version before."""
    member = Member("0ld", "old", "http://old", "token", 1, beat=number)
    fields = msgspec.to_builtins(member)
    del fields["writes_rarely"]
    return msgspec.json.encode(fields) + b" " * (number % 2)


async def test_heartbeats_go_on_while_an_older_version_may_live(cluster: Cluster) -> None:
    key = object_keys.broker("0ld")
    await cluster.store.put(key, [_older()])
    brokers = [await cluster.start() for _ in range(2)]
    sent = await sent_in(brokers, 60.0)
    assert sent["put", "brokers"] >= 22
    await cluster.store.delete([key])
    await asyncio.sleep(2 * HEARTBEAT_S)
    sent = await sent_in(brokers, 60.0)
    assert sent["put", "brokers"] == 0


async def test_an_older_version_gets_its_own_question(cluster: Cluster) -> None:
    """It refuses an empty message when it is about to stop, and answers it with nothing."""
    await cluster.store.put(object_keys.broker("0ld"), [_older()])
    (log,) = [await cluster.start()]
    asked: list[bytes] = []

    async def announce(_: Member, message: bytes) -> bytes:
        asked.append(message)
        return b""

    transport = log._sequencer.beats._transport
    transport.announce = announce  # type: ignore[method-assign]
    await asyncio.sleep(3 * BEAT_S)
    assert QUESTION in asked
    assert not any(entry.body for sent in asked for entry in decode_announcements(sent))
    assert [peer.name for peer in log.cluster.members().peers] == ["old"]
    assert not log._sequencer.beats.is_quiet()


async def test_an_announcement_of_an_older_version_has_no_answer(cluster: Cluster) -> None:
    (log,) = await quiet(cluster, 1)
    api = log.cluster.peer_api
    assert api.on_announcements(QUESTION) == b""
    assert api.on_announcements(encode_announcements([EntryAnnouncement(0)])) == b""


# -- readiness


async def test_a_probed_broker_that_cannot_write_is_not_ready(cluster: Cluster) -> None:
    """It has no producers, so only its heartbeats write, and they are rare."""
    (log, _) = await quiet(cluster, 2)

    async def ready_for(seconds: float) -> bool:
        until_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until_s:
            with contextlib.suppress(Unavailable):
                await log.check_ready()
                await asyncio.sleep(PROBE_S)
                continue
            return False
        return True

    assert await ready_for(QUIET_S)
    store = logs.store_of(log)
    store.plan = lambda call: Fault.UNAVAILABLE if call.verb == "put" else None
    assert not await ready_for(300.0 + TIMEOUT_S + 2 * HEARTBEAT_S)
    store.plan = lambda _: None
    await asyncio.sleep(HEARTBEAT_S + 0.1)
    assert await ready_for(10.0)
