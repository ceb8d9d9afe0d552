"""Vitals: what was added in each step, sums of brokers, latencies out of size classes."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.clock import ManualClock
from tests.support.records import rows
from tidelog.service.server.router import ACK_LABELS
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.rates import (
    NAMES,
    REMEMBERED_MAX,
    STEP_S,
    STEPS,
    BrokerRates,
    RateSampler,
    Step,
    quantile_s,
    summed,
)
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.histogram import SECONDS
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore

ACKS = [0] * (len(SECONDS) + 1)


def step(number: int, first: float = 0.0, ack: int = 0) -> Step:
    added = [0.0] * len(NAMES)
    added[0] = first
    return Step(number, added, [ack, *ACKS[1:]])


@pytest.fixture
async def log(clock: ManualClock) -> AsyncIterator[Broker]:
    store = MeteredStore(MemoryStore(), clock)
    log = await Broker.open(store, LogSettings(is_sealing=False), clock=clock, name="b")
    yield log
    await log.close()


def broker(*steps: Step) -> BrokerRates:
    none = step(0)
    return BrokerRates(
        "i", "n", 2, "a", 1, 0, "v", 0, True, "n", 1, 0.0, 0, 1, 5.0, none, list(steps)
    )


def test_steps_of_brokers_are_added_up_by_their_numbers() -> None:
    first, second = (step(7, 1, 1), step(8, 2), step(9, 6)), (step(8, 3, 4), step(9, 5))
    both = summed([broker(*first), broker(*second)])
    assert [(total.number, total.added[0], total.acks[0]) for total in both] == [
        (7, 1, 1),
        (8, 5, 4),
        (9, 11, 0),
    ]
    assert summed([]) == []


def test_step_that_not_all_are_over_with_waits_for_them_and_not_for_silent() -> None:
    before, late = [step(7, 1), step(8, 1)], [step(7, 1)]
    assert [total.number for total in summed([broker(*before), broker(*late)])] == [7]
    assert [total.number for total in summed([broker(*before), broker()])] == [7, 8]
    newest = [step(number, 1) for number in range(7, 20)]
    assert [total.number for total in summed([broker(*newest), broker(*late)])][-1] == 18


def test_adding_up_changes_no_input() -> None:
    own = step(8, 2)
    summed([broker(own), broker(step(8, 3))])
    assert own.added[0] == 2


def test_quantile_is_in_its_bucket() -> None:
    counts = list(ACKS)
    assert quantile_s(counts, 0.5) is None
    counts[3] = 100  # of those up to 0.01 s, beyond 0.005
    assert quantile_s(counts, 0.5) == pytest.approx(0.0075)
    assert quantile_s(counts, 1.0) == pytest.approx(0.01)
    counts[-1] = 100
    assert quantile_s(counts, 0.99) == SECONDS[-1], "beyond the last bound the value is unknown"


async def test_step_has_what_was_added_since_one_before(log: Broker) -> None:
    http = HttpCounters()
    vitals = RateSampler(log, http, "1", ack_labels=ACK_LABELS)
    await log.topics.create("t", 1, {})
    http.add_records_in(3, 300, "t")
    http.observe("produce", 200, 0.004)
    vitals.step()
    http.add_records_in(4, 400, "t")
    for _ in range(STEPS + 5):
        vitals.step()
    own = vitals.own()
    assert len(own.steps) == STEPS, "the ring is bounded"
    vitals = RateSampler(log, http, "1", ack_labels=ACK_LABELS)
    http.add_records_in(5, 500, "t")
    http.observe("records", 200, 0.004)
    vitals.step()
    (only,) = vitals.own().steps
    said = dict(zip(NAMES, only.added, strict=True))
    assert (said["records_in"], said["bytes_in"], said["requests"]) == (5, 500, 1)
    assert sum(only.acks) == 1
    assert msgspec.msgpack.decode(vitals.encoded(), type=BrokerRates) == vitals.own()


async def test_peer_of_another_version_is_left_out(log: Broker) -> None:
    other = broker(step(8, 2))
    longer = msgspec.structs.replace(other, steps=[Step(8, [1.0] * (len(NAMES) + 1), ACKS)])

    async def peers() -> list[bytes]:
        shapes = (other, longer, {"name": "old"})
        return [b"\xff", b"", *(msgspec.msgpack.encode(shape) for shape in shapes)]

    rates = await RateSampler(log, HttpCounters(), "1", ask=peers, ack_labels=()).all()
    assert [broker_rates.name for broker_rates in rates] == ["b", "n"]


async def test_past_of_broker_stays_when_it_ends(log: Broker, clock: ManualClock) -> None:
    """For an hour; a broker that answers again is not absent."""
    other = broker(step(7, 1), step(8, 2))
    live = [other]

    async def peers() -> list[bytes]:
        return [msgspec.msgpack.encode(rates) for rates in live]

    vitals = RateSampler(log, HttpCounters(), "1", ask=peers, ack_labels=())
    assert vitals.absent(await vitals.all()) == []
    asked_s = clock.boot_s()
    clock.advance(1000)
    assert vitals.absent(await vitals.all()) == []
    live.clear()
    for _ in range(2):
        clock.advance(1700)
        answered = await vitals.all()
        assert [rates.name for rates in answered] == ["b"]
        (absent,) = vitals.absent(answered)
        assert (absent.rates, absent.answered_s) == (other, asked_s + 1000)
        sums = summed([*answered, absent.rates])
        assert [(total.number, total.added[0]) for total in sums] == [(7, 1), (8, 2)]
    clock.advance(300)
    assert vitals.absent(await vitals.all()) == []
    live.append(other)
    assert vitals.absent(await vitals.all()) == []


async def test_remembered_answers_are_bounded(log: Broker) -> None:
    others = [msgspec.structs.replace(broker(step(8)), id=f"i{number}") for number in range(50)]

    async def peers() -> list[bytes]:
        return [msgspec.msgpack.encode(rates) for rates in others]

    vitals = RateSampler(log, HttpCounters(), "1", ask=peers, ack_labels=())
    await vitals.all()
    assert len(vitals.absent([])) == REMEMBERED_MAX


async def test_lag_over_time_is_of_groups_that_are_there(log: Broker) -> None:
    topic = await log.topics.create("t", 1, {})
    assert topic is not None
    vitals = RateSampler(log, HttpCounters(), "1", ack_labels=())
    await log.records.append(topic, [(0, rows(b"a", b"b", b"c"))], size=3, is_json=False)
    commit = CommitOffsets("g", -1, [GroupOffset(topic.topic_id, 0, 1)])
    await log.records.transact([], [commit], size=0, is_json=False)
    await vitals.lags.refresh()
    vitals.step()
    past = vitals.lag_history("g")
    assert past.topics == {"t": [2]}
    assert past.step_ms == STEP_S * 1000
    await log.groups.delete("g")
    await vitals.lags.refresh()
    vitals.step()
    assert vitals.lag_history("g").topics == {}
