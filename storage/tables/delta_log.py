"""The files of a Delta log: commits read through the store, and made durable in a folder."""

import asyncio
import contextlib
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.storage.core.errors import Corrupt, ObjectNotFound, TableInDoubt
from tidelog.storage.runtime.tasks import together
from tidelog.storage.store.folder import sync_path
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.delta_json import added_of, commit_of, removed_of, transactions_of
from tidelog.storage.tables.manifest import Removal, TableCommit

VERSIONS_MAX = 100
"""Number of newest versions that `sync_log` syncs after a start: twice the versions between two
checkpoints."""
KEPT_BYTES_MAX = 16 * 1024
"""Of a commit that stays in memory, compressed, until a checkpoint covers it."""
_READS_MAX = 16  # commits that are read at the same time
_LOG_FILES = ("json", "checkpoint.parquet")
_COMMIT = re.compile(r"/(\d{20})\.json$")


async def commits_to(
    store: ObjectStore, prefix: str, version: int, count: int
) -> list[TableCommit]:
    """Return up to `count` commits: that of `version` and those before it, the newest first.

    Version 0 is left out. If older commits were deleted, return fewer.
    """
    commits: list[TableCommit] = []
    while version > 0 and len(commits) < count:
        key = f"{prefix}/_delta_log/{version:020d}.json"
        try:
            commits.append(commit_of(await store.get(key), version))
        except ObjectNotFound:
            break  # deleted by a cleanup of the log
        except msgspec.DecodeError as error:
            raise Corrupt(key, f"is not a commit: {error}") from error
        version -= 1
    return commits


class LogTail:
    """The last checkpoint's version (-1: none), and the commits after it, up to a version.

    They are all that the next checkpoint needs, so it costs no read of them. A commit of more than
    KEPT_BYTES_MAX is read again instead: it names many files, each of which was a PUT.
    """

    def __init__(self, checkpoint: int, commits: Iterable[bytes] = ()) -> None:
        self.checkpoint = checkpoint
        self._commits: list[bytes | None] = []
        for body in commits:
            self.append(body)

    @property
    def version(self) -> int:
        return self.checkpoint + len(self._commits)

    def append(self, body: bytes) -> None:
        packed = zlib.compress(body, 1) if len(body) <= KEPT_BYTES_MAX else None
        self._commits.append(packed)

    async def read(self, store: ObjectStore, prefix: str) -> tuple[bytes | None, list[bytes]]:
        """Return the checkpoint's Parquet, if there is one, and the commits after it.

        Raises ObjectNotFound, Unavailable.
        """
        log = f"{prefix}/_delta_log"

        async def commit(number: int, packed: bytes | None) -> bytes:
            if packed is not None:
                return zlib.decompress(packed)
            return await store.get(f"{log}/{number:020d}.json")

        checkpoint = (
            await store.get(checkpoint_key(prefix, self.checkpoint))
            if self.checkpoint >= 0
            else None
        )
        numbered = enumerate(self._commits, self.checkpoint + 1)
        reads = [commit(number, packed) for number, packed in numbered]
        return checkpoint, await together(*reads, at_once=_READS_MAX)


async def last_checkpoint(store: ObjectStore, prefix: str) -> int:
    """Return the version of the last checkpoint, -1 if there is none. Raises Unavailable."""
    try:
        return _pointer.decode(await store.get(pointer_key(prefix))).version
    except (ObjectNotFound, msgspec.DecodeError):
        return -1


def checkpoint_key(prefix: str, version: int) -> str:
    return f"{prefix}/_delta_log/{version:020d}.checkpoint.parquet"


def pointer_key(prefix: str) -> str:
    """Return the key of the object that names the last checkpoint."""
    return f"{prefix}/_delta_log/_last_checkpoint"


async def transactions_at(
    store: ObjectStore, prefix: str, version: int
) -> tuple[dict[str, int], LogTail] | None:
    """Return all application transactions of a version, and the log's tail up to it.

    They are in the last checkpoint and the commits after it. If the log has another form than
    tidelog and deltalake write, or if its last checkpoint is after `version`, return None.
    """
    log = f"{prefix}/_delta_log"
    transactions, checkpoint = dict[str, int](), -1
    try:
        with contextlib.suppress(ObjectNotFound):
            last = _pointer.decode(await store.get(pointer_key(prefix)))
            if last.parts is not None or last.version > version:
                return None
            body = await store.get(checkpoint_key(prefix, last.version))
            transactions, checkpoint = await asyncio.to_thread(_transactions_in, body), last.version
        if version - checkpoint > VERSIONS_MAX + 1:
            return None
        keys = [f"{log}/{number:020d}.json" for number in range(checkpoint + 1, version + 1)]
        bodies = await together(*map(store.get, keys), at_once=_READS_MAX)
        for body in bodies:
            transactions |= transactions_of(body)
    except (ObjectNotFound, msgspec.DecodeError, pa.ArrowException, OSError, KeyError):
        return None
    return transactions, LogTail(checkpoint, bodies)


def _transactions_in(checkpoint: bytes) -> dict[str, int]:
    # Not `pq.read_table`: of some files it returns the fields without the column around them.
    file = pq.ParquetFile(pa.BufferReader(checkpoint))
    column: Any = file.read(columns=["txn.appId", "txn.version"]).column("txn")
    app_ids, versions = (pc.struct_field(column, name).to_pylist() for name in ("appId", "version"))
    pairs = zip(app_ids, versions, strict=True)
    return {app_id: version for app_id, version in pairs if app_id is not None}


async def removed_since(store: ObjectStore, prefix: str, since_ms: int) -> list[Removal]:
    """Return the commits at or after `since_ms`, by the store's clock, that removed files."""
    removals: list[Removal] = []
    async for info in store.list(f"{prefix}/_delta_log/"):
        if info.modified_ms >= since_ms and _COMMIT.search(info.key):
            body = await store.get(info.key)
            try:
                if removed := removed_of(body):
                    added = frozenset(added_of(body))
                    removals.append(Removal(info.modified_ms, frozenset(removed), added))
            except msgspec.DecodeError as error:
                raise Corrupt(info.key, f"is not a commit: {error}") from error
    return removals


async def find_damage(store: ObjectStore, prefix: str) -> None:
    """Raise TableInDoubt if a version of the log is no commit.

    Deltalake cannot read such a table, so each retry would fail.
    """
    async for info in store.list(f"{prefix}/_delta_log/"):
        name = _COMMIT.search(info.key)
        if name is None:
            continue
        try:
            commit_of(await store.get(info.key), int(name[1]))
        except msgspec.DecodeError as error:
            why = f"{info.key} is not a commit: {error}"
            raise TableInDoubt(prefix, int(name[1]), why) from error
        except ObjectNotFound:
            continue  # deleted by a cleanup of the log


def sync_log(directory: Path, first: int, last: int) -> None:
    """Sync versions [first, last] of a log and their names, so that they survive a loss of power.

    Without this sync, the WAL could record a seal that the table has lost (I7). Versions of other
    writers are synced too, because a hole below `last` would make the whole table unreadable. After
    a start, `first` is 0. Then only the newest VERSIONS_MAX versions are synced, because each older
    version was synced by the process that wrote or loaded one of the VERSIONS_MAX versions after
    it.
    """
    versions = range(first or max(0, last - VERSIONS_MAX), last + 1)
    names = [f"{version:020d}.{kind}" for version in versions for kind in _LOG_FILES]
    for path in [*(directory / name for name in [*names, "_last_checkpoint"]), directory]:
        with contextlib.suppress(FileNotFoundError):
            sync_path(path)
    if first == 0:
        sync_path(directory.parent)


class _Checkpoint(msgspec.Struct):
    version: int
    parts: int | None = None


_pointer = msgspec.json.Decoder(_Checkpoint)
