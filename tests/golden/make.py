"""Writes the golden objects of the current format version: `python -m tests.golden.make`.

A small cluster, made by the code of its day with a clock and ids that repeat: everything but the
table's files comes out the same to the byte, today as then, or the format has changed. What is
written once stays: a new format gets a folder of its own.
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from storage import chunk as chunks
from storage import keys
from storage import segment as segments
from storage.chunk import Rows
from storage.entry import (
    FORMAT,
    AddPartitions,
    AlterTopic,
    AnyAction,
    Chunk,
    CreateTopic,
    DeleteTopic,
    Draft,
    HotMark,
    IdempotencyKey,
    RetireHotLog,
    Sealed,
)
from storage.folder import FolderStore
from storage.hot import ClosedSegment, PartRows, Request
from storage.hotlog import HotLog
from storage.manifest import seal_app_id
from storage.model import SegmentFile
from storage.table import DeltaManifest
from storage.wal import Wal
from tests.support.clock import ManualClock

FOLDER = Path(__file__).parent / f"v{FORMAT}"
HOT = "hot"
"""The local hot log lies beside the store's objects here."""

CLUSTER_ID = "0123456789abcdef0123456789abcdef"
FLIGHTS, AUDIT, GONE = (letter * 32 for letter in "abc")
DEAD_LOG, LIVING_LOG = "d" * 32, "e" * 32
LOG_APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
START_MS = 1_700_000_000_000
SEALED_END = 3
LARGE = 400
"""Rows of a chunk that is worth packing."""


def rows_of_flights() -> Rows:
    """Keys and values that are null, empty, JSON and none; headers that repeat and are null."""
    return Rows(
        [START_MS, START_MS + 1, START_MS - 5, START_MS + 3],
        [b'"EWR"', None, b"", b"\x00\xff"],
        [b'{"dep_delay":2}', None, b"", b"\xfe not JSON"],
        [None, [("a", b"1"), ("a", None), ("\u00e9", b"")], [], None],
    )


def rows_of_json(*values: str, at_ms: int = START_MS) -> Rows:
    return Rows(
        [at_ms + index for index in range(len(values))],
        [None] * len(values),
        [value.encode() for value in values],
    )


def large_rows() -> Rows:
    return rows_of_json(*(f'{{"row":{number},"pad":"{"x" * 60}"}}' for number in range(LARGE)))


class Making:
    """A broker's hand, step by step."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(7, start_ms=START_MS)
        self.folder = folder
        self.store = FolderStore(folder)
        self.wal = Wal(self.store, self.clock, "golden-broker")

    async def make(self) -> None:
        await self.wal.open(CLUSTER_ID)
        await self.commit(
            self.request(actions=[CreateTopic("flights", FLIGHTS, 2, {"retention.ms": "1000"})]),
            self.request(actions=[CreateTopic("audit.log", AUDIT, 1, LOG_APPEND_TIME)]),
            self.request(actions=[CreateTopic("gone", GONE, 1, {})]),
            self.request(actions=[CreateTopic("gone", "9" * 32, 1, {})]),  # refused
            self.request(actions=[AddPartitions(FLIGHTS, 3)]),
        )
        await self.commit(*self.requests_of_several_commits())
        await self.commit(self.large_request(), codec="lz4")
        await self.commit(self.large_request(), codec="zstd")
        await self.refer()
        await self.seal()
        await self.commit(
            self.request(
                actions=[
                    Sealed(FLIGHTS, 0, SEALED_END),
                    RetireHotLog(DEAD_LOG),
                    AlterTopic(FLIGHTS, {"retention.ms": None, "segment.ms": "60000"}),
                ]
            ),
            self.request(actions=[DeleteTopic(GONE)]),
        )
        await self.wal.checkpoint()
        await self.commit(self.request({1: rows_of_json('"after the checkpoint"')}))
        await self.wal.close()
        await self.store.close()
        await self.keep_locally()

    def request(
        self,
        parts: dict[int, Rows] | None = None,
        *,
        topic_id: str = FLIGHTS,
        actions: list[AnyAction] | None = None,
        key: IdempotencyKey | None = None,
        hot: HotMark | None = None,
        is_json: bool = True,
    ) -> Request:
        return Request(
            self.clock.new_id(),
            [PartRows(topic_id, partition, rows) for partition, rows in (parts or {}).items()],
            0,
            is_json=is_json,
            actions=actions or [],
            key=key,
            hot=hot,
            topic_id=None if actions else topic_id,
        )

    def requests_of_several_commits(self) -> list[Request]:
        """Two that share a commit, one with a key, a retry of it, two of hot logs, a refused."""
        key = IdempotencyKey("order-17", bytes(range(16)), 3)
        stamped = rows_of_json('"stamped by the log"', at_ms=5)
        return [
            self.request({0: rows_of_flights()}, is_json=False),
            self.request({0: rows_of_json("1"), 2: rows_of_json("2", "3")}),
            self.request({1: rows_of_json('"keyed"')}, key=key),
            self.request({1: rows_of_json('"a retry, not to be seen"')}, key=key),
            self.request({0: rows_of_json('"hot"')}, hot=HotMark(DEAD_LOG, 3)),
            self.request({0: stamped}, topic_id=AUDIT, hot=HotMark(LIVING_LOG, 0)),
            self.request({0: rows_of_json('"refused"')}, topic_id="f" * 32),
        ]

    def large_request(self) -> Request:
        return self.request({2: large_rows(), 1: rows_of_json('"small"')})

    async def commit(self, *requests: Request, codec: str = "") -> None:
        self.clock.advance(1.5)
        await self.wal.commit(ClosedSegment(requests).encode(codec).draft)

    async def refer(self) -> None:
        """An entry whose chunk lies in an object of its own, after eight bytes of another's."""
        self.clock.advance(1.5)
        unique = self.clock.new_id().hex()
        key = f"{keys.DATA}{unique[:2]}/{unique}"  # before names said a time; readers take any
        encoded = ClosedSegment([self.request({2: rows_of_json('"referred"')})]).encode("")
        await self.store.create(key, [bytes(8), *encoded.draft.bodies])
        (chunk,) = encoded.draft.chunks
        referred = Chunk(
            **{name: getattr(chunk, name) for name in chunk.__struct_fields__[:2]},
            position=8,
            **{name: getattr(chunk, name) for name in chunk.__struct_fields__[3:-1]},
            data=key,
        )
        await self.wal.commit(Draft(encoded.draft.commits, [referred], []))

    async def seal(self) -> None:
        """The first records of flights-0 become a segment of its table."""
        batch = chunks.batch_of_rows([rows_of_flights()]).slice(0, SEALED_END)
        written = segments.write([chunks.with_offsets(batch, 0)], codec="zstd", is_json=False)
        prefix = self.wal.state.topic("flights").prefix
        path = keys.segment(0, 0, SEALED_END, self.clock.new_id().hex())
        await self.store.create(f"{prefix}/{path}", [memoryview(written.body)])
        stamps = (written.timestamp_min, written.timestamp_max)
        file = SegmentFile(path, 0, 0, SEALED_END, written.size, written.rows, *stamps)
        table = DeltaManifest(self.store, prefix, "flights", self.clock)
        await table.add([file], {seal_app_id(0): SEALED_END})
        table.close()

    async def keep_locally(self) -> None:
        """A hot log of three requests, as a killed process leaves it, a torn frame at its end."""

        def ignore(_: Request) -> None:
            pass

        hot = HotLog(self.folder / HOT, CLUSTER_ID, LIVING_LOG, ignore, ignore)
        key = IdempotencyKey("order-18", bytes(16), 3)
        batch: pa.RecordBatch = chunks.batch_of_rows([rows_of_flights()])
        await hot.append(self.request({0: rows_of_json('"hot"')}, topic_id=AUDIT))  # is in the WAL
        await hot.append(self.request({0: rows_of_json('"acked"', '"both"')}, key=key))
        parts = [PartRows(FLIGHTS, 1, batch), PartRows(AUDIT, 0, rows_of_json('"two topics"'))]
        await hot.append(Request(self.clock.new_id(), parts, 0))
        await hot.close(is_drained=False)
        (path,) = (self.folder / HOT).glob("*.hot")
        path.write_bytes(path.read_bytes() + b"\x10\x00\x00\x00torn")


def make(folder: Path) -> None:
    """Make the cluster there."""
    asyncio.run(Making(folder).make())
    shutil.rmtree(folder / ".tmp")


def main() -> int:
    if FOLDER.exists():
        sys.stderr.write(f"{FOLDER} is there already, and golden: it is never written again\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / FOLDER.name)
        shutil.copytree(Path(folder) / FOLDER.name, FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
