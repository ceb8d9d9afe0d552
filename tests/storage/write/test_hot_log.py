"""The local hot log: what acks=1 promised survives a crash, and is in the log once (I4)."""

import asyncio
import contextlib
import fcntl
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hotlogs import (
    CLUSTER_ID,
    LOG_ID,
    Opened,
    failing,
    let_go,
    marks,
    names,
    requests_in,
    values,
    values_of_lists,
)
from tests.support.records import request, rows
from tests.support.vloop import run
from tidelog.storage.codec.entry import HotMark, IdempotencyKey
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import CommitUnknown, StoreUnfit, Unavailable
from tidelog.storage.write import hot_log
from tidelog.storage.write.hot_log_file import discard, recover
from tidelog.storage.write.hot_segment import ClosedSegment


def left_by_a_crash(directory: Path, *requests: str, log_id: str = LOG_ID) -> None:
    """A process appends these requests, a record for each character, and crashes."""

    async def main() -> None:
        hot = Opened(directory, log_id)
        for request_values in requests:
            await hot.append(*request_values)
        await hot.crash()

    run(main)


# -- what survives


async def test_a_principal_survives_from_level_2_on(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    for level in (format_levels.FIRST, 2):
        hot.level = level
        named = request(hot.clock, {1: rows("k")})
        named.principal = "User:alice"
        await hot.log.append(named)
    await hot.crash()
    (file,) = recover(tmp_path, CLUSTER_ID)
    assert os.pread(file.fd, 1 << 20, 0).count(b"User:alice") == 1
    assert [append_request.principal for append_request in file.requests] == ["", "User:alice"]
    closed = ClosedSegment(file.requests, hot.clock.new_id)
    commits = closed.encode("").draft.commits
    assert [commit.principal for commit in commits] == ["", "User:alice"]
    discard([file])


async def test_what_was_appended_is_recovered_in_order_with_its_marks(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    key = IdempotencyKey("k", b"f", 4)
    keyed = request(hot.clock, {1: rows("k")}, key=key)
    await asyncio.gather(*(hot.append(f"a{i}", f"b{i}") for i in range(50)))
    await hot.log.append(keyed)
    assert marks(hot.handed) == [HotMark(LOG_ID, i) for i in range(51)]
    await hot.crash()
    (file,) = recover(tmp_path, CLUSTER_ID)
    assert file.log_id == LOG_ID
    assert marks(file.requests) == marks(hot.handed)
    assert [append_request.commit_id for append_request in file.requests] == [
        append_request.commit_id for append_request in hot.handed
    ]
    assert values(file.requests) == [f"{x}{i}" for i in range(50) for x in "ab"] + ["k"]
    last = file.requests[-1]
    assert (last.key, last.topic_id) == (key, keyed.topic_id)
    assert (last.parts[0].topic_id, last.parts[0].partition) == (keyed.topic_id, 1)
    let_go([file])


async def test_a_caller_goes_on_only_when_its_request_was_handed_on(tmp_path: Path) -> None:
    hot = Opened(tmp_path)

    async def append(value: str) -> None:
        await hot.append(value)
        assert value in values_of_lists(hot.handed)

    await asyncio.gather(*(append(str(i)) for i in range(20)))
    await hot.crash()


async def test_many_appends_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(hot_log.os, "fdatasync", lambda fd: (syncs.append(fd), fdatasync(fd)))
    hot = Opened(tmp_path)
    await hot.append("first")
    del syncs[:]
    await asyncio.gather(*(hot.append(str(i)) for i in range(200)))
    assert len(syncs) <= 2
    await hot.crash()


async def test_a_torn_frame_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    await hot.append("b")
    (path,) = names(tmp_path)
    whole = path.stat().st_size
    await hot.append("torn")
    await hot.crash()
    body = path.read_bytes()
    head = range(whole, whole + 20)
    body_range = range(whole + 20, len(body))
    sizes = [*head, *random.Random(7).sample(body_range, 20), len(body) - 1]
    for index, size in enumerate(sizes):
        path.write_bytes(body[:size])
        assert values(requests_in(tmp_path)) == ["a", "b"]
        if index % 5:
            continue
        # As after a disk that stored the length before the data.
        path.write_bytes(body[:size] + bytes(len(body) - size))
        is_whole = not body[size:].strip(b"\0")
        assert values(requests_in(tmp_path)) == ["a", "b"] + ["torn"] * is_whole
    for position in (*head, *random.Random(8).sample(body_range, 20)):
        damaged = bytearray(body)
        damaged[position] ^= 0x20
        path.write_bytes(damaged)
        assert values(requests_in(tmp_path)) == ["a", "b"]


async def test_damaged_frame_keeps_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk has lost something that was promised, and nothing else goes with it."""
    hot = Opened(tmp_path)
    await hot.append("a")
    (path,) = names(tmp_path)
    begin = path.stat().st_size
    await hot.append("b" * 1000)
    end = path.stat().st_size
    await hot.append("c")
    await hot.append("d")
    await hot.crash()
    body = path.read_bytes()
    for first, count in [(begin + 3, 1), (begin + 30, 1), (begin, 700), (end - 1, 1)]:
        path.write_bytes(body[:first] + b"\xff" * count + body[first + count :])
        assert values(requests_in(tmp_path)) == ["a", "c", "d"]
        assert path.with_suffix(".damaged").read_bytes() == path.read_bytes()
        assert "bytes are damaged" in caplog.text
    zeros = bytes(end - begin)  # a page that came back empty
    path.write_bytes(body[:begin] + zeros + body[end:])
    assert values(requests_in(tmp_path)) == ["a", "c", "d"]
    path.write_bytes(body[: begin - 9] + b"!" + body[begin - 8 :])  # the very first
    assert values(requests_in(tmp_path)) == ["b" * 1000, "c", "d"]
    discard(recover(tmp_path, CLUSTER_ID))
    assert names(tmp_path, "*.hot") == []
    assert len(names(tmp_path, "*.damaged")) == 1


def test_a_recovery_that_crashes_is_repeated(tmp_path: Path) -> None:
    left_by_a_crash(tmp_path, "ab", "c")
    first, second = requests_in(tmp_path), requests_in(tmp_path)
    assert values(first) == values(second) == ["a", "b", "c"]
    assert marks(first) == marks(second)
    discard(recover(tmp_path, CLUSTER_ID))
    assert recover(tmp_path, CLUSTER_ID) == []
    assert names(tmp_path, "*") == []


def test_nothing_is_recovered_where_nothing_was(tmp_path: Path) -> None:
    assert recover(tmp_path / "missing", CLUSTER_ID) == []
    (tmp_path / "notes.txt").write_text("not ours")
    assert recover(tmp_path, CLUSTER_ID) == []


async def test_closing_drained_leaves_nothing(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    await hot.log.close(is_drained=True)
    assert names(tmp_path, "*") == []
    unused = Opened(tmp_path)
    await unused.log.close(is_drained=True)


# -- locks


HOLDER = """
import asyncio, sys
from pathlib import Path
from tests.support.clock import ManualClock
from tests.support.records import request, rows
from tidelog.storage.write.hot_log import HotLog

async def main():
    log = HotLog(Path(sys.argv[1]), "c0ffee", "e" * 32, print, print)
    await log.append(request(ManualClock(), {0: rows("theirs")}))
    print("held", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def test_a_file_is_left_to_the_process_that_lives(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().startswith(b"AppendRequest(")
        assert holder.stdout.readline() == b"held\n"
        assert recover(tmp_path, CLUSTER_ID) == []
        holder.kill()
        holder.wait()
        files = recover(tmp_path, CLUSTER_ID)
        assert values(files[0].requests) == ["theirs"]
        # Adopted: a third process finds it held again.
        assert recover(tmp_path, CLUSTER_ID) == []
        discard(files)


def test_two_processes_adopt_each_file_once(tmp_path: Path) -> None:
    for letter in "ab":
        left_by_a_crash(tmp_path, letter, log_id=letter * 32)
    first = recover(tmp_path, CLUSTER_ID)
    assert len(first) == 2
    assert recover(tmp_path, CLUSTER_ID) == []
    let_go(first)


def test_discarded_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for letter in "abc":
        left_by_a_crash(tmp_path, letter, log_id=letter * 32)
    first, second, _ = names(tmp_path)
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        # Another process deletes `a` between our open and our lock, and `b` before our open.
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
        flock(fd, operation)

    monkeypatch.setattr(hot_log.fcntl, "flock", late)
    assert values(requests_in(tmp_path)) == ["c"]


def test_i4_mark_outlives_files_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes recover two files of one log: who is done first must not retire the marks."""
    monkeypatch.setattr(hot_log, "ROTATE_BYTES", 1)
    left_by_a_crash(tmp_path, "a", "b")
    ours, theirs = recover(tmp_path, CLUSTER_ID)
    assert discard([ours]) == set()
    assert discard([theirs]) == {LOG_ID}


def test_log_is_adopted_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were its later file committed first, the earlier one would count as committed, too."""
    monkeypatch.setattr(hot_log, "ROTATE_BYTES", 1)
    left_by_a_crash(tmp_path, "a", "b")
    with names(tmp_path)[0].open("rb") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert recover(tmp_path, CLUSTER_ID) == []
    assert values(requests_in(tmp_path)) == ["a", "b"]


# -- rotation


async def test_committed_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_log, "ROTATE_BYTES", 1000)
    hot = Opened(tmp_path)
    for i in range(30):
        await hot.append(f"{i:03}")
    files = names(tmp_path)
    assert len(files) > 3
    assert names(tmp_path) == names(tmp_path, "*")
    for i in range(30):
        hot.log.committed([HotMark(LOG_ID, i)])
        remaining_files = names(tmp_path)
        assert remaining_files == files[len(files) - len(remaining_files) :]
        assert remaining_files, "the file that is being written stays"
    assert remaining_files == files[-1:]
    hot.log.committed([HotMark("of another log", 1000)])
    await hot.crash()
    assert values(requests_in(tmp_path))[-1] == "029"


async def test_rotation_keeps_uncommitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_log, "ROTATE_BYTES", 1000)
    hot = Opened(tmp_path)
    for i in range(30):
        await hot.append(f"{i:03}")
    hot.log.committed([HotMark(LOG_ID, 11)])
    await hot.crash()
    requests = requests_in(tmp_path)
    seqs = [append_request.hot.seq for append_request in requests if append_request.hot is not None]
    assert seqs == list(range(seqs[0], 30))
    assert seqs[0] <= 12


async def test_i4_rotated_files_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that adopts one commits it again, and then retires marks of a log in use."""
    monkeypatch.setattr(hot_log, "ROTATE_BYTES", 1)
    hot = Opened(tmp_path)
    for i in range(5):
        await hot.append(str(i))
    assert len(names(tmp_path)) == 5
    assert recover(tmp_path, CLUSTER_ID) == []
    hot.log.committed([HotMark(LOG_ID, 2)])
    assert len(names(tmp_path)) == 2
    assert recover(tmp_path, CLUSTER_ID) == []
    old_count = len(os.listdir("/proc/self/fd"))
    await hot.crash()
    assert len(os.listdir("/proc/self/fd")) == old_count - 2
    assert values(requests_in(tmp_path)) == ["3", "4"]


# -- files that are not ours


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "has a wrong header"),
        (b"TIDEHOT", "has a wrong header"),
        (b"NOTAHOTLOG", "has a wrong header"),
        (b"TIDEHOT1", "damaged head"),
        (b"TIDEHOT1\x05\0\0\0", "damaged head"),
        (b"TIDEHOT1\x02\0\0\0{}", "damaged head"),
        (b"TIDEHOT1\xff\xff\xff\xff{}", "damaged head"),
        (b"TIDEHOT1\x02\0\0\0\xff\xff", "damaged head"),
    ],
)
def test_a_file_that_is_no_hot_log_is_left_alone(tmp_path: Path, body: bytes, why: str) -> None:
    path = tmp_path / "x.hot"
    path.write_bytes(body)
    old_count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreUnfit, match=why):
        recover(tmp_path, CLUSTER_ID)
    assert path.read_bytes() == body
    assert len(os.listdir("/proc/self/fd")) == old_count


def test_another_clusters_records_stay_where_they_are(tmp_path: Path) -> None:
    for letter in "ab":
        left_by_a_crash(tmp_path, letter, log_id=letter * 32)
    old_count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreUnfit, match="belongs to cluster c0ffee, not to tea"):
        recover(tmp_path, "tea")
    assert len(os.listdir("/proc/self/fd")) == old_count
    assert values(requests_in(tmp_path)) == ["a", "b"]


# -- disks that fail: a no stays a no, a yes a yes (I6)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`, as on a full disk."""
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


async def test_i6_on_a_full_disk_nothing_is_done_and_nothing_found_later(tmp_path: Path) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    (path,) = names(tmp_path)
    whole = path.stat().st_size
    for room in (0, 1, 15, 16, 17, 100):
        with file_size_limit(whole + room), pytest.raises(Unavailable, match="cannot be written"):
            await hot.append("refused" * 100)
        assert path.stat().st_size == whole
    await hot.append("b")
    await hot.crash()
    requests = requests_in(tmp_path)
    assert values(requests) == ["a", "b"]
    # Numbers are never given twice.
    assert [request.hot.seq for request in requests if request.hot] == [0, 7]
    assert marks(hot.handed) == marks(requests)


@pytest.mark.parametrize("room", [0, 5, 60])
async def test_i6_file_that_cannot_be_made_is_made_later(tmp_path: Path, room: int) -> None:
    hot = Opened(tmp_path)
    old_count = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with file_size_limit(room), pytest.raises(Unavailable):
            await hot.append("refused")
        assert recover(tmp_path, CLUSTER_ID) == []
    await hot.append("a")
    assert len(os.listdir("/proc/self/fd")) <= old_count + 1
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a"]
    assert names(tmp_path) == names(tmp_path, "*")


async def test_a_directory_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hot = Opened(tmp_path / "file" / "hot")
    with pytest.raises(Unavailable, match="cannot create a hot log"):
        await hot.append("a")


async def test_i6_failed_sync_cuts_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    with monkeypatch.context() as patch:
        patch.setattr(hot_log.os, "fdatasync", failing)
        with pytest.raises(Unavailable):
            await hot.append("refused")
    await hot.append("b")
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("second", ["ftruncate", "fsync"])
async def test_acked_requests_survive_a_file_that_a_failing_disk_has_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Neither written nor truncated: unknown.

    Later requests are written where a recovery finds them.
    """

    def half(fd: int, body: bytes) -> None:
        os.write(fd, body[: len(body) // 2])
        failing()

    hot = Opened(tmp_path)
    await hot.append("a")
    with monkeypatch.context() as patch:
        patch.setattr(hot_log, "write_all", half)
        patch.setattr(hot_log.os, second, failing)
        with pytest.raises(CommitUnknown):
            await hot.append("unknown")
    await hot.append("b")
    await hot.append("c")
    assert recover(tmp_path, CLUSTER_ID) == []
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b", "c"]


async def test_cancelled_append_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Opened(tmp_path)
    await hot.append("a")
    cancelled_task = asyncio.create_task(hot.append("b"))
    stays = asyncio.create_task(hot.append("c"))
    await asyncio.sleep(0)
    cancelled_task.cancel()
    await stays
    assert values_of_lists(hot.handed) == ["a", "b", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(hot_log.os, "fdatasync", failing)
        cancelled_task = asyncio.create_task(hot.append("d"))
        await asyncio.sleep(0)
        cancelled_task.cancel()
        await hot.log.drain()
    assert values_of_lists(hot.failed) == ["d"]
    await hot.crash()
    assert values(requests_in(tmp_path)) == ["a", "b", "c"]
