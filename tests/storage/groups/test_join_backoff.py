"""Members that come and go: their joins wait, and the joins of all others do not."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from tests.support.instances import CONFIG, group_of, joined, read, virtual
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.groups import coordinator
from tidelog.storage.groups.join_backoff import (
    CLIENTS_MAX,
    LIFE_S,
    PAUSE_S,
    SHORT_LIVES_MAX,
    SILENT_S,
    WINDOW_S,
    ClientId,
    Life,
    MemberHeld,
    ShortLives,
    client_of,
)
from tidelog.storage.groups.rest_groups import RestGroups

HOST = "10.0.0.7"
LOOP = ClientId("", "User:etl", "loop", HOST)


def crash_loop(seconds: float, life_s: float = 1.0, pause_s: float = 1.0) -> list[float]:
    """The times at which the joins of a client are taken that tries again after `pause_s`."""
    lives, now_s, join_times = ShortLives(), 0.0, []
    while now_s < seconds:
        if lives.hold(LOOP, "m", now_s) is None:
            join_times.append(now_s)
            lives.ended(LOOP, Life(now_s, now_s + life_s))
            now_s += life_s
        now_s += pause_s
    return join_times


def test_a_crash_loop_joins_five_times_and_then_twice_a_minute_for_as_long_as_it_lasts() -> None:
    join_times = crash_loop(3600)
    assert join_times[:SHORT_LIVES_MAX] == [0, 2, 4, 6, 8]
    later = [next_s - join_s for join_s, next_s in itertools.pairwise(join_times[4:])]
    assert min(later) >= PAUSE_S
    assert len(join_times) == pytest.approx(3600 / PAUSE_S + SHORT_LIVES_MAX, rel=0.05)


def test_a_job_of_each_minute_and_kubernetes_own_pauses_are_never_held() -> None:
    assert crash_loop(3600, life_s=5, pause_s=55) == [60.0 * n for n in range(60)]
    lives, now_s = ShortLives(), 0.0
    for pause_s in (10, 20, 40, 80, 160, *[300] * 10):
        assert lives.hold(LOOP, "m", now_s) is None
        lives.ended(LOOP, Life(now_s, now_s + 1))
        now_s += 1 + pause_s


def test_long_lives_are_not_counted_and_one_client_does_not_hold_another() -> None:
    lives = ShortLives()
    for _ in range(50):
        lives.ended(LOOP, Life(0.0, LIFE_S))
    assert lives.hold(LOOP, "m", LIFE_S) is None
    for number in range(SHORT_LIVES_MAX):
        lives.ended(LOOP, Life(100.0 + number, 101.0 + number))
    held_member = lives.hold(LOOP, "m9", 106.0)
    assert held_member == (LOOP, "m9", SHORT_LIVES_MAX, 104.0 + PAUSE_S - 106.0)
    assert lives.held(106.0) == [held_member]
    assert lives.refused == 1
    for other in (
        LOOP._replace(principal="User:x"),
        LOOP._replace(client_id="x"),
        LOOP._replace(host="10.0.0.8"),
        ClientId("pod-1", "", "", ""),
    ):
        assert lives.hold(other, "m", 106.0) is None
    assert lives.held(106.0 + PAUSE_S) == []
    assert lives.hold(LOOP, "m", 106.0 + WINDOW_S) is None


def test_so_many_silent_members_count_as_short_lives() -> None:
    lives = ShortLives()
    assert lives.hold(LOOP, "m", 0.0, silent=SHORT_LIVES_MAX - 1) is None
    assert lives.hold(LOOP, "m", 1.0, silent=SHORT_LIVES_MAX) is None  # the first in PAUSE_S
    assert lives.hold(LOOP, "m", 2.0, silent=SHORT_LIVES_MAX) is not None
    assert lives.hold(LOOP, "m", 2.0, silent=0) is None  # they have read again


def test_i10_the_oldest_of_too_many_clients_is_forgotten() -> None:
    lives = ShortLives()
    for number in range(CLIENTS_MAX + 1):
        for _ in range(50):
            lives.ended(LOOP._replace(host=str(number)), Life(0.0, 1.0))
    assert len(lives._clients) == CLIENTS_MAX
    assert lives.hold(LOOP._replace(host="0"), "m", 2.0) is None
    assert lives.hold(LOOP._replace(host="1"), "m", 2.0) is not None
    assert max(len(client.ends_s) for client in lives._clients.values()) == 2 * SHORT_LIVES_MAX


def test_a_static_id_identifies_a_client_wherever_it_runs() -> None:
    config = MemberConfig(principal="User:a", client_id="c")
    assert client_of(config, "pod-1", HOST) == client_of(MemberConfig(), "pod-1", "10.0.0.8")
    assert client_of(config, "", HOST) == ("", "User:a", "c", HOST)
    assert str(client_of(config, "pod-1", HOST)) == "static member 'pod-1'"
    assert str(client_of(config, "", HOST)) == f"the client at {HOST} (client.id 'c', User:a)"
    assert (
        str(client_of(MemberConfig(), "", "")) == "the client at an unknown address (no client.id)"
    )


# -- at the coordinator


async def life(consumers: RestGroups, member: str, *, leaves: bool = True, **fields: str) -> None:
    await consumers.join("g", member, CONFIG, host=HOST, **fields)
    await consumers.subscribe("g", member, ["t"])
    await read(consumers, member)
    if leaves:
        await consumers.leave("g", member)


async def churn(consumers: RestGroups, seconds: int, *, leaves: bool = True) -> int:
    """A crash loop that tries each second, beside a member that reads; the refused joins."""
    refused = 0
    for number in range(seconds):
        try:
            await life(consumers, f"m{number}", leaves=leaves)
        except MemberHeld:
            refused += 1
        await read(consumers, "steady")
        await asyncio.sleep(1)
    return refused


@virtual
async def test_a_crash_loop_costs_the_others_few_generations() -> None:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.log, "warning", lambda form, *args: lines.append(form % args))
        await _one_loop()
    assert len([line for line in lines if f"the client at {HOST}" in line]) == 1


async def _one_loop() -> None:
    async with group_of(4, "steady") as (log, consumers):
        group = log.state.members.get("g")
        old_generation = group.generation
        refused = await churn(consumers, 60)
        assert refused > 50
        assert group.generation - old_generation <= 2 * (SHORT_LIVES_MAX + 2)
        old_generation = group.generation
        await churn(consumers, 240)
        assert group.generation - old_generation <= 4 * 4
        with pytest.raises(MemberHeld) as refusal:
            await life(consumers, "m9")
        assert str(refusal.value).startswith(
            f"the client at {HOST} (no client.id) joined and left "
        )
        assert 0 < refusal.value.retry_after_ms <= PAUSE_S * 1000
        (held_member,) = consumers.members.held("g")
        assert (held_member.client.host, held_member.member_id) == (HOST, "m9")


@virtual
async def test_a_crash_loop_that_never_leaves_is_held_while_its_sessions_last() -> None:
    async with group_of(4, "steady") as (log, consumers):
        group = log.state.members.get("g")
        config = CONFIG.__class__(auto_offset_reset="earliest")  # sessions of minutes
        refused = Counter[bool]()
        for number in range(120):
            try:
                await consumers.join("g", f"m{number}", config, host=HOST)
                await consumers.subscribe("g", f"m{number}", ["t"])
                refused[number > SILENT_S + 10] += 0
            except MemberHeld:
                refused[number > SILENT_S + 10] += 1
            await read(consumers, "steady")
            await asyncio.sleep(1)
        assert refused[True] >= 120 - SILENT_S - 10 - 4
        assert group.generation <= SILENT_S + 12


@virtual
async def test_fifty_members_that_start_together_and_a_roll_out_are_not_held() -> None:
    async with group_of(4) as (_, consumers):
        names = [f"old{number}" for number in range(50)]
        await asyncio.gather(*(life(consumers, name, leaves=False) for name in names))
        for _ in range(10):
            await asyncio.sleep(8)
            await asyncio.gather(*(read(consumers, name) for name in names))
        for number, name in enumerate(names):
            await consumers.leave("g", name)
            await life(consumers, f"new{number}", leaves=False)
        assert consumers.members.held("g") == []


@virtual
async def test_a_client_that_is_alone_and_one_that_never_subscribes_are_not_held() -> None:
    async with group_of(1) as (_, consumers):
        for number in range(20):
            await life(consumers, f"m{number}")
        await joined(consumers, "steady")
        for number in range(20):
            await consumers.join("g", f"n{number}", CONFIG, host="10.0.0.8")
            await consumers.leave("g", f"n{number}")
        with pytest.raises(MemberHeld):
            await life(consumers, "m20")


@virtual
async def test_a_static_member_that_takes_its_place_again_is_not_held() -> None:
    async with group_of(2, "steady") as (log, consumers):
        for number in range(20):
            await life(consumers, f"m{number}", leaves=False, instance_id="pod")
        old_generation = log.state.members.get("g").generation
        for number in range(20, 20 + SHORT_LIVES_MAX):
            await life(consumers, f"m{number}", instance_id="pod")
        with pytest.raises(MemberHeld, match="static member 'pod' joined and left 5 times"):
            await life(consumers, "m30", instance_id="pod")
        assert log.state.members.get("g").generation > old_generation


@virtual
async def test_a_member_that_changes_its_subscription_all_the_time_is_held() -> None:
    async with group_of(2, "steady") as (log, consumers):
        await log.topics.create("u", 1, {})
        await consumers.join("g", "m", CONFIG, host=HOST)
        await consumers.subscribe("g", "m", ["t"])
        for _ in range(20):
            await consumers.subscribe("g", "m", ["t", "t"])  # no change
        for number in range(SHORT_LIVES_MAX):
            await consumers.subscribe("g", "m", ["t", "u"] if number % 2 else ["u"])
        old_generation = log.state.members.get("g").generation
        with pytest.raises(MemberHeld, match="'m' must wait 30 s"):
            await consumers.subscribe("g", "m", ["t", "u"])
        await consumers.subscribe("g", "m", [])  # to end it is never refused
        assert log.state.members.get("g").generation == old_generation + 1
        await asyncio.sleep(1)
        with pytest.raises(MemberHeld):
            await consumers.subscribe("g", "m", ["t"])
        for _ in range(6):
            await asyncio.sleep(5)
            await consumers.heartbeat("g", "m")
            await read(consumers, "steady")
        await consumers.subscribe("g", "m", ["t"])


@virtual
async def test_the_next_coordinator_counts_from_zero() -> None:
    async with group_of(2, "steady") as (_, consumers):
        for number in range(SHORT_LIVES_MAX):
            await life(consumers, f"m{number}")
        with pytest.raises(MemberHeld):
            await life(consumers, "b")
        del consumers.coordinator.groups["g"]
        await read(consumers, "steady")
        await life(consumers, "b")


def test_a_random_mix_of_clients_holds_only_those_with_short_lives() -> None:
    draw = random.Random(7)
    lives, good = ShortLives(), [LOOP._replace(host=f"10.1.0.{n}") for n in range(20)]
    bad = [LOOP._replace(host=f"10.2.0.{n}") for n in range(3)]
    refused: Counter[ClientId] = Counter()
    now_s = 0.0
    while now_s < 1800:
        now_s += draw.expovariate(2)
        name = draw.choice([*good, *bad, *bad])
        if lives.hold(name, "m", now_s) is not None:
            refused[name] += 1
        else:
            length = draw.uniform(0, 20) if name in bad else draw.uniform(LIFE_S, 900)
            lives.ended(name, Life(now_s, now_s + length))
    assert set(refused) == set(bad)
