"""Writes the golden objects of levels that no release has yet: `python -m tests.golden.make`.

For each level of the format, a small cluster that began at it, made with a clock and ids that
repeat: everything but the table's files comes out the same to the byte, today as then, or the
format has changed. `raised` is a smaller one that began at level 1 and was raised to 2 and 3. Files
of a released level stay: a new level gets a folder of its own.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

import msgspec
import pyarrow as pa

from tests.support.clock import ManualClock
from tests.support.record_batches import NO_PRODUCER, checked
from tidelog.compaction.upgrade import raise_level
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import record_columns
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import Draft, Entry, HotMark, IdempotencyKey
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    AnyAction,
    Chunk,
    CommitOffsets,
    CreateTopic,
    DeleteOffsets,
    DeleteTopic,
    ExpireMember,
    GroupOffset,
    InitProducer,
    LeaveGroup,
    LoseRecords,
    ProducerBatch,
    ReleaseHold,
    RenewHold,
    ReserveProducers,
    RetireHotLog,
    Sealed,
    SetBounds,
    SetQuotas,
    SettledMember,
    SettleGroup,
    SetTopicDefaults,
    TakeHold,
)
from tidelog.storage.core.model import SegmentFile, TopicIdPartition
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.tables.delta import DeltaManifest
from tidelog.storage.tables.manifest import seal_app_id
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import DEFAULT_BOUNDS, ClusterIdentity
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.requests import AppendRequest, TopicRecords

HERE = Path(__file__).parent
RAISED = "raised"
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
ALICE, BOB = "User:alice", "User:bob"
MINE = "8" * 32
KEY = IdempotencyKey("order-19", bytes(16), 1)


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


def folder_of(level: int) -> Path:
    """The golden objects of a cluster that began at the level."""
    return HERE / f"v{level}"


class TimedFolder(FolderStore):
    """Its clock stands still."""

    @property
    def seen_ms(self) -> int:
        return START_MS + 77


class Making:
    """A broker's hand, step by step."""

    def __init__(self, folder: Path, level: int) -> None:
        self.clock = ManualClock(7, start_ms=START_MS)
        self.folder = folder
        self.level = level
        self.store = TimedFolder(folder)

    async def open(self) -> None:
        bounds = Bounds(300_000, 7_200_000) if self.level > format_levels.FIRST else DEFAULT_BOUNDS
        identity = ClusterIdentity(self.level, CLUSTER_ID, self.clock.now_ms(), bounds)
        await self.store.create(object_keys.CLUSTER, [msgspec.json.encode(identity)])
        self.wal = await WalView.open(
            self.store, self.clock, "golden-broker", cluster_id=CLUSTER_ID
        )

    async def make(self) -> None:
        await self.open()
        await self.commit(
            self.request(actions=[CreateTopic("flights", FLIGHTS, 2, {"retention.ms": "1000"})]),
            self.request(actions=[CreateTopic("audit.log", AUDIT, 1, LOG_APPEND_TIME)]),
            self.request(actions=[CreateTopic("gone", GONE, 1, {})]),
            self.request(actions=[CreateTopic("gone", "9" * 32, 1, {})]),  # refused
            self.request(actions=[AddPartitions(FLIGHTS, 3)]),
        )
        await self.commit(*self.requests_of_several_commits(), principal=ALICE)
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
        if self.level > 2:
            await self.commit_as_principals()
        if self.level > 3:
            await self.commit_batches()
        await self.wal.checkpoint()
        await self.commit(self.request({1: rows_of_json('"after the checkpoint"')}))
        await self.keep_locally()
        if self.level > format_levels.FIRST:
            await self.commit_with_store_time()
        await self.wal.close()
        await self.store.close()

    async def commit_as_principals(self) -> None:
        """The parts that belong to principals from level 3 on.

        A topic that grows, a group, a key that another principal uses too, a producer, and a quota
        of a bound.
        """
        key = IdempotencyKey("order-20", bytes(16), 3)
        offset = GroupOffset(FLIGHTS, 1, 2, metadata="m")
        batch = TopicRecords(FLIGHTS, 1, rows_of_json("4"), ProducerBatch(0, 0, 0))
        for request, principal in (
            (self.request(actions=[CreateTopic("mine", MINE, 1, {})]), ALICE),
            (self.request(actions=[AddPartitions(MINE, 3)]), BOB),
            (self.request(actions=[AddPartitions(AUDIT, 2)]), BOB),
            (self.request(actions=[CommitOffsets("group", -1, [offset])]), ALICE),
            (self.request({1: rows_of_json('"of Alice"')}, key=key), ALICE),
            (self.request({1: rows_of_json('"of Bob"')}, key=key), BOB),
            (self.request(actions=[InitProducer()]), ALICE),
            (AppendRequest([batch], 0, topic_id=FLIGHTS, commit_id=self.clock.new_id()), BOB),
            (self.request(actions=[SetQuotas(BOB, {"members": 5, "mutation_rate": 7})]), ""),
        ):
            await self.commit(request, principal=principal)

    async def commit_batches(self) -> None:
        """The parts of Kafka's protocol from level 4 on: reserved ids, and batches.

        One entry has two batches of one producer, one without a producer, and other rows.
        """
        await self.commit(self.request(actions=[ReserveProducers(1000)]))
        sent = [rows_of_flights(), rows_of_json("2"), rows_of_json("3", "1")]
        producers = [(1, 0, 0), (1, 0, len(sent[0])), NO_PRODUCER]
        requests = [
            AppendRequest(
                [
                    TopicRecords(
                        FLIGHTS,
                        1,
                        checked(rows, producer),
                        None if producer == NO_PRODUCER else ProducerBatch(*producer),
                    )
                ],
                0,
                commit_id=self.clock.new_id(),
            )
            for rows, producer in zip(sent, producers, strict=True)
        ]
        stamp = AppendRequest(
            [TopicRecords(AUDIT, 0, checked(rows_of_json("4")))], 0, commit_id=self.clock.new_id()
        )
        await self.commit(*requests, self.request({1: rows_of_json("5")}), stamp)
        await self.commit_client_groups()

    async def commit_client_groups(self) -> None:
        """A group of Kafka's clients that settles twice and loses a member, and an empty one.

        Also an offset that is deleted. Then defaults of topics that are set and removed.
        """
        members = [
            SettledMember("m-1", "", "app", "/10.0.0.1", 45_000, 300_000, b"m1", b"a1", ALICE),
            SettledMember("m-2", "pod", "app", "/10.0.0.2", 45_000, 300_000, b"m2", b"a2"),
        ]
        rebalance = SettleGroup("kafka", "b", 0, 1, "consumer", "range", "m-1", members)
        again = SettleGroup("kafka", "b", 1, 2, "consumer", "range", "m-2", members[::-1])
        alone = SettleGroup("alone", "b", 0, 1, "connect", "mine", "m-2", members[1:])
        offsets = [GroupOffset(FLIGHTS, number, 1) for number in (0, 1)]
        for action in (
            rebalance,
            again,
            CommitOffsets("kafka", 2, offsets, "m-1"),
            DeleteOffsets("kafka", [TopicIdPartition(FLIGHTS, 1)]),
            LeaveGroup("kafka", "m-1"),
            alone,
            ExpireMember("alone", "m-2", 1),
            SetTopicDefaults({"log.retention.bytes": "9", "num.partitions": "3"}),
            SetTopicDefaults({"log.cleanup.policy": "compact", "num.partitions": None}),
        ):
            await self.commit(self.request(actions=[action]), principal=ALICE)

    async def make_raised(self) -> None:
        """A cluster that an entry raises from level 1 to 2, and one raised to level 3.

        A commit and a checkpoint at level 1, the entry, both at level 2, each action that level 1
        does not have; and the same at level 3.
        """
        await self.open()
        await self.commit(
            self.request(actions=[CreateTopic("flights", FLIGHTS, 1, {})]),
            self.request({0: rows_of_json("1")}, hot=HotMark(LIVING_LOG, 0)),
        )
        await self.wal.checkpoint()
        self.clock.advance(1.5)
        await raise_level(self.wal, 2)
        await self.commit(self.request({0: rows_of_json("2")}), principal=ALICE)
        await self.wal.checkpoint()
        await self.commit(
            self.request(actions=[LoseRecords(FLIGHTS, 0, 0, 1)]),
            self.request(
                actions=[SetBounds(wal_retention_ms=5_000_000, file_grace_ms=172_800_000)]
            ),
            self.request(actions=[TakeHold("first", 60_000), TakeHold("second", 60_000)]),
            self.request(actions=[RenewHold("first", 90_000), ReleaseHold("second")]),
        )
        await self.wal.checkpoint()
        await raise_level(self.wal, 3)
        await self.commit(self.request({0: rows_of_json("3")}, key=KEY), principal=ALICE)
        await self.wal.checkpoint()
        await raise_level(self.wal, 4)
        await self.commit(self.request(actions=[ReserveProducers(10)]))
        await self.wal.checkpoint()
        await self.wal.close()
        await self.store.close()

    def request(
        self,
        parts: dict[int, Rows] | None = None,
        *,
        topic_id: str = FLIGHTS,
        actions: list[AnyAction] | None = None,
        key: IdempotencyKey | None = None,
        hot: HotMark | None = None,
        is_json: bool = True,
        principal: str = "",
    ) -> AppendRequest:
        return AppendRequest(
            [TopicRecords(topic_id, partition, rows) for partition, rows in (parts or {}).items()],
            0,
            is_json=is_json,
            actions=actions or [],
            key=key,
            hot=hot,
            topic_id=None if actions else topic_id,
            commit_id=self.clock.new_id(),
            principal=principal,
        )

    def requests_of_several_commits(self) -> list[AppendRequest]:
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

    def large_request(self) -> AppendRequest:
        return self.request({2: large_rows(), 1: rows_of_json('"small"')})

    async def commit(self, *requests: AppendRequest, codec: str = "", principal: str = "") -> None:
        """An entry. `principal` is that of the first commit; level 1 does not store it."""
        self.clock.advance(1.5)
        draft = ClosedSegment(requests, self.clock.new_id).encode(codec).draft
        first, *other_commits = draft.commits
        first = msgspec.structs.replace(first, principal=principal)
        await self.wal.commit(draft._replace(commits=[first, *other_commits]))

    async def commit_with_store_time(self) -> None:
        """An entry of a writer that knows the time of the store's clock."""
        self.clock.advance(1.5)
        request = self.request({0: rows_of_json('"store time"')})
        draft = ClosedSegment([request], self.clock.new_id).encode("").draft
        state = self.wal.state
        entry = Entry(
            self.level,
            state.seq + 1,
            state.hash,
            self.clock.new_id(),
            "another-broker",
            self.clock.now_ms(),
            draft.chunks,
            draft.commits,
            store_ms=START_MS + 77,
        )
        header, _ = entries.encode_header(entry)
        parts = [header, *draft.bodies, *entries.copy_of(entry, header)]
        await self.store.create(object_keys.wal(entry.seq), parts)
        await self.wal.refresh()

    async def refer(self) -> None:
        """An entry whose chunk lies in an object of its own, after eight bytes of another's."""
        self.clock.advance(1.5)
        unique = self.clock.new_id().hex()
        key = (
            f"{object_keys.DATA}{unique[:2]}/{unique}"  # before names said a time; readers take any
        )
        request = self.request({2: rows_of_json('"referred"')})
        encoded = ClosedSegment([request], self.clock.new_id).encode("")
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
        batch = record_columns.batch_of_rows([rows_of_flights()]).slice(0, SEALED_END)
        written = segments.write(
            [chunks.with_offsets(batch, 0)], codec="zstd", is_json=False, level=self.level
        )
        prefix = self.wal.state.topic("flights").prefix
        path = object_keys.segment(0, 0, SEALED_END, self.clock.new_id().hex())
        await self.store.create(f"{prefix}/{path}", [memoryview(written.body)])
        stamps = (written.timestamp_min, written.timestamp_max)
        file = SegmentFile(path, 0, 0, SEALED_END, written.size, written.rows, *stamps)
        # A clock of its own: ids of commits to tables must not move those of the WAL.
        table = DeltaManifest(self.store, prefix, "flights", ManualClock(9))
        await table.add([file], {seal_app_id(0): SEALED_END})

    async def keep_locally(self) -> None:
        """A hot log of three requests, as a killed process leaves it, a torn frame at its end."""

        def ignore(_: AppendRequest) -> None:
            pass

        hot = HotLog(self.folder / HOT, CLUSTER_ID, LIVING_LOG, ignore, ignore, lambda: self.level)
        key = IdempotencyKey("order-18", bytes(16), 3)
        batch: pa.RecordBatch = record_columns.batch_of_rows([rows_of_flights()])
        await hot.append(self.request({0: rows_of_json('"hot"')}, topic_id=AUDIT))  # is in the WAL
        both = rows_of_json('"acked"', '"both"')
        await hot.append(self.request({0: both}, key=key, principal=ALICE))
        parts = [
            TopicRecords(FLIGHTS, 1, batch),
            TopicRecords(AUDIT, 0, rows_of_json('"two topics"')),
        ]
        await hot.append(AppendRequest(parts, 0, commit_id=self.clock.new_id()))
        await hot.close(is_drained=False)
        (path,) = (self.folder / HOT).glob("*.hot")
        path.write_bytes(path.read_bytes() + b"\x10\x00\x00\x00torn")


def make(folder: Path, name: str) -> None:
    """Make the cluster of this name there."""
    if name == RAISED:
        asyncio.run(Making(folder, format_levels.FIRST).make_raised())
    else:
        asyncio.run(Making(folder, int(name.removeprefix("v"))).make())
    shutil.rmtree(folder / ".tmp")


def main() -> None:
    names = [
        folder_of(level).name
        for level in range(format_levels.RELEASED + 1, format_levels.NEWEST + 1)
    ]
    for name in [*names, RAISED] if names else []:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / name, name)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(Path(folder) / name, HERE / name)


if __name__ == "__main__":
    main()
