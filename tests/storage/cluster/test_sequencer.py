"""Many brokers, one log: hand-overs, and everything that can become of one (I1 to I6).

The real code on virtual time; the network loses, delays and breaks off by plan.
"""

import asyncio
import logging

import pytest

from tests.support import logs
from tests.support.cluster import SETTINGS, Broken, Cluster
from tests.support.faults import Call, Fault, Script
from tests.support.maintenance import caring
from tests.support.records import fold, found_cluster, tail_values
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.upgrade import LevelChange, upgrade
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.messages import ForwardRefused
from tidelog.storage.cluster.peer_beats import AGREED_S
from tidelog.storage.cluster.sequencer import SKIPPED
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.applied_drafts import ORIGIN_WINDOW_MS
from tidelog.storage.wal.tail_objects import TailObjects

CLUSTER_ID = "c0ffee"


async def three(cluster: Cluster) -> tuple[Broker, Broker, Broker]:
    """The sequencer and two others, with topic `t`."""
    for _ in range(3):
        await cluster.start()
    await cluster.settled()
    first = cluster.sequencer()
    await first.topics.create("t", 2, {})
    for log in cluster.logs:
        await log._log.wal.refresh()
    broker_a, broker_b = cluster.others()
    return first, broker_a, broker_b


async def values(cluster: Cluster) -> list[str]:
    """`t`-0 as the plainest reader finds it; all brokers hold that very state."""
    for log in cluster.logs:
        await log._log.wal.refresh()
    state, _ = await fold(cluster.store, CLUSTER_ID)
    assert {log.state.encode() for log in cluster.logs} == {state.encode()}
    return [
        str(value, "ascii") for value in await tail_values(cluster.store, state, "t", 0) if value
    ]


def puts(*brokers: Broker) -> int:
    return sum(logs.store_of(log).count("create", object_keys.WAL) for log in brokers)


def gets(*brokers: Broker) -> int:
    return sum(logs.store_of(log).count("get_range", object_keys.WAL) for log in brokers)


async def test_one_broker_alone_pays_nothing_for_the_others_that_might_be(cluster: Cluster) -> None:
    alone = await cluster.start()
    await cluster.settled()
    await alone.topics.create("t", 1, {})
    alone._tasks[0].cancel()  # the poller
    old_counts = puts(alone), gets(alone), len(cluster.net.messages)
    for i in range(20):
        await logs.append(alone, str(i))
    new_counts = puts(alone), gets(alone), len(cluster.net.messages)
    assert [b - a for a, b in zip(old_counts, new_counts, strict=True)] == [20, 0, 0]
    assert await values(cluster) == [str(i) for i in range(20)]


async def test_sequencer_commits_for_all_and_all_see_it(cluster: Cluster) -> None:
    first, broker_a, broker_b = await three(cluster)
    old_counts = puts(broker_a, broker_b), puts(first), gets(first, broker_a, broker_b)
    seq = first.state.seq
    for i in range(10):
        for log in (broker_a, first, broker_b):
            (placed,) = await logs.append(log, f"{log._log.wal.writer}-{i}")
            for other in cluster.logs:  # I3, by a fetch like any client's
                fetched = await other.records.fetch("t", 0, placed.base_offset, bytes_max=1000)
                assert fetched.pieces
    assert puts(broker_a, broker_b) == old_counts[0]
    assert puts(first) - old_counts[1] == first.state.seq - seq == 30
    assert len(await values(cluster)) == 30
    assert broker_a._sequencer.counters.handed_over == 10
    assert broker_a._sequencer.counters.own_commits == 0


async def test_what_waits_during_a_put_becomes_one_entry() -> None:
    async with Cluster(latency=lambda _: 0.05) as cluster:
        first, broker_a, broker_b = await three(cluster)
        seq = first.state.seq
        sent = [
            logs.append(log, f"{log._log.wal.writer}-{i}")
            for i in range(40)
            for log in cluster.logs
        ]
        assert all(await asyncio.gather(*sent))
        assert first.state.seq - seq <= 5
        log_values = await values(cluster)
        assert len(log_values) == len(set(log_values)) == 120
        for log in cluster.logs:  # of each broker in order
            mine = [value for value in log_values if value.startswith(f"{log._log.wal.writer}-")]
            assert mine == [f"{log._log.wal.writer}-{i}" for i in range(40)]
        assert puts(broker_a, broker_b) == 0


async def test_a_long_poll_anywhere_ends_a_moment_after_the_commit() -> None:
    slow = SETTINGS._replace(poll_interval_s=30.0)
    async with Cluster(slow, latency=lambda _: 0.02) as cluster:
        _, broker_a, broker_b = await three(cluster)
        polls = [
            asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=1000, wait_s=20.0))
            for log in cluster.logs
        ]
        await asyncio.sleep(1.0)
        (placed,) = await logs.append(broker_a, "now")
        loop = asyncio.get_running_loop()
        acked_s = loop.time()
        old_gets = gets(broker_b)
        for answer in await asyncio.gather(*polls):
            assert answer.high_watermark == placed.base_offset + 1
            assert answer.pieces
        assert loop.time() - acked_s < 0.005
        assert gets(broker_b) == old_gets, "the wake-up brought header and chunk"


async def test_a_follower_gets_records_of_other_brokers_in_large_batches(cluster: Cluster) -> None:
    """From memory, with any broker as the writer and any broker as the reader."""
    _, broker_a, broker_b = await three(cluster)

    async def follow() -> None:
        offset = 0
        while offset < 60:
            fetched = await broker_b.records.fetch("t", 0, offset, bytes_max=1 << 20, wait_s=10.0)
            offset = fetched.next_offset

    following = asyncio.create_task(follow())
    for i in range(60):
        await logs.append(cluster.logs[i % 3], str(i))
    await following
    broker_b._log.reader.tail_objects = TailObjects(broker_b._log.store, 0)
    broker_b._log.reader.chunk_cache = type(broker_b._log.reader.chunk_cache)(0, lambda _: 1)
    old_gets = gets(broker_b)
    fetched = await broker_b.records.fetch("t", 0, 0, bytes_max=1 << 20)
    assert [
        bytes(value)
        for piece in fetched.pieces
        for value in piece.batch.column("value").to_pylist()
    ] == [b"%d" % i for i in range(60)]
    assert len(fetched.pieces) <= 6
    assert gets(broker_b) == old_gets
    assert await logs.read_values(broker_a) == [str(i) for i in range(60)]


async def test_lost_messages_cost_one_poll_interval() -> None:
    async with Cluster() as cluster:
        _, broker_a, broker_b = await three(cluster)
        cluster.net.plan = lambda verb, _: Broken.LOST if verb == "tell" else None
        poll = asyncio.create_task(broker_b.records.fetch("t", 0, 0, bytes_max=1000, wait_s=20.0))
        await asyncio.sleep(0.1)
        await logs.append(broker_a, "now")
        loop = asyncio.get_running_loop()
        acked_s = loop.time()
        assert (await poll).pieces
        assert loop.time() - acked_s < AGREED_S + SETTINGS.poll_interval_s + 0.1


@pytest.mark.parametrize("broken", list(Broken))
async def test_failed_hand_over_is_committed_once(cluster: Cluster, broken: Broken) -> None:
    """Whether or not the sequencer commits it as well, at the same time or later."""
    first, broker_a, _broker_b = await three(cluster)
    address = first._membership.me.address
    cluster.net.plan = lambda verb, to: broken if verb == "hand_over" and to == address else None
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    (placed,) = await logs.append(broker_a, "a")
    assert loop.time() - started_s < 0.5 + 0.2
    assert placed.base_offset == 0
    # The next ones do not wait for the same again.
    started_s = loop.time()
    for value in "bcd":
        await logs.append(broker_a, value)
    assert loop.time() - started_s < 0.4
    cluster.net.plan = lambda verb, to: None
    await asyncio.sleep(40.0)  # and later it is asked again
    old_taken = first._sequencer.counters.taken
    await logs.append(broker_a, "e")
    assert first._sequencer.counters.taken == old_taken + 1
    assert await values(cluster) == list("abcde")
    assert broker_a._sequencer.counters.own_commits <= 1 + 3


@pytest.mark.parametrize("fault", [Fault.STORED, Fault.OWN_412, Fault.ABSENT, Fault.LATE])
async def test_unclear_put_of_sequencer_is_committed_once(cluster: Cluster, fault: Fault) -> None:
    first, broker_a, broker_b = await three(cluster)
    logs.store_of(first).plan = Script("create", object_keys.WAL, [fault] * 2)
    answers = await asyncio.gather(
        logs.append(broker_a, "one"), logs.append(broker_b, "two"), logs.append(first, "first")
    )
    log_values = await values(cluster)
    assert sorted(log_values) == ["first", "one", "two"]
    for value, (placed,) in zip(("one", "two", "first"), answers, strict=True):
        assert log_values[placed.base_offset] == value


async def test_refused_sequencer_says_so_and_others_commit(cluster: Cluster) -> None:
    first, broker_a, _ = await three(cluster)
    logs.store_of(first).plan = Script("create", object_keys.WAL, [Fault.REFUSED] * 50)
    (placed,) = await logs.append(broker_a, "one")
    with pytest.raises(Unavailable):
        await logs.append(first, "first")
    logs.store_of(first).plan = lambda _: None
    assert await values(cluster) == ["one"]
    assert placed.base_offset == 0


async def test_i6_refused_draft_that_comes_again_is_not_committed(cluster: Cluster) -> None:
    """The network brings a message twice, and the store refuses only at the first time."""
    first, broker_a, _ = await three(cluster)
    messages: list[bytes] = []
    real = first._sequencer.on_forward

    async def noted(message: bytes) -> bytes:
        messages.append(message)
        return await real(message)

    first._sequencer.on_forward = noted  # type: ignore[method-assign]
    for broker in (first, broker_a):
        logs.store_of(broker).plan = Script("create", object_keys.WAL, [Fault.REFUSED] * 50)
    with pytest.raises(Unavailable):
        await logs.append(broker_a, "refused")
    for broker in (first, broker_a):
        logs.store_of(broker).plan = lambda _: None
    (message,) = messages
    with pytest.raises(ForwardRefused, match="came again"):
        await real(message)
    await logs.append(broker_a, "next")
    assert await values(cluster) == ["next"]


async def test_i6_what_is_in_doubt_is_not_called_failed() -> None:
    """Handed over, the answer lost, and one's own way to the store refused.

    The sequencer may have committed it, and it has.
    """
    settings = SETTINGS._replace(
        writer=SETTINGS.writer._replace(answer_timeout_s=4.0), poll_interval_s=50.0
    )
    async with Cluster(settings, latency=lambda _: 0.02) as cluster:
        _first, broker_a, _ = await three(cluster)
        cluster.net.plan = lambda verb, to: Broken.LOST if verb == "hand_over" else None
        store = logs.store_of(broker_a)
        store.plan = lambda call: (
            Fault.REFUSED
            if call.verb == "create"
            else Fault.UNAVAILABLE
            if call.verb == "get_range"
            else None
        )
        with pytest.raises(CommitUnknown):
            await logs.append(broker_a, "one")
        store.plan = lambda _: None
        cluster.net.plan = lambda verb, to: None
        await asyncio.sleep(5.0)
        assert await values(cluster) == ["one"]


async def test_a_large_draft_is_uploaded_first_and_referred_to() -> None:
    settings = SETTINGS._replace(
        writer=SETTINGS.writer._replace(codec=""),
        sequencer=SETTINGS.sequencer._replace(handover_bytes_max=10_000),
    )
    async with Cluster(settings, latency=lambda _: 0.02) as cluster:
        _first, broker_a, broker_b = await three(cluster)
        large = "x" * 50_000
        await asyncio.gather(logs.append(broker_a, large), logs.append(broker_b, "small"))
        assert logs.store_of(broker_a).count("create", object_keys.DATA) == 1
        assert sorted(await values(cluster), key=len) == ["small", large]
        for log in cluster.logs:
            assert sorted(await logs.read_values(log), key=len) == ["small", large]
        # Its way to the sequencer breaks after the upload: no second upload.
        cluster.net.plan = lambda verb, to: Broken.REFUSED
        await logs.append(broker_a, large)
        assert logs.store_of(broker_a).count("create", object_keys.DATA) == 2
        assert len(await values(cluster)) == 3


LARGE = SETTINGS._replace(
    writer=SETTINGS.writer._replace(codec="", answer_timeout_s=10_000.0),
    wal=SETTINGS.wal._replace(bounds=Bounds(30_000, 120_000)),
    sequencer=SETTINGS.sequencer._replace(handover_bytes_max=10_000),
)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_i9_expired_upload_is_not_committed(is_lost: bool) -> None:
    """A message to the sequencer takes longer than uploads are kept, while others commit."""

    def latency(call: Call) -> float:
        return 5.0 if (call.verb, call.key[:5]) == ("create", object_keys.DATA) else 0.02

    async with Cluster(LARGE, latency=latency) as cluster:
        first, broker_a, broker_b = await three(cluster)
        sent = asyncio.create_task(logs.append(broker_a, "x" * 50_000))
        await asyncio.sleep(1.0)
        first.clock.skew_ms = 120_000  # elapsed time follows it, ten minutes at most
        await logs.append(broker_b, "small")
        if is_lost:
            cluster.net.plan = lambda verb, _: Broken.LOST if verb == "hand_over" else None
        with pytest.raises(Unavailable):
            await sent  # definite: what is not in the log by now is in no later entry
        cluster.net.plan = lambda verb, to: None
        await logs.append(broker_a, "y" * 50_000)
        assert await values(cluster) == ["small", "y" * 50_000]


async def test_i9_suspended_put_loses_its_number_before_its_upload_is_deleted() -> None:
    async with Cluster(LARGE, latency=lambda _: 0.02) as cluster:
        first, broker_a, broker_b = await three(cluster)
        await logs.append(broker_a, "0")
        cluster.net.plan = lambda verb, _: Broken.REFUSED if verb == "hand_over" else None
        gate = logs.store_of(broker_a).hold("create", object_keys.wal(first.state.seq + 1))
        sent = asyncio.create_task(logs.append(broker_a, "x" * 50_000))
        await gate.reached.wait()
        expected_values = ["0"]
        for minute in range(20):
            if minute >= 10:  # until then no other broker commits, and the number is free
                expected_values.append(str(minute))
                await logs.append(broker_b, expected_values[-1])
            async with caring(cluster.store) as care:
                await collect(care, await plan(care, Grace(wal_ms=120_000)))
            is_there = bool([info async for info in cluster.store.list(object_keys.DATA)])
            if not is_there:
                break
            await asyncio.sleep(60.0)
        assert 12 <= minute < 19
        gate.opened.set()
        with pytest.raises(Unavailable):
            await sent
        assert [await logs.read_values(log) for log in cluster.logs] == [expected_values] * 3


async def test_a_killed_sequencer_is_missed_for_one_put(cluster: Cluster) -> None:
    first, broker_a, broker_b = await three(cluster)
    gate = logs.store_of(first).hold("create", object_keys.wal(first.state.seq + 1))
    sent = asyncio.create_task(logs.append(broker_a, "a"))
    await gate.reached.wait()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await cluster.kill(first)
    await asyncio.wait_for(sent, 1.0)
    await asyncio.gather(logs.append(broker_a, "b"), logs.append(broker_b, "c"))
    assert loop.time() - started_s < 0.5 + 0.3  # the timeout of a request without an answer
    await asyncio.sleep(5.0)
    assert {log._membership.ranking[0].id for log in cluster.logs} != {first._membership.me.id}
    assert set(await values(cluster)) == {"a", "b", "c"}


async def test_a_frozen_sequencer_comes_back_and_doubles_nothing(cluster: Cluster) -> None:
    """Its PUT arrives after the broker of a draft in it has committed for itself.

    The sequencer leaves out the committed drafts that it still has.
    """
    first, broker_a, broker_b = await three(cluster)
    cluster.freeze(first)
    sent = [asyncio.create_task(logs.append(first, "first"))]
    sent += [
        asyncio.create_task(logs.append(log, log._log.wal.writer)) for log in (broker_a, broker_b)
    ]
    await asyncio.gather(*sent[1:])
    await asyncio.sleep(2.0)
    cluster.thaw(first)
    await asyncio.gather(*sent)
    await asyncio.sleep(1.0)
    assert sorted(await values(cluster)) == sorted(
        ["first", broker_a._log.wal.writer, broker_b._log.wal.writer]
    )


async def test_sequencer_with_an_expired_view_commits_nothing(cluster: Cluster) -> None:
    first, broker_a, broker_b = await three(cluster)
    store = logs.store_of(first)
    gate = store.hold("create", object_keys.wal(first.state.seq + 1))
    own = asyncio.create_task(logs.append(first, "first"))
    await gate.reached.wait()
    sent = [asyncio.create_task(logs.append(broker_a, "one"))]
    await asyncio.sleep(0.1)
    cluster.freeze(first)
    await asyncio.gather(*sent)
    for i in range(5):
        await logs.append(broker_b, str(i))
    first.clock.advance(3600.0)  # type: ignore[attr-defined]
    gate.opened.set()
    cluster.thaw(first)
    await own
    log_values = await values(cluster)
    assert log_values[0] == "one"
    assert sorted(log_values) == ["0", "1", "2", "3", "4", "first", "one"]


@pytest.mark.parametrize("is_second_left", [True, False])
async def test_number_created_again_is_ignored(cluster: Cluster, is_second_left: bool) -> None:
    """Its PUT, with a draft of another in it, arrives hours later.

    By then the other has committed, checkpointed and collected that number.
    """
    first, broker_a, broker_b = await three(cluster)
    seq = first.state.seq + 1
    gate = logs.store_of(first).hold("create", object_keys.wal(seq))
    sent = asyncio.create_task(logs.append(broker_a, "one"))
    await gate.reached.wait()
    cluster.freeze(first)
    ((placed,),) = await asyncio.gather(sent)
    assert broker_a.state.seq == seq, "at the number that the suspended broker is about to take"
    for i in range(5):
        await logs.append(broker_b, str(i))
    newest = await broker_b._log.wal.checkpoint()
    kept_numbers = {newest, seq + 1} if is_second_left else {newest}
    await cluster.store.delete(
        [object_keys.wal(number) for number in range(1, newest) if number not in kept_numbers]
    )
    first.clock.advance(2 * 3600.0)  # type: ignore[attr-defined]
    gate.opened.set()
    cluster.thaw(first)
    await asyncio.sleep(5.0)
    await logs.append(first, "first")
    await logs.append(broker_a, "again")
    for log in cluster.logs:
        await log._log.wal.refresh()
    assert len({log.state.encode() for log in cluster.logs}) == 1
    assert broker_a.state.partition("t", 0).high_watermark == 1 + 5 + 2
    assert placed.base_offset == 0


async def test_a_broker_that_stops_leaves_at_once_and_loses_nothing(cluster: Cluster) -> None:
    first, broker_a, broker_b = await three(cluster)
    sent = [
        asyncio.create_task(logs.append(log, log._log.wal.writer)) for log in (broker_a, broker_b)
    ]
    await asyncio.sleep(0.01)
    await cluster.stop(first)
    await asyncio.gather(*sent)
    assert len(await values(cluster)) == 2
    keys = [info.key async for info in cluster.store.list(object_keys.BROKERS)]
    assert keys == sorted(object_keys.broker(log._membership.me.id) for log in (broker_a, broker_b))
    await cluster.settled()
    assert len(broker_a._membership.others) == 1
    await asyncio.gather(logs.append(broker_a, "x"), logs.append(broker_b, "y"))
    for log in (broker_a, broker_b):  # nothing is kept of the one that has gone
        wakeups = log._sequencer.announcer
        assert len(wakeups._senders) <= 1
        assert not wakeups.suspects


OLD = format_levels.KAFKA - 1


async def test_sequencer_behind_level_refuses_drafts(caplog: pytest.LogCaptureFixture) -> None:
    never = SETTINGS._replace(poll_interval_s=10_000.0)
    async with Cluster(never, latency=lambda _: 0.02) as cluster:
        await found_cluster(cluster.store, OLD)
        for _ in range(3):
            await cluster.start()
        await cluster.settled()
        first = cluster.sequencer()
        broker_a, broker_b = cluster.others()
        await first.topics.create("t", 1, {})
        async with caring(cluster.store) as store:
            raised = await upgrade(store, is_dry=False, settings=SETTINGS.membership)
        assert raised == LevelChange(OLD, format_levels.KAFKA)
        await broker_a._log.wal.refresh()
        await broker_b._log.wal.refresh()
        assert [log.state.level for log in (first, broker_a, broker_b)] == [
            OLD,
            *[format_levels.KAFKA] * 2,
        ]
        # While its PUT is in flight, the sequencer does not know yet that it loses the number.
        gate = logs.store_of(first).hold("create", object_keys.wal(first.state.seq + 1))
        record = asyncio.create_task(logs.append(broker_b, "a record"))
        try:
            await gate.reached.wait()
            assert first.state.level == OLD
            reserved = await broker_a.kafka.reserve_producer_id()
            assert first._sequencer.counters.not_taken == 1
            assert broker_a._sequencer.counters.refused == 1
            assert broker_a._sequencer.counters.own_commits == 1
        finally:
            gate.opened.set()
        assert await record, "the draft of another broker keeps its outcome"
        assert first.state.level == format_levels.KAFKA
        taken_count = first._sequencer.counters.taken
        broker_a._sequencer.announcer.suspects.clear()
        assert await broker_a.kafka.reserve_producer_id() == reserved + 1
        await logs.append(broker_a, "another")
        assert first._sequencer.counters.taken == taken_count + 2
        assert await logs.read_values(broker_b) == ["a record", "another"]
    assert not [line for line in caplog.records if line.levelno >= logging.CRITICAL]


PATIENT = SETTINGS._replace(
    writer=SETTINGS.writer._replace(answer_timeout_s=1e6),
    membership=SETTINGS.membership._replace(heartbeat_interval_s=20.0, member_timeout_s=60.0),
    poll_interval_s=60.0,
)
"""A caller waits for the outcome, however long it takes. An idle hour is a few events."""


async def test_i6_a_draft_in_doubt_after_its_mark_was_dropped_is_not_committed_again() -> None:
    """The sequencer commits the draft, and its answer is lost.

    The draft's broker is cut off until the state has dropped the draft's mark, so `apply` would
    append a second copy.
    """
    async with Cluster(PATIENT, latency=lambda _: 0.02) as cluster:
        first, broker_a, broker_b = await three(cluster)
        cluster.net.plan = lambda verb, to: (
            Broken.ANSWER_LOST if verb == "hand_over" else Broken.LOST
        )
        sent = asyncio.create_task(logs.append(broker_a, "in doubt"))
        while not broker_a._sequencer.counters.handed_over:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
        logs.store_of(broker_a).freeze()
        await asyncio.sleep(0.2)
        await first._log.wal.refresh()
        assert first.state.origins.number(broker_a._membership.me.id) == 1
        count = ORIGIN_WINDOW_MS // 300_000 + 1
        for number in range(count):
            await asyncio.sleep(300.0)
            await logs.append(first, str(number))
        cluster.net.plan = lambda verb, to: None
        await logs.append(broker_b, "forwarded")  # `see` drops old marks
        assert first.state.origins.number(broker_a._membership.me.id) == 0
        await first._log.wal.checkpoint()
        logs.store_of(broker_a).thaw()
        with pytest.raises(CommitUnknown, match=SKIPPED):
            await sent
        values = await logs.read_values(broker_b)
        assert values == ["in doubt", *map(str, range(count)), "forwarded"]
