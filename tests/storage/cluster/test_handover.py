"""A broker that stops hands its roles over, and a broker that starts is seen at once.

In virtual time.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.cluster import SETTINGS, Broken, Cluster
from tests.support.instances import BY_HAND, CONFIG, read
from tests.support.logs import append
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.groups.group_release import RELEASE_S
from tidelog.storage.groups.rest_members import HANDOVER_S

SLOW_BEATS = SETTINGS._replace(
    membership=MembershipSettings(heartbeat_interval_s=60.0, member_timeout_s=180.0)
)
SOON_S = 0.2
"""Messages, but no heartbeat."""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(SLOW_BEATS) as cluster:
        yield cluster


async def three(cluster: Cluster) -> list[Broker]:
    """Three brokers that know each other by notices alone, the sequencer first."""
    brokers = [await cluster.start() for _ in range(3)]
    await asyncio.sleep(SOON_S)
    by_id = {log._membership.me.id: log for log in brokers}
    return [by_id[member.id] for member in brokers[0]._membership.ranking]


async def test_a_broker_that_joins_is_seen_before_the_next_heartbeat(cluster: Cluster) -> None:
    brokers = await three(cluster)
    assert {len(log.cluster.members().peers) for log in brokers} == {2}
    assert asyncio.get_running_loop().time() < 1.0


async def test_next_in_rank_commits_while_sequencer_drains(cluster: Cluster) -> None:
    first, second, third = await three(cluster)
    await first.topics.create("t", 1, {})
    await third.refresh()
    await first.hand_over()
    heir = second._membership.me.id
    assert [log.cluster.members().sequencer.id for log in (first, second, third)] == [heir] * 3
    assert {len(log.cluster.members().peers) for log in (second, third)} == {1}
    old_count = second.stats().sequencer.taken
    for log in (first, second, third):
        await append(log, "a")
    assert second.stats().sequencer.taken == old_count + 2
    assert first.stats().sequencer.own_commits == third.stats().sequencer.own_commits == 0


async def test_peer_without_notice_commits_through_draining_broker(cluster: Cluster) -> None:
    first, second, third = await three(cluster)
    await first.topics.create("t", 1, {})
    await third.refresh()
    address = third._membership.me.address
    cluster.net.plan = lambda _, to: Broken.LOST if to == address else None
    await first.hand_over()
    cluster.net.plan = lambda _, to: None
    assert third.cluster.members().sequencer.id == first._membership.me.id
    await append(third, "a")
    assert third.stats().sequencer.own_commits == 0
    assert second.cluster.members().sequencer.id == second._membership.me.id


async def test_the_last_broker_hands_nothing_over(cluster: Cluster) -> None:
    only = await cluster.start()
    await only.topics.create("t", 1, {})
    await joined(only)
    await only.hand_over()
    assert only.cluster.members().is_sequencer
    await append(only, "a")
    assert await read(only.groups.rest, "m") == ["a"]


async def joined(log: Broker, config=CONFIG) -> None:
    """A member of group `g` that has found its position."""
    await log.groups.rest.join("g", "m", config)
    await log.groups.rest.subscribe("g", "m", ["t"])


async def of_group(cluster: Cluster, config=CONFIG) -> tuple[Broker, Broker]:
    """The coordinator of the group `g`, with a member that has read "a", and its next one."""
    brokers = await three(cluster)
    await brokers[0].topics.create("t", 1, {})
    await append(brokers[0], "a")
    await joined(brokers[0], config)
    assert await read(brokers[0].groups.rest, "m") == ["a"]
    assert await read(brokers[0].groups.rest, "m") == []  # the first read is delivered
    for log in brokers[1:]:
        await log.refresh()
    return brokers[0], brokers[1]


def heirs(log: Broker, cluster: Cluster) -> list[str]:
    return [broker._coordinator.broker_of("g") for broker in cluster.logs if broker is not log]


async def test_group_moves_with_offsets_and_no_member_waits(cluster: Cluster) -> None:
    first, _ = await of_group(cluster)
    generation = first.state.members.get("g").generation
    await first.hand_over()
    (heir,) = {*heirs(first, cluster), first._coordinator.broker_of("g")}
    assert heir != first._membership.me.id
    heir_log = next(log for log in cluster.logs if log._membership.me.id == heir)
    await heir_log.refresh()
    began_s = asyncio.get_running_loop().time()
    await append(heir_log, "b")
    assert await read(heir_log.groups.rest, "m") == ["b"], "what was delivered is committed"
    assert asyncio.get_running_loop().time() - began_s < HANDOVER_S / 4
    assert heir_log.state.members.get("g").generation == generation


async def test_a_broker_that_has_released_its_groups_takes_none_again(cluster: Cluster) -> None:
    first, _ = await of_group(cluster)
    await first.hand_over()
    for refused in (
        first.groups.rest.heartbeat("g", "m"),
        first.groups.rest.join("g", "another", CONFIG),
        first.groups.rest.join("new", "m", CONFIG),
    ):
        with pytest.raises(Unavailable, match="shutting down"):
            await refused
    await first._coordinator.adopt()
    assert first.state.members.get("g").coordinator == first._membership.me.id


async def test_new_requests_wait_until_those_under_way_have_ended(cluster: Cluster) -> None:
    first, _ = await of_group(cluster)
    requests, loop = first.groups.rest.requests, asyncio.get_running_loop()

    async def polling() -> list[str]:
        with requests.serving():
            return await read(first.groups.rest, "m", wait_s=30.0)

    poll = asyncio.create_task(polling())
    await asyncio.sleep(SOON_S)
    began_s = loop.time()
    handing_over = asyncio.create_task(first.hand_over())
    while not requests._is_releasing:  # noqa: ASYNC110 - virtual time: polling is free
        await asyncio.sleep(0)
    await requests.until_decided()
    assert requests.is_released
    assert await poll == [], "a long poll ends without records"
    await handing_over
    assert loop.time() - began_s < SOON_S


async def test_endless_request_makes_next_coordinator_wait(cluster: Cluster) -> None:
    first, _ = await of_group(cluster, BY_HAND)
    loop = asyncio.get_running_loop()
    with first.groups.rest.requests.serving():
        began_s = loop.time()
        await first.hand_over()
        assert loop.time() - began_s == pytest.approx(RELEASE_S, abs=SOON_S)
    heir = first._coordinator.broker_of("g")
    heir_log = next(log for log in cluster.logs if log._membership.me.id == heir)
    await heir_log.refresh()
    began_s = loop.time()
    assert await read(heir_log.groups.rest, "m") == ["a"]
    assert loop.time() - began_s >= HANDOVER_S


async def test_term_of_third_broker_makes_next_coordinator_wait(cluster: Cluster) -> None:
    """The notice is of the term before; the broker of the term between may serve the member."""
    first, _ = await of_group(cluster, BY_HAND)
    heir = first._coordinator.broker_of("g")
    await first.hand_over()
    heir = first._coordinator.broker_of("g")
    heir_log = next(log for log in cluster.logs if log._membership.me.id == heir)
    between = next(log for log in cluster.logs if log not in (first, heir_log))
    await heir_log.refresh()
    loop = asyncio.get_running_loop()
    # Both take the group in the same moment.
    await asyncio.gather(between._coordinator.take("g"), heir_log._coordinator.take("g"))
    await heir_log.refresh()
    last = next(
        log
        for log in (heir_log, between)
        if log._membership.me.id == log.state.members.get("g").coordinator
    )
    began_s = loop.time()
    assert await read(last.groups.rest, "m") == ["a"]
    assert loop.time() - began_s >= HANDOVER_S / 2
