"""Lag in seconds at a bounded cost, and the share of a topic's hottest partition.

The ages are of unread records, of tails and of sealed records.
"""

from array import array
from collections.abc import AsyncIterator

import pytest

from tests.service.conftest import Broker as Served
from tests.support.clock import ManualClock
from tests.support.records import rows
from tidelog.service.telemetry.group_lags import GroupLags, LagTotals, any_topic
from tidelog.service.telemetry.lag_times import LagTimes, Unread
from tidelog.service.telemetry.partition_skew import WINDOW_S, PartitionShares, hottest
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.store.memory import MemoryStore

QUIET = LogSettings(poll_interval_s=60.0, is_sealing=False)


@pytest.fixture
async def log(clock: ManualClock) -> AsyncIterator[Broker]:
    log = await Broker.open(MemoryStore(), QUIET, clock=clock, name="b")
    yield log
    await log.close()


async def fill(log: Broker, *ages_ms: int) -> None:
    """A topic `t`, whose records have these ages, and a group `g` at offset 1."""
    await log.topics.create("t", 1, {"retention.ms": "-1"})
    topic, now_ms = log.state.topic("t"), log.clock.now_ms()
    for age_ms in ages_ms:
        part = [(0, Rows([now_ms - age_ms], [None], [b"v"]))]
        await log.records.append(topic, part, size=100, is_json=False)
    await log._log.submit(CommitOffsets("g", -1, [GroupOffset(topic.topic_id, 0, 1)]))


async def test_age_of_record_of_tail_needs_no_request(log: Broker) -> None:
    await fill(log, 9_000, 5_000, 0)
    times, topic = LagTimes(log), log.state.topic("t")
    assert times.seconds(topic, 0, 3) == 0.0
    assert times.seconds(topic, 0, 1) == pytest.approx(5.0, abs=0.5)
    assert times.seconds(topic, 0, 0) == pytest.approx(9.0, abs=0.5)


async def test_age_of_sealed_record_is_unknown_until_it_is_read(log: Broker) -> None:
    await fill(log, 9_000, 5_000, 0)
    await log.records.seal("t")
    log._log.tail.clear()
    times, topic = LagTimes(log), log.state.topic("t")
    assert times.seconds(topic, 0, 1) is None
    await times.look([Unread("t", 0, 1)], 0)
    assert times.seconds(topic, 0, 1) is None, "no reading was allowed"
    await times.look([Unread("gone", 0, 0), Unread("t", 7, 0), Unread("t", 0, 1)], 1)
    assert times.seconds(topic, 0, 1) == pytest.approx(5.0, abs=0.5)
    assert times.seconds(topic, 0, 0) is None
    lags = await GroupLags.of(log, "g", any_topic, times)
    assert (await lags.summary()).seconds == pytest.approx(5.0, abs=0.5)


async def test_sampler_reads_few_records_at_time(log: Broker) -> None:
    await fill(log, 9_000, 5_000)
    await log.records.seal("t")
    log._log.tail.clear()
    totals = LagTotals(log)
    await totals.refresh()
    assert (totals.groups["g"].total, totals.groups["g"].seconds) == (1, None)
    await totals.look(1)
    await totals.refresh()
    assert totals.groups["g"].seconds == pytest.approx(5.0, abs=0.5)


async def test_routes_show_lag_in_seconds(broker: Served, topic: str) -> None:
    log = broker.log
    stamp = log.clock.now_ms() - 60_000
    topic_state = log.state.topic(topic)
    part = [(0, Rows([stamp, stamp], [None] * 2, [b"v"] * 2))]
    await log.records.append(topic_state, part, size=200, is_json=False)
    await log._log.submit(CommitOffsets("g", -1, [GroupOffset(topic_state.topic_id, 0, 0)]))
    path = f"/v3/clusters/{log.identity.cluster_id}/consumer-groups/g"
    (lag,) = (await broker.http.get(f"{path}/lags")).json()["data"]
    assert 60 <= lag["lag_seconds"] < 3_600
    assert (await broker.http.get(f"{path}/lag-summary")).json()["lag_seconds"] >= 60
    (group,) = (await broker.http.get("/tidelog/v1/groups")).json()["data"]
    assert (group["total_lag"], group["members"]) == (2, 0)
    assert group["lag_seconds"] >= 60


@pytest.fixture
async def path(broker: Served) -> str:
    """Of a reset of group `g`, which has offset 5 of nine in `two`-0 and none in `two`-1."""
    log = broker.log
    await log.topics.create("two", 2, {})
    topic = log.state.topic("two")
    await log.records.append(topic, [(0, rows(*[b"v"] * 9))], size=900, is_json=False)
    await log._log.submit(CommitOffsets("g", -1, [GroupOffset(topic.topic_id, 0, 5)]))
    return f"{broker.v3}/consumer-groups/g/offsets:reset"


@pytest.mark.parametrize(
    ("body", "offsets"),
    [
        ({"to": "SHIFT", "shift_by": -2}, {0: 3}),
        ({"to": "SHIFT", "shift_by": -100}, {0: 0}),
        ({"to": "SHIFT", "shift_by": 100}, {0: 9}),
        (
            {
                "to": "OFFSETS",
                "offsets": [
                    {"topic_name": "two", "partition_id": partition, "offset": offset}
                    for partition, offset in ((0, 7), (1, 5))
                ],
            },
            {0: 7, 1: 0},
        ),
    ],
)
async def test_resets_by_shift_and_by_partition(
    broker: Served, path: str, body: dict[str, object], offsets: dict[int, int]
) -> None:
    answer = await broker.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    committed = broker.log.groups.committed_offsets("g").items()
    assert {place.partition: offset.offset for place, offset in committed} == offsets


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"to": "SHIFT"}, "shift_by is missing"),
        ({"to": "OFFSETS"}, "offsets are missing"),
        ({"to": "SHIFT", "shift_by": 1, "topic_name": "two"}, "two-1 has no committed offset"),
        ({"to": "LATEST"}, None),
    ],
)
async def test_resets_that_are_refused_change_nothing(
    broker: Served, path: str, body: dict[str, object], words: str | None
) -> None:
    answer = await broker.http.post(path if words else path.replace("/g/", "/new/"), json=body)
    assert answer.status_code == (422 if words else 404)
    assert (words or "name a topic") in answer.json()["message"]
    assert len(broker.log.groups.committed_offsets("g")) == 1


# -- shares of partitions


def test_hottest_partition_is_that_with_most_new_records() -> None:
    hot_partition = hottest(array("q", [0, 100]), array("q", [100, 1_900, 100, 0]))
    assert hot_partition is not None
    assert (hot_partition.partition, hot_partition.share, hot_partition.skew) == (1, 0.9, 3.6)
    assert hottest(array("q", [0, 0]), array("q", [10, 0])) is None, "too few records"
    assert hottest(array("q", [0]), array("q", [5_000])) is None, "one partition"


async def test_shares_are_of_last_whole_window(log: Broker, clock: ManualClock) -> None:
    await log.topics.create("t", 4, {})
    shares, topic = PartitionShares(log), log.state.topic("t")
    await shares.step()
    many = Rows([1] * 1_500, [None] * 1_500, [b"v"] * 1_500)
    await log.records.append(topic, [(2, many)], size=99_000, is_json=False)
    await shares.step()
    assert shares.hottest == {}, "the window is not over"
    clock.advance(WINDOW_S + 1)
    await shares.step()
    assert shares.hottest["t"].partition == 2
    assert shares.hottest["t"].skew == 4.0
    clock.advance(WINDOW_S + 1)
    await shares.step()
    assert shares.hottest == {}
