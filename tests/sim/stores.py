"""The bucket that all share, and each process's way to it, on which everything can go wrong.

The bucket is right: create-if-absent is atomic, listings and reads are true at the moment at which
a request arrives there. Drawn are the time of that, and the answer and its time: slowly, out of
order, an error though it was done, an error and done later, 412 for one's own success. A request
that is on its way arrives whatever becomes of its sender.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
from deltalake.exceptions import DeltaError

from tests.support.records import TIME_MS
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, StoreRefused, Unavailable
from tidelog.storage.core.model import Part, SegmentFile
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created, ObjectInfo
from tidelog.storage.tables.commit_put import TableProperties
from tidelog.storage.tables.delta_json import commit_body, commit_of
from tidelog.storage.tables.manifest import ManifestVersion, SegmentColumns, TableChange

T = TypeVar("T")


COMMIT = re.compile(r"(.*)/_delta_log/(\d{20})\.json")
CHECKPOINT = re.compile(r"/(\d{20})\.checkpoint\.parquet$")
PROPERTIES = TableProperties(
    is_plain=True,
    is_append_only=False,
    checkpoint_interval=5,
    log_retention_ms=7 * 86_400_000,
    file_retention_ms=7 * 86_400_000,
)
"""Of each table, with a checkpoint after a few commits."""
METADATA = b"""
{"protocol":{"minReaderVersion":1,"minWriterVersion":2}}
{"metaData":{"id":"1","format":{"provider":"parquet","options":{}},"schemaString":"{}",\
"partitionColumns":["partition"],"configuration":{}}}"""
"""Of version 0; only checkpoints read it."""


class Weather(NamedTuple):
    """The likelihood that a call goes wrong, and the time of a call.

    The time is lognormal, by its median and its spread.
    """

    lost: float = 0.0
    """A create whose outcome is unknown: not done, done, done later; or 412 for one's own."""
    refused: float = 0.0
    """A create that was definitely not done: no space."""
    failed: float = 0.0
    """Any other call that raises: throttled, reset, 500."""
    median_s: float = 0.02
    spread: float = 0.5
    late_s: float = 1.0
    raises: float = 0.0
    """A function of a broker, in a flush or a seal, that raises what no caller expects (faults)."""
    refused_part: bytes = b""
    """An entry with these bytes is definitely refused, as one that is too large is; empty: none."""


class Commit(NamedTuple):
    """One version of a table."""

    added: Sequence[SegmentFile]
    removed: Sequence[SegmentFile]
    transactions: Mapping[str, int]
    data_change: bool = True


class Bucket(MemoryStore):
    """The objects, the tables, and the store's own clock, which is the loop's."""

    def __init__(self, *, is_copy: bool = False) -> None:
        """`is_copy`: objects come in any order, and no table is followed."""
        super().__init__()
        self.tables: dict[str, list[Commit]] = {}
        """By prefix: what the commits there were when they were made; damage is of objects."""
        self._is_copy = is_copy
        self.on_created: Callable[[str, bytes], None] = lambda key, body: None

    @property
    def now_ms(self) -> int:
        return TIME_MS + int(asyncio.get_running_loop().time() * 1000)

    @now_ms.setter
    def now_ms(self, _: int) -> None:
        """The loop's it stays."""

    # At once: the moment at which a request arrives.

    def read(self, key: str) -> bytes:
        return self._object(key)

    def make(self, key: str, body: bytes) -> Created:
        if key in self._objects:
            return Created.EXISTS
        self._objects[key] = (body, self.now_ms)
        self._follow(key, body)
        self.on_created(key, body)
        return Created.DONE

    def write(self, key: str, body: bytes) -> None:
        self._objects[key] = (body, self.now_ms)
        with contextlib.suppress(msgspec.DecodeError):  # damage
            self._follow(key, body)

    def _follow(self, key: str, body: bytes) -> None:
        """Take a commit into its table; a table has no hole."""
        name = COMMIT.fullmatch(key)
        if name is None or self._is_copy:
            return
        commits, version = self.tables.setdefault(name[1], []), int(name[2])
        assert version <= len(commits), f"{key} is made, the newest is {len(commits) - 1}"
        read = commit_of(body, version)
        files = {file.path: file for commit in commits for file in commit.added}
        removed = [files[path] for path in read.removed if path in files]
        commit = Commit(read.added, removed, read.transactions, read.data_change)
        commits[version : version + 1] = [commit]

    def infos(self, prefix: str, start_after: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(key, len(body), modified_ms)
            for key, (body, modified_ms) in sorted(self._objects.items())
            if key.startswith(prefix) and key > start_after
        ]

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)


class Way:
    """One process's way to the bucket: an ObjectStore, and where deltalake would open tables."""

    url = "sim://"

    def __init__(
        self,
        bucket: Bucket,
        draws: random.Random,
        weather: Callable[[], Weather],
        note: Callable[[str], None],
        world: Any,
    ) -> None:
        self.bucket = bucket
        self.weather = weather
        self.seen_ms = 0
        self.on_put: Callable[[], None] | None = None
        """Called when the next entry is half sent; if the process stops there, so does the PUT."""
        self.on_upload: Callable[[], None] | None = None
        """Called when the next upload is sent; it arrives also if the process stops there."""
        self._draws = draws
        self._note = note
        self._world = world

    async def get(self, key: str) -> bytes:
        return await self._ask("get", key, lambda: self.bucket.read(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        def found() -> bytes:
            return self.bucket.read(key)[start : start + length]

        return await self._ask("get_range", key, found)

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        body = b"".join(parts)
        weather, draws = self.weather(), self._draws
        fault = draws.random()
        is_odd = (
            weather.refused_part
            and key.startswith(object_keys.WAL)
            and weather.refused_part in body
        )
        if is_odd or fault < weather.refused:
            await self._ask("refuse", key, lambda: None)
            raise StoreRefused(f"no space for {key}")
        if fault >= weather.refused + weather.lost:
            return await self._ask("create", key, lambda: self.bucket.make(key, body))
        match draws.randrange(5):
            case 0:
                await self._ask("create, not done", key, lambda: None)
            case 1:
                late_s = draws.random() * weather.late_s
                _ = self._world.later(self._s() + late_s, self.bucket.make, key, body)
                await self._ask("create, done later", key, lambda: None)
            case 2:
                # The transport repeats the request; the second answer shows the first one's effect.
                await self._ask("create, done twice", key, lambda: self.bucket.make(key, body))
                return await self._ask("create", key, lambda: self.bucket.make(key, body))
            case _:
                await self._ask("create, answer lost", key, lambda: self.bucket.make(key, body))
        return Created.UNKNOWN

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        body = b"".join(parts)
        await self._ask("put", key, lambda: self.bucket.write(key, body))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        infos = await self._ask("list", prefix, lambda: self.bucket.infos(prefix, start_after))
        for info in infos:
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        deleted_keys = list(keys)
        name = f"{deleted_keys[0]} and {len(deleted_keys) - 1} more" if deleted_keys else ""
        await self._ask("delete", name, lambda: self.bucket.remove(deleted_keys))

    async def close(self) -> None:
        """Nothing to release."""

    def table_uri(self, key: str) -> str:
        return key

    # -- how

    def _s(self) -> float:
        weather = self.weather()
        return weather.median_s / 2 * self._draws.lognormvariate(0.0, weather.spread)

    async def _ask(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        """The request goes its way; most do what they do, dead or alive who asked."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        fault = self._draws.random() if verb in {"get", "get_range", "put", "list", "delete"} else 1
        is_failed = fault < self.weather().failed
        is_done = not is_failed or self._draws.random() < 0.5
        back_s = self._s()

        def arrive() -> None:
            result: T | Exception
            try:
                result = effect() if is_done else Unavailable(f"{verb} {key}: 503")
            except LogError as error:
                result = error
            if is_failed:
                result = Unavailable(f"{verb} {key}: no answer")
            self._note(f"{verb} {key} {type(result).__name__}")
            _ = self._world.later(back_s, _give, answer, result)

        if (
            self.on_put is not None
            and verb.startswith("create")
            and key.startswith(object_keys.WAL)
        ):
            self.on_put()
            self.on_put = None
            _ = asyncio.get_running_loop().call_later(self._s(), arrive)
        elif self.on_upload is not None and verb == "create" and key.startswith(object_keys.DATA):
            self.on_upload()
            self.on_upload = None
            _ = self._world.later(self._s(), arrive)
        elif self._draws.random() < 0.3:
            # Not all of it has left the machine: it goes on, or is lost, with who sends it.
            _ = asyncio.get_running_loop().call_later(self._s(), arrive)
        else:
            _ = self._world.later(self._s(), arrive)
        try:
            outcome = await answer
        except Exception:
            self.seen_ms = self.bucket.now_ms
            raise
        self.seen_ms = self.bucket.now_ms
        return outcome


def _give(answer: asyncio.Future[Any], result: object) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


@dataclass
class Tables:
    """The role of deltalake for storage.tables, on the bucket: `Tables.at` replaces `_Delta`.

    A commit is a create-if-absent of the next version, rebased over versions that others made
    meanwhile unless they moved one of its transactions, as Delta does.
    """

    bucket: Bucket
    draws: random.Random
    weather: Callable[[], Weather]
    note: Callable[[str], None]
    opened: int = field(default=0)
    properties: TableProperties = PROPERTIES
    damaged: set[tuple[str, int]] = field(default_factory=set)
    """Prefix and version of commits that no reader can decode."""

    def at(self, uri: str, name: str, clock: object) -> "MemoryDelta":
        self.opened += 1
        return MemoryDelta(self, uri)

    def write(self, prefix: str, commit: Commit) -> None:
        """Make the next version, as deltalake does, or any other engine."""
        commits = self.bucket.tables.setdefault(prefix, [])
        version = len(commits)
        change = TableChange(commit.added, commit.transactions, commit.removed, commit.data_change)
        body = commit_body(change, self.bucket.now_ms, f"of others {version}")
        body += b"" if version else METADATA
        outcome = self.bucket.make(f"{prefix}/_delta_log/{version:020d}.json", body)
        assert outcome is Created.DONE, "the log of a table is deleted while it is in use"
        commits[version] = commit  # it says more of files that are no segments
        self.note(f"table {prefix} {version} {commit.transactions}")

    def checkpoint_of(self, prefix: str) -> int:
        """Return the version of the newest checkpoint, -1 if there is none."""
        infos = self.bucket.infos(f"{prefix}/_delta_log/", "")
        names = [CHECKPOINT.search(info.key) for info in infos]
        return max((int(name[1]) for name in names if name), default=-1)

    def fails(self) -> bool:
        return self.draws.random() < self.weather().failed

    def is_lost(self) -> bool:
        return self.draws.random() < self.weather().lost


class MemoryDelta:
    """One process's DeltaTable: the blocking half of storage.tables.delta."""

    def __init__(self, tables: Tables, prefix: str) -> None:
        self._tables = tables
        self._prefix = prefix
        self.table: int | None = None
        """The loaded version."""

    @property
    def version(self) -> int:
        return -1 if self.table is None else self.table

    @property
    def _commits(self) -> list[Commit]:
        return self._tables.bucket.tables.setdefault(self._prefix, [])

    def refresh(self, options: object) -> None:
        if self._tables.fails():
            raise Unavailable(f"table {self._prefix} cannot be read: 503")
        first = max(self.version, self._tables.checkpoint_of(self._prefix)) + 1
        unread = range(first, len(self._commits))
        if any((self._prefix, version) in self._tables.damaged for version in unread):
            raise Unavailable(f"table {self._prefix} cannot be read: invalid JSON")
        if self._commits:
            self.table = len(self._commits) - 1

    def create(self, options: object) -> Exception | None:
        if self._commits:
            return DeltaError("a table is there already")
        if self._tables.is_lost() and self._tables.draws.random() < 0.5:
            return DeltaError("no answer")
        self._write(Commit((), (), {}))
        return DeltaError("no answer") if self._tables.is_lost() else None

    def commit(self, change: Any) -> None:
        assert self.table is not None
        is_lost = self._tables.is_lost()
        if is_lost and self._tables.draws.random() < 0.5:
            raise DeltaError("no answer")
        for later in self._commits[self.table + 1 :]:
            if moved := later.transactions.keys() & change.transactions.keys():
                raise DeltaError(f"{sorted(moved)} moved")
        transactions = change.all_transactions
        self._write(Commit(change.added, change.removed, transactions, change.data_change))
        if is_lost:
            raise DeltaError("no answer")

    def view(self, prefix: str) -> ManifestVersion:
        if self.table is None:
            return ManifestVersion(-1, prefix, SegmentColumns.of([]))
        return ManifestVersion(
            self.table, prefix, SegmentColumns.of(files_at(self._commits, self.table))
        )

    def files_at(self, version: int, prefix: str, options: object) -> SegmentColumns:
        return SegmentColumns.of(files_at(self._commits, version))

    def transaction_version(self, app_id: str) -> int | None:
        for commit in reversed(self._commits[: self.version + 1]):
            if app_id in commit.transactions:
                return commit.transactions[app_id]
        return None

    def properties(self) -> TableProperties | None:
        return None if self.table is None else self._tables.properties

    def close(self) -> None:
        self.table = None

    def checkpoint(self, options: object) -> None:
        raise AssertionError("tidelog makes the checkpoints of its own tables")

    def sync(self, version: int) -> None:
        """Do nothing: the bucket is durable."""

    def _write(self, commit: Commit) -> None:
        self._tables.write(self._prefix, commit)


def files_at(commits: Sequence[Commit], version: int) -> list[SegmentFile]:
    files: dict[str, SegmentFile] = {}
    for commit in commits[: version + 1]:
        for file in commit.removed:
            files.pop(file.path, None)
        files.update((file.path, file) for file in commit.added)
    return list(files.values())
