"""Hot logs that two machines have: a clone and its original, a restored disk (DESIGN 11)."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from tests.support.cluster import SETTINGS as CLUSTER
from tests.support.cluster import Broken, Cluster
from tests.support.hotlogs import CLUSTER_ID, names
from tests.support.logs import append, read_values
from tests.support.loop_brokers import loop_clock, served, way
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import Commit, Draft, HotMark
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import MoveLogStart
from tidelog.storage.core.errors import CommitUnknown, Fenced, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.recovered_requests import CLAIM
from tidelog.storage.write.requests import AppendRequest, part_rows

LOG_ID = "f" * 32
SETTINGS = LogSettings(is_sealing=False, poll_interval_s=1e6)
IDLE = CLUSTER._replace(poll_interval_s=1e6)


async def opened(store: MemoryStore, number: int, home: Path | None) -> Broker:
    return await Broker.open(
        way(store),
        SETTINGS,
        clock=loop_clock(number),
        name=f"b{number}",
        cluster_id=CLUSTER_ID,
        hot_dir=home,
    )


async def held(store: MemoryStore) -> list[str]:
    log = await opened(store, 99, None)
    try:
        return list((await served(log)).values())
    finally:
        await log.close()


async def crashed(home: Path, log: Broker, *values: str, first: int = 0) -> None:
    """Leave the hot log of a process that acknowledged one request for each value, and crashed."""
    await asyncio.to_thread(home.mkdir)
    topic = log.state.topic("t")
    requests: list[AppendRequest] = []
    hot_log = HotLog(home, CLUSTER_ID, LOG_ID, requests.append, lambda *_: None)
    hot_log._next = first
    for value in values:
        rows = Rows([1], [None], [value.encode()])
        commit_id = value.encode().ljust(16, b".")
        await hot_log.append(
            AppendRequest(
                [part_rows(topic, 0, rows)], 10, topic_id=topic.topic_id, commit_id=commit_id
            )
        )
    await hot_log.close(is_drained=False)


async def recovered(store: MemoryStore, number: int, home: Path) -> None:
    log = await opened(store, number, home)
    assert not names(home, f"{LOG_ID}*")
    await log.close()


@pytest.mark.parametrize("order", ["one", "two"])
async def test_i1_one_mark_on_two_disks_commits_all_requests(tmp_path: Path, order: str) -> None:
    store = MemoryStore()
    log = await opened(store, 1, None)
    await log.topics.create("t", 1, {})
    folder_a, folder_b = tmp_path / "one", tmp_path / "two"
    await crashed(folder_a, log, "shared", "X", "Y")
    await crashed(folder_b, log, "shared", "Z")
    await log.close()
    first, second = (folder_a, folder_b) if order == "one" else (folder_b, folder_a)
    await recovered(store, 2, first)
    await recovered(store, 3, second)
    assert sorted(await held(store)) == ["X", "Y", "Z", "shared"]


async def test_i1_a_recovery_after_a_crash_commits_nothing_twice(tmp_path: Path) -> None:
    """A disk is restored whose requests were committed, and its log retired."""
    store = MemoryStore()
    log = await opened(store, 1, None)
    await log.topics.create("t", 1, {})
    await crashed(tmp_path / "one", log, "X", "Y")
    shutil.copytree(tmp_path / "one", tmp_path / "restored")
    await log.close()
    await recovered(store, 2, tmp_path / "one")
    await recovered(store, 3, tmp_path / "restored")
    assert await held(store) == ["X", "Y"]


@pytest.mark.parametrize("wait_s", [0.0, 0.01, 0.03, 0.05])
async def test_i1_two_recoveries_at_the_same_time_commit_nothing_twice(
    tmp_path: Path, wait_s: float
) -> None:
    """Both read the WAL back before either commits; the second one starts again."""
    store = MemoryStore()
    log = await opened(store, 1, None)
    await log.topics.create("t", 1, {})
    folders = tmp_path / "one", tmp_path / "two"
    await crashed(folders[0], log, "shared", "X")
    await crashed(folders[1], log, "shared", "Z")
    await log.close()

    async def recover(number: int) -> None:
        await asyncio.sleep(wait_s * number)
        for attempt in range(2):
            with contextlib.suppress(Unavailable):
                await recovered(store, 2 + 2 * number + attempt, folders[number])
                return
        raise AssertionError("the second start finds the commits of the other process")

    await asyncio.gather(recover(0), recover(1))
    assert sorted(await held(store)) == ["X", "Z", "shared"]


async def test_request_with_committed_own_mark_is_left_out(tmp_path: Path) -> None:
    store = MemoryStore()
    log = await opened(store, 1, None)
    await log.topics.create("t", 1, {})
    await crashed(tmp_path / "one", log, "X", "Y")
    commit = Commit(b"X".ljust(16, b"."), [], hot=HotMark(LOG_ID, 0))
    await log._log.wal.commit(Draft([commit], [], []))
    await log.close()
    await recovered(store, 2, tmp_path / "one")
    assert await held(store) == ["Y"]


async def test_a_claim_of_a_recovery_fences_a_live_copy(tmp_path: Path) -> None:
    """Its marks would count as committed; its requests stay on its disk."""
    store = MemoryStore()
    live = await opened(store, 1, tmp_path / "live")
    other = await opened(store, 2, None)
    await live.topics.create("t", 1, {})
    assert live._log.writer.hot_log is not None
    mark = HotMark(live._log.writer.hot_log.log_id, CLAIM)
    await other._log.wal.commit(Draft([Commit(other.clock.new_id(), [], hot=mark)], [], []))
    await live._log.wal.refresh()
    with pytest.raises(Fenced):
        live._log.wal.clone_fence.check_fence()
    await live.release()
    await other.close()


async def test_i1_a_request_whose_mark_a_copy_used_first_stays_in_its_file(tmp_path: Path) -> None:
    """The sequencer commits the request, but `apply` takes it for done.

    An entry of the copy has its mark. The broker reads that entry only after it has forwarded the
    request.
    """
    async with Cluster(IDLE, latency=lambda _: 0.02) as cluster:
        brokers = [await cluster.start(hot_dir=tmp_path / f"{n}") for n in range(3)]
        await cluster.settled()
        first = cluster.sequencer()
        await first.topics.create("t", 1, {})
        live, copy = cluster.others()
        await live._log.wal.refresh()
        cluster.net.plan = lambda verb, _: Broken.LOST if verb == "tell" else None
        assert live._log.writer.hot_log is not None
        mark = HotMark(live._log.writer.hot_log.log_id, 0)
        copy._log.wal.writer = copy._log.wal.clone_fence.writer = live._log.wal.writer
        action = MoveLogStart(copy.state.topic("t").topic_id, 0, 0)
        await copy._log.wal.commit(Draft([Commit(copy.clock.new_id(), [action], hot=mark)], [], []))
        await first._log.wal.refresh()
        assert await append(live, "X", acks=Acks.LOCAL) is None
        await asyncio.sleep(1.0)
        assert live._sequencer.counters.handed_over == 1
        with pytest.raises(Fenced):
            live._log.wal.clone_fence.check_fence()
        home = tmp_path / str(brokers.index(live))
        await cluster.stop(live)  # it deletes the file if all its requests are committed
        again = await cluster.start(hot_dir=home)
        await again._log.wal.refresh()
        assert await read_values(again) == ["X"]


async def test_an_expired_view_that_passed_over_entries_of_a_copy_is_fenced(tmp_path: Path) -> None:
    store = MemoryStore()
    live = await opened(store, 1, tmp_path)
    await live.topics.create("t", 1, {})
    copy = await opened(store, 2, None)
    copy._log.wal.writer = live._log.wal.writer
    await asyncio.sleep(1)
    await copy.topics.create("u", 1, {})
    await copy._log.wal.checkpoint()
    live._log.wal._freshness.expire()
    with pytest.raises(CommitUnknown, match="a copy of the process runs"):
        await live.topics.create("v", 1, {})
    await live.release()
    await copy.release()
