"""Version 0.1 itself beside this version, on one store (FORMAT.md, levels).

`storage-0.1.tar.xz` has the Python files of 0.1's `storage` package, as released:

    git archive --format=tar 9aca253 'storage/*.py' | xz -9e > storage-0.1.tar.xz

A test runs it in a process of its own, as one broker that obeys a line of JSON for each call.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import found_cluster, rows
from tidelog.compaction.upgrade import raise_level
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.log_engine import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

ARCHIVE = Path(__file__).parent / "storage-0.1.tar.xz"
CLUSTER_ID = "c0ffee"
PARTITIONS = 2

OLD_BROKER = """
import asyncio, json, logging, sys
from pathlib import Path

import storage
from storage.chunk import Rows
from storage.clock import SystemClock
from storage.entry import CommitOffsets, GroupOffset, IdempotencyKey
from storage.folder import FolderStore
from storage.log import Log, LogSettings

assert Path(storage.__file__).is_relative_to(sys.argv[2]), storage.__file__
logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")


async def open_(log):
    await log.open("c0ffee")


async def create(log, name):
    await log.create_topic(name, 2, {"segment.ms": "1000"})


async def append(log, value):
    topic = log.state.topic("t")
    made = [(number, Rows([1], [None], [value.encode()])) for number in range(2)]
    key = IdempotencyKey(value, b"f", 2)
    placed = await log.append(topic, made, size=9, is_json=False, key=key)
    return [[each.partition, each.base_offset] for each in placed]


async def commit(log, offset):
    rows = [GroupOffset(log.state.topic("t").topic_id, 0, offset)]
    await log.exactly_once.transact(
        [], [CommitOffsets("g", -1, rows)], size=1, is_json=False
    )


async def read(log):
    found = []
    for number in range(2):
        fetched = await log.fetch("t", number, 0, bytes_max=1 << 20)
        batches = [piece.batch.to_pylist() for piece in fetched.pieces]
        found.append([[row["offset"], row["value"].decode()] for rows in batches for row in rows])
    held = log.committed_offsets("g")
    return [found, [[where.partition, each.offset] for where, each in held.items()]]


async def seal(log):
    await log.seal("t")


async def state(log):
    await log.wal.refresh()
    return log.state.encode().hex()


async def checkpoint(log):
    await log.wal.refresh()
    return await log.wal.checkpoint()


async def refresh(log):
    await log.wal.refresh()


async def close(log):
    await log.close()


async def main():
    store = FolderStore(Path(sys.argv[1]))
    log = Log(store, SystemClock(), "old", LogSettings(is_sealing=False), None)
    calls = {"open": open_, "create": create, "append": append, "commit": commit, "read": read}
    calls |= {"seal": seal, "state": state, "checkpoint": checkpoint, "refresh": refresh}
    calls |= {"close": close}
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        try:
            answer = {"result": await calls[name](log, *arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)


asyncio.run(main())
"""


class Refused(Exception):
    """An error of version 0.1: the name of its class, and its line."""


class OldBroker:
    """A process with a broker of version 0.1 on the store in `folder`."""

    def __init__(self, package: Path, folder: Path) -> None:
        self.log = package.parent / "old-broker.log"
        self._stderr = self.log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-c", OLD_BROKER, str(folder), str(package)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=package,
            env={"PYTHONPATH": str(package)},
            text=True,
        )

    def _call(self, *request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(*answer["error"])
        return answer["result"]

    async def call(self, *request: object) -> Any:
        """Do this there. Raises Refused."""
        return await asyncio.to_thread(self._call, *request)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._stderr.close()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tidelog-0.1") / "unpacked"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(package: Path, folder: Path) -> Iterator[Callable[[], OldBroker]]:
    """Start a process of version 0.1."""
    started: list[OldBroker] = []

    def start() -> OldBroker:
        started.append(OldBroker(package, folder))
        return started[-1]

    yield start
    for broker in started:
        broker.end()


@contextlib.asynccontextmanager
async def this_version(folder: Path) -> AsyncIterator[Broker]:
    store = FolderStore(folder)
    settings = LogSettings(is_sealing=False, is_coordinating=False)
    log = await Broker.open(store, settings, clock=SystemClock(), name="new", cluster_id=CLUSTER_ID)
    try:
        yield log
    finally:
        await log.close()
        await store.close()


async def found_level_1(folder: Path) -> None:
    """Write the first object as version 0.1 does."""
    store = FolderStore(folder)
    await found_cluster(store, format_levels.FIRST)
    await store.close()


async def append(log: Broker, value: str) -> list[list[int]]:
    parts = [(number, rows(value)) for number in range(PARTITIONS)]
    key = IdempotencyKey(value, b"f", PARTITIONS)
    placed = await log.records.append(log.state.topic("t"), parts, size=9, is_json=False, key=key)
    assert placed is not None
    return [[place.partition, place.base_offset] for place in placed]


async def commit_offset(log: Broker, offset: int) -> None:
    offsets = [GroupOffset(log.state.topic("t").topic_id, 0, offset)]
    await log.records.transact([], [CommitOffsets("g", -1, offsets)], size=1, is_json=False)


async def read(log: Broker) -> list[Any]:
    records_of_partitions = []
    for number in range(PARTITIONS):
        fetched = await log.records.fetch("t", number, 0, bytes_max=1 << 20)
        batches = [piece.batch.to_pylist() for piece in fetched.pieces]
        records_of_partitions.append(
            [[row["offset"], row["value"].decode()] for rows in batches for row in rows]
        )
    committed_offsets = log.groups.committed_offsets("g")
    return [
        records_of_partitions,
        [
            [partition.partition, committed_offset.offset]
            for partition, committed_offset in committed_offsets.items()
        ],
    ]


def dense(*values: str) -> list[list[list[object]]]:
    """These values at the first offsets of each partition."""
    return [[[offset, value] for offset, value in enumerate(values)] for _ in range(PARTITIONS)]


@pytest.mark.parametrize("is_founded_by_0_1", [False, True])
async def test_at_level_1_both_versions_write_in_turn_and_read_the_same(
    folder: Path, start: Callable[[], OldBroker], is_founded_by_0_1: bool
) -> None:
    old = start()
    if not is_founded_by_0_1:
        await found_level_1(folder)
    await old.call("open")
    async with this_version(folder) as new:
        assert new._log.wal.cluster.format == 1
        await new.topics.create("t", PARTITIONS, {"segment.ms": "1000"})
        await old.call("refresh")
        for number in range(6):  # each loses the number to the other's entry, then applies it
            by_old, by_new = partial(old.call, "append"), partial(append, new)
            first, second = (by_new, by_old) if number % 2 else (by_old, by_new)
            assert await first(str(number)) == [[0, number], [1, number]]
            # A retry at the other version finds the Idempotency-Key.
            assert await second(str(number)) == [[0, number], [1, number]]
        await commit_offset(new, 3)
        await old.call("refresh")
        assert await old.call("read") == [dense(*"012345"), [[0, 3]]]
        await old.call("commit", 5)
        await old.call("seal")
        await new._log.wal.refresh()
        assert await read(new) == [dense(*"012345"), [[0, 5]]]
        assert new.state.level == 1
        assert await old.call("state") == new.state.encode().hex()


@pytest.mark.parametrize("is_checkpoint_of_0_1", [False, True])
async def test_at_level_1_each_version_starts_from_the_others_checkpoint(
    folder: Path, start: Callable[[], OldBroker], is_checkpoint_of_0_1: bool
) -> None:
    old = start()
    await old.call("open")
    await old.call("create", "t")
    await old.call("append", "a")
    async with this_version(folder) as new:
        await append(new, "b")
        await commit_offset(new, 2)
        newest = await (
            old.call("checkpoint") if is_checkpoint_of_0_1 else new._log.wal.checkpoint()
        )
        await new._log.wal.store.delete([object_keys.wal(seq) for seq in range(1, newest - 2)])
    late = start()
    await late.call("open")
    async with this_version(folder) as new:
        assert await late.call("read") == await read(new) == [dense("a", "b"), [[0, 2]]]
        assert await late.call("state") == new.state.encode().hex()


def line_about(seq: int) -> str:
    """How version 0.1 refuses the entry that raised the level."""
    return (
        f"object {object_keys.wal(seq)} is corrupt: format 2 is newer than this version reads (1)"
    )


async def test_0_1_stops_at_entry_of_raise(folder: Path, start: Callable[[], OldBroker]) -> None:
    old = start()
    await old.call("open")
    await old.call("create", "t")
    await old.call("append", "a")
    async with this_version(folder) as new:
        await raise_level(new._log.wal, 2)
        raised = new.state.seq
        await append(new, "b")
        kinds = []
        for request in (["refresh"], ["append", "lost"], ["refresh"]):
            with pytest.raises(Refused) as caught:
                await old.call(*request)
            kinds.append(caught.value.args[0])
            assert line_about(raised) in caught.value.args[1]
        assert kinds == ["Corrupt", "CommitUnknown", "Corrupt"]
        await new._log.wal.refresh()
        assert await read(new) == [dense("a", "b"), []]


@pytest.mark.parametrize(
    ("has_checkpoint", "is_collected"), [(False, False), (True, False), (True, True)]
)
async def test_after_the_raise_a_broker_of_0_1_does_not_start(
    folder: Path, start: Callable[[], OldBroker], has_checkpoint: bool, is_collected: bool
) -> None:
    await found_level_1(folder)
    async with this_version(folder) as new:
        await new.topics.create("t", PARTITIONS, {})
        await raise_level(new._log.wal, 2)
        raised = new.state.seq
        await append(new, "a")
        if has_checkpoint:
            await new._log.wal.checkpoint()
        if is_collected:
            await new._log.wal.store.delete([object_keys.wal(seq) for seq in range(1, raised + 1)])
    old = start()
    with pytest.raises(Refused) as caught:
        await old.call("open")
    lines = old.log.read_text()
    if is_collected:
        assert caught.value.args[0] == "StoreUnfit"
        assert "no checkpoint that can be read" in caught.value.args[1]
    else:
        assert caught.value.args == ("Corrupt", line_about(raised))
    if has_checkpoint:
        assert "checkpoint format 2, this version reads 1" in lines


async def test_0_1_refuses_newest_level(folder: Path, start: Callable[[], OldBroker]) -> None:
    async with this_version(folder) as new:
        await new.topics.create("t", PARTITIONS, {})
    with pytest.raises(Refused) as caught:
        await start().call("open")
    line = f"{folder.as_uri()} has format {format_levels.NEWEST}, this version reads 1"
    assert caught.value.args == ("StoreUnfit", line)
