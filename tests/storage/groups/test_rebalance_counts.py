"""Rebalances of a group as its coordinator counts them, and the time until all members read."""

import asyncio

import pytest

from tests.support.instances import CONFIG, group_of, joined, read, virtual
from tidelog.storage.core.actions import ExpireMember, LeaveGroup, Subscribe
from tidelog.storage.groups.rebalance_counts import Rebalances, reason_of
from tidelog.storage.state.group_state import Inputs

ONE = Inputs({"m:x": ["t"]}, {"t": 2})
TWO = Inputs({"m:x": ["t"], "m:y": ["t"]}, {"t": 2})
GONE = LeaveGroup("g", "y")
EXPIRED = ExpireMember("g", "z", 1)


@pytest.mark.parametrize(
    ("old_inputs", "new_inputs", "actions", "reason"),
    [
        (ONE, TWO, [Subscribe("g", "y", ["t"])], "join"),
        (TWO, ONE, [GONE], "leave"),
        (TWO, ONE, [EXPIRED, GONE], "expiry"),
        (TWO, ONE, [Subscribe("g", "y", [])], "subscription"),
        (ONE, Inputs({"m:x": ["u"]}, {"u": 1}), [Subscribe("g", "x", ["u"])], "subscription"),
        (ONE, Inputs({"m:x": ["t"]}, {"t": 3}), [], "partitions"),
        (ONE, Inputs({"m:x": []}, {}), [], "partitions"),
        (ONE, Inputs({"m:y": ["t"]}, {"t": 2}), [EXPIRED], "expiry"),
    ],
)
def test_the_reason_follows_from_what_changed(old_inputs, new_inputs, actions, reason) -> None:
    assert reason_of(old_inputs, new_inputs, actions) == reason


def test_the_time_lasts_until_the_last_member_has_read() -> None:
    rebalances = Rebalances(Inputs({}, {}), 0)
    rebalances.see(ONE, 0, ["x"], [], 5.0)
    assert (rebalances.seconds(9.0), dict(rebalances.counts)) == (0.0, {})
    rebalances.see(TWO, 1, ["x", "y"], [], 10.0)
    rebalances.has_read("x", 11.0)
    assert rebalances.seconds(12.0) == 2.0
    rebalances.see(ONE, 2, ["x"], [GONE], 13.0)  # before all had read: the time goes on
    assert rebalances.seconds(14.0) == 4.0
    rebalances.has_read("x", 15.0)
    assert rebalances.seconds(99.0) == 5.0
    rebalances.see(TWO, 3, ["x", "y"], [], 100.0)
    rebalances.has_read("x", 101.0)
    rebalances.see(TWO, 3, ["x", "y2"], [], 102.0)  # a static member: another id, no rebalance
    assert rebalances.seconds(200.0) == 2.0
    rebalances.see(Inputs({}, {}), 4, [], [GONE], 300.0)
    assert rebalances.seconds(999.0) == 0.0
    assert dict(rebalances.counts) == {"join": 2, "leave": 2}


@virtual
async def test_a_coordinator_counts_the_rebalances_of_its_groups() -> None:
    async with group_of(4, "x") as (log, consumers):
        led = consumers.members.group("g").rebalances
        await joined(consumers, "y")
        assert led.waiting == {"x", "y"}
        await asyncio.sleep(1)
        await read(consumers, "y")
        await asyncio.sleep(2)
        await read(consumers, "x")
        assert led.seconds(log.clock.boot_s()) == pytest.approx(3.0, abs=0.1)
        waiting = asyncio.create_task(read(consumers, "x", wait_s=20))
        await asyncio.sleep(1)
        await consumers.leave("g", "y")  # wakes the waiting read, which reads in the new generation
        await asyncio.sleep(0.1)
        assert not led.waiting
        assert led.seconds(log.clock.boot_s()) < 0.2
        await log.topics.add_partitions("t", 5)
        await joined(consumers, "silent", config=CONFIG)
        for _ in range(20):
            await asyncio.sleep(1)
            await read(consumers, "x")
        await waiting
        assert dict(led.counts) == {"join": 3, "leave": 1, "partitions": 1, "expiry": 1}
