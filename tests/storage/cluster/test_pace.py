"""The pace is the cluster's: PUTs of each load, classes of requests, silent and old sequencers.

The real code in virtual time. A PUT takes 50 ms, a message 1 ms.
"""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call
from tests.support.properties import examples
from tests.support.records import fold, tail_values
from tests.support.vloop import run
from tidelog.storage.broker import Broker
from tidelog.storage.cluster import messages
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    ForwardDraft,
    decode_announcements,
    encode_announcements,
)
from tidelog.storage.cluster.sequencer import WAIT_SHARE, Sequencer
from tidelog.storage.core import object_keys
from tidelog.storage.core.log_settings import LogSettings, PaceSettings
from tidelog.storage.core.topic_configs import FLUSH_MS
from tidelog.storage.wal.commit_pace import LEAD_S, CommitBudget, CommitPace, Tick
from tidelog.storage.write.requests import AppendRequest, part_rows

PUT_S = 0.05
MESSAGES_S = 0.01
"""Generously, of all messages of one request."""
SPENT = PaceSettings(commits_per_minute=120, commits_burst=1)
INTERVAL_S = 0.5
TIMEOUT_S = SETTINGS.sequencer.handover_timeout_s


def settings_of(pace: PaceSettings) -> LogSettings:
    return SETTINGS._replace(pace=pace, poll_interval_s=60.0)


def paced(pace: PaceSettings) -> Cluster:
    return Cluster(settings_of(pace), latency=lambda _: PUT_S)


async def started(cluster: Cluster, brokers: int, old: PaceSettings | None = None) -> list[Broker]:
    """The sequencer first; with topic `t`. All but the last may have the pace `old`."""
    for number in range(brokers):
        is_old = old is not None and number < brokers - 1
        await cluster.start(**({"pace": old} if is_old else {}))
    await cluster.settled()
    first = cluster.sequencer() if brokers > 1 else cluster.logs[0]
    await first.topics.create("t", 2, {})
    for log in cluster.logs:
        await log._log.wal.refresh()
    return [first, *(log for log in cluster.logs if log is not first)]


async def append(log: Broker, linger_s: float | None = None, topic: str = "t") -> float:
    """Append a record; return the time of its ack."""
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    rows = logs.rows(f"{asked_s:g}")
    request = AppendRequest([part_rows(log.state.topic(topic), 0, rows)], 10, linger_s=linger_s)
    await log._log.append(request)
    return loop.time() - asked_s


def puts(*brokers: Broker) -> int:
    kinds = (object_keys.WAL, object_keys.DATA)
    return sum(logs.store_of(log).count("create", kind) for log in brokers for kind in kinds)


async def produce(
    brokers: list[Broker], seconds: float, pause_s: float, linger_s: float | None = None
) -> list[float]:
    """Append at all brokers each `pause_s`, in turn within it; return the times of acks."""

    async def of_one(index: int) -> list[float]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        await asyncio.sleep(index * pause_s / len(brokers))
        async with asyncio.TaskGroup() as group:
            tasks = []
            while loop.time() < end_s:
                tasks.append(group.create_task(append(brokers[index], linger_s)))
                await asyncio.sleep(pause_s)
        return [task.result() for task in tasks]

    all_acks_s = await asyncio.gather(*map(of_one, range(len(brokers))))
    return [ack_s for acks_s in all_acks_s for ack_s in acks_s]


async def counted(cluster: Cluster, brokers: int, pause_s: float) -> tuple[int, list[float]]:
    """The PUTs of a minute of load, and the times of acks."""
    all_brokers = await started(cluster, brokers)
    await produce(all_brokers, 3.0, pause_s)
    old_puts = puts(*all_brokers)
    acks_s = await produce(all_brokers, 60.0, pause_s)
    assert not sum(log._sequencer.counters.own_commits for log in all_brokers)
    return puts(*all_brokers) - old_puts, acks_s


@pytest.mark.parametrize("brokers", [1, 3, 10])
@pytest.mark.parametrize(
    ("pace", "commits"), [(SPENT, 120), (PaceSettings(flush_interval_ms=250), 240)]
)
async def test_a_minute_of_constant_load_has_the_puts_of_the_pace(
    pace: PaceSettings, commits: int, brokers: int
) -> None:
    """However many brokers there are. The first and the last entry are within a PUT of the ends."""
    async with paced(pace) as cluster:
        minute_puts, acks_s = await counted(cluster, brokers, 0.12 * brokers)
        assert commits - 1 <= minute_puts <= commits + 2
        interval_s = 60 / commits
        assert max(acks_s) <= interval_s + LEAD_S + 2 * PUT_S + MESSAGES_S
        assert sum(acks_s) / len(acks_s) <= interval_s / 2 + LEAD_S + PUT_S + MESSAGES_S


async def test_a_sporadic_request_is_committed_at_once_on_any_broker() -> None:
    async with paced(SPENT._replace(commits_burst=3)) as cluster:
        brokers = await started(cluster, 3)
        await asyncio.sleep(10)
        for log in brokers * 2:
            assert await append(log) <= PUT_S + MESSAGES_S
            await asyncio.sleep(1.0)


async def test_saved_commits_make_a_burst_quick() -> None:
    async with paced(SPENT._replace(commits_burst=100)) as cluster:
        brokers = await started(cluster, 3)
        await asyncio.sleep(60)
        old_puts = puts(*brokers)
        acks_s = await produce(brokers, 4.0, 0.03)
        # A PUT of others, its broker's flush, a PUT of others, its own.
        assert max(acks_s) <= 4 * PUT_S + MESSAGES_S
        assert 70 <= puts(*brokers) - old_puts <= 100
        await produce(brokers, 10.0, 0.03)  # spends what is left
        old_puts = puts(*brokers)
        await produce(brokers, 10.0, 0.03)
        assert 19 <= puts(*brokers) - old_puts <= 22


async def test_a_later_sequencer_has_the_budget_that_the_first_one_left() -> None:
    async with paced(SPENT._replace(commits_burst=30)) as cluster:
        first, *others = await started(cluster, 3)
        await produce(others, 10.0, 0.03)
        await cluster.kill(first)
        old_puts = puts(*others)
        await produce(others, 10.0, 0.03)
        assert puts(*others) - old_puts <= 25, "not a new burst of 30"


# -- classes


async def test_patient_requests_go_with_others_for_nothing() -> None:
    async with paced(SPENT) as cluster:
        brokers = await started(cluster, 3)
        await asyncio.sleep(5)
        old_puts = puts(*brokers)
        acks_s = await produce(brokers, 20.0, 0.2, 4.0)
        assert puts(*brokers) - old_puts <= 20
        assert 3.0 <= max(acks_s) <= 4.0 + 2 * PUT_S + MESSAGES_S
        prompt = asyncio.create_task(produce(brokers, 20.0, 0.2))
        await asyncio.sleep(2)
        old_puts = puts(*brokers)
        await produce(brokers, 10.0, 0.2, 4.0)
        assert puts(*brokers) - old_puts <= 30, "2 a second, of the prompt requests"
        await prompt


async def test_i12_linger_0_begins_an_entry_at_once_without_a_token() -> None:
    async with paced(SPENT) as cluster:
        brokers = await started(cluster, 3)
        busy = asyncio.create_task(produce(brokers, 20.0, 0.05))
        await asyncio.sleep(5)
        for log in brokers * 3:
            assert await append(log, 0.0) <= 3 * PUT_S + 2 * MESSAGES_S
            await asyncio.sleep(0.7)
        assert brokers[0]._sequencer.pace.early_entries
        # Early entries delay the others, by one interval at most.
        assert max(await busy) <= 2 * INTERVAL_S + 3 * PUT_S + MESSAGES_S


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("linger_s", [0.0, 0.4])
async def test_i12_a_draft_at_the_sequencer_keeps_no_impatient_request_waiting(
    index: int, linger_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flush of a broker is under way at a time, and its draft may wait for its turn."""
    monkeypatch.setattr(CommitPace, "first_close_s", lambda self: -1.0)
    async with paced(SPENT._replace(commits_per_minute=20)) as cluster:
        brokers = await started(cluster, 3)
        await asyncio.sleep(3)
        await append(brokers[2])
        patient = asyncio.create_task(append(brokers[index]))
        await asyncio.sleep(0.1)
        assert not patient.done()
        assert await append(brokers[index], linger_s) <= linger_s + 2 * PUT_S + 2 * MESSAGES_S
        assert await patient <= linger_s + 0.1 + PUT_S + 2 * MESSAGES_S


async def test_flush_ms_is_the_class_of_a_topic_and_linger_has_precedence() -> None:
    async with paced(SPENT._replace(commits_burst=100)) as cluster:
        (log,) = await started(cluster, 1)
        await log.topics.create("slow", 1, {FLUSH_MS: "2000"})
        await log.topics.create("kafka", 1, {FLUSH_MS: str(2**63 - 1)})
        await log.topics.create("slowest", 1, {FLUSH_MS: str(2**62)})
        await asyncio.sleep(30)
        assert await append(log, topic="kafka") == pytest.approx(PUT_S)
        assert await append(log, topic="slow") == pytest.approx(2 + PUT_S)
        assert await append(log, 0.5, "slow") == pytest.approx(0.5 + PUT_S)
        assert await append(log, topic="slowest") == pytest.approx(10 + PUT_S)


async def test_a_class_leaves_most_of_the_answer_timeout_to_the_commit() -> None:
    writer = SETTINGS.writer._replace(answer_timeout_s=3.0)
    async with Cluster(settings_of(SPENT)._replace(writer=writer)) as cluster:
        (log,) = await started(cluster, 1)
        assert await append(log, 10.0) == pytest.approx(1.0)


async def test_the_least_interval_is_shorter_than_no_class() -> None:
    async with paced(PaceSettings(flush_interval_ms=400)) as cluster:
        (log,) = await started(cluster, 1)
        old_puts = puts(log)
        await produce([log], 10.0, 0.02, 0.0)
        assert puts(log) - old_puts <= 27


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 3),
        st.integers(0, 2),
        st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 0.7, 2.0])),
    ),
    min_size=1,
    max_size=25,
)


@examples(25)
@given(REQUESTS, st.sampled_from([1, 3]), st.sampled_from([1, 4]), st.integers(0, 9))
def test_i12_no_request_waits_longer_than_its_class_and_the_puts(
    requests: list[tuple[float, int, float | None]], brokers: int, burst: int, seed: int
) -> None:
    """A flush of its broker and an entry of the sequencer may be under way, then comes its own."""
    draws = random.Random(seed)

    def latency(call: Call) -> float:
        return draws.uniform(0.2, 1) * PUT_S

    async def main() -> None:
        settings = settings_of(SPENT._replace(commits_burst=burst))
        async with Cluster(settings, latency=latency) as cluster:
            all_brokers = await started(cluster, brokers)

            async def one(after_s: float, index: int, linger_s: float | None) -> None:
                await asyncio.sleep(after_s)
                took_s = await append(all_brokers[index % brokers], linger_s)
                class_s = INTERVAL_S if linger_s is None else linger_s
                # Without a class: after the flush under way, which may wait for its turn, too.
                class_s += INTERVAL_S if linger_s is None else 0
                assert took_s <= class_s + 3 * PUT_S + 2 * MESSAGES_S, linger_s

            await asyncio.gather(*(one(*request) for request in requests))

    run(main)


# -- without a tick, or with a wrong one


class _OldForward(msgspec.Struct, array_like=True):
    origin: object
    commits: list
    chunks: list
    body: bytes


class _OldAnnouncement(msgspec.Struct, array_like=True):
    seq: int
    header: bytes = b""
    body: bytes = b""


def test_brokers_of_earlier_versions_read_the_messages_and_write_theirs() -> None:
    tick = Tick(100, 250, 3)
    (old,) = msgspec.msgpack.decode(
        encode_announcements([EntryAnnouncement(7, b"h", b"b", tick)]), type=list[_OldAnnouncement]
    )
    assert old == _OldAnnouncement(7, b"h", b"b")
    message = msgspec.msgpack.encode([_OldAnnouncement(7, b"h", b"b")])
    assert decode_announcements(message) == [EntryAnnouncement(7, b"h", b"b", None)]
    draft = ForwardDraft(messages.DraftId("o", 1, 0), [], [], b"", 300)
    old_draft = msgspec.msgpack.decode(msgspec.msgpack.encode(draft), type=_OldForward)
    message = msgspec.msgpack.encode(old_draft)
    assert messages.decode_forwarded(message).wait_ms == -1


@pytest.fixture
def old_brokers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of brokers whose messages have no tick and no wait, and which look at none."""
    names: set[str] = set()
    wait, on_tick, tick = Sequencer._wait_and_timeout_s, CommitPace.on_tick, CommitPace.tick

    def is_old(pace: CommitPace) -> bool:
        return pace in olds

    olds: set[CommitPace] = set()
    original = Broker.__init__

    def init(self: Broker, *arguments: object, **named: object) -> None:
        original(self, *arguments, **named)  # type: ignore[arg-type]
        if self.name in names:
            olds.add(self._sequencer.pace)

    def old_wait(self: Sequencer) -> tuple[float, float]:
        return (-0.001, TIMEOUT_S) if is_old(self.pace) else wait(self)

    monkeypatch.setattr(Broker, "__init__", init)
    monkeypatch.setattr(Sequencer, "_wait_and_timeout_s", old_wait)
    monkeypatch.setattr(
        CommitPace, "on_tick", lambda self, it: None if is_old(self) else on_tick(self, it)
    )
    monkeypatch.setattr(
        CommitPace, "tick", lambda self, *s: None if is_old(self) else tick(self, *s)
    )
    return names


async def test_drafts_of_an_old_broker_wait_for_a_part_of_its_timeout(
    old_brokers: set[str],
) -> None:
    """A roll: some brokers know no tick. They are never kept waiting until they suspect."""
    slow = PaceSettings(commits_per_minute=6, commits_burst=1)  # 10 s, far above the timeout
    old_brokers.update({"b1", "b2"})
    async with paced(slow) as cluster:
        brokers = await started(cluster, 3, PaceSettings(0))
        assert brokers[0].name == "b3", "the sequencer knows ticks"
        for _ in range(5):
            for log in brokers[1:]:
                took_s = await append(log)
                assert took_s <= TIMEOUT_S * WAIT_SHARE + 3 * PUT_S + MESSAGES_S
        assert not sum(log._sequencer.counters.unanswered for log in brokers)


async def test_an_old_sequencer_takes_drafts_of_brokers_that_know_ticks(
    old_brokers: set[str],
) -> None:
    old_brokers.update({"b1", "b2", "b3"})
    async with paced(SPENT._replace(commits_per_minute=0)) as cluster:
        first, *others = await started(cluster, 3)
        old_brokers.clear()
        acks_s = await produce(others, 5.0, 0.1)
        assert max(acks_s) <= 3 * PUT_S + MESSAGES_S
        assert not sum(log._sequencer.counters.own_commits for log in others)
        assert first._sequencer.counters.taken


async def test_a_sequencer_that_never_ticks_is_suspected_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with paced(SPENT) as cluster:
        first, *others = await started(cluster, 3)
        acks_s = await produce(others, 3.0, 0.1)
        wait, is_over = Sequencer._wait_until_due, asyncio.Event()

        async def silent(self: Sequencer) -> None:
            if self is first._sequencer:
                await is_over.wait()
            await wait(self)

        monkeypatch.setattr(Sequencer, "_wait_until_due", silent)
        # The flush under way: timeout, interval, a read and a race; then the next one.
        bound_s = TIMEOUT_S + INTERVAL_S + INTERVAL_S + 6 * PUT_S + MESSAGES_S
        try:
            late_acks_s = [await append(log) for log in others]
            late_acks_s += await produce(others, 5.0, 0.1)
            assert max(late_acks_s) <= bound_s
            for log in others:
                assert log._sequencer.announcer.counters.suspected
            state, _ = await fold(cluster.store, "c0ffee")
            values = await tail_values(cluster.store, state, "t", 0)
            assert len(values) == len(acks_s) + len(late_acks_s), "each once"
        finally:
            is_over.set()


async def test_a_broker_that_never_aligns_costs_latency_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with paced(SPENT) as cluster:
        brokers = await started(cluster, 3)
        monkeypatch.setattr(CommitPace, "first_close_s", lambda self: -1.0)
        await produce(brokers, 3.0, 0.1)
        old_puts = puts(*brokers)
        acks_s = await produce(brokers, 30.0, 0.1)
        assert puts(*brokers) - old_puts <= 62
        assert INTERVAL_S < max(acks_s) <= 2 * INTERVAL_S + 2 * PUT_S + MESSAGES_S
        assert not sum(log._sequencer.counters.unanswered for log in brokers)


async def test_a_budget_that_is_never_refilled_still_lets_entries_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait for a token is at most that of one token, whatever the tokens are."""
    async with paced(SPENT._replace(commits_burst=3)) as cluster:
        brokers = await started(cluster, 3)
        monkeypatch.setattr(CommitBudget, "tokens", lambda self, now_s: 0.0)
        acks_s = await produce(brokers, 10.0, 0.1)
        assert max(acks_s) <= 3 * INTERVAL_S + 3 * PUT_S + MESSAGES_S
