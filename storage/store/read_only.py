"""A read-only store: it creates no folder, has no probe and writes no object.

Readers beside the brokers (Spark's driver and executors) must work on a read-only mount and with
credentials that cannot write. For S3 they use `S3Store`, which writes nothing by itself. For a
folder they cannot use `FolderStore`, because it creates its temporary directory when it opens.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from tidelog.storage.core.errors import ObjectNotFound, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore
from tidelog.storage.store.open import folder_of, open_store
from tidelog.storage.store.s3_options import S3Options


async def open_to_read(url: str, s3: S3Options | None = None) -> ObjectStore:
    """Open `file:///folder`, a path, or `s3://bucket/prefix`; raises StoreUnfit, Unavailable."""
    if urlsplit(url).scheme == "memory":
        raise StoreUnfit("memory:// exists inside one process only: no other process can read it")
    folder = folder_of(url)
    if folder is not None:
        return ReadOnlyFolder(folder)
    return await open_store(url, s3=s3)


class ReadOnlyFolder:
    """A read-only form of `FolderStore`. Holds no open file. Safe for concurrent tasks."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))
        try:
            os.listdir(self._root)
        except PermissionError as error:
            raise StoreUnfit(f"{self.url} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise StoreUnfit(f"{self.url} does not exist or is not a folder") from error

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def seen_ms(self) -> int:
        return 0  # it writes no file

    def table_uri(self, key: str) -> str:
        return str(self._root / key)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self._read, key, 0, -1)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await asyncio.to_thread(self._read, key, start, length)

    def map(self, key: str) -> pa.Buffer:
        """Map the object into memory.

        Objects are immutable, and a deleted object stays readable while it is mapped.
        """
        with self._failing(key), pa.memory_map(str(self._root / key)) as file:
            return file.read_buffer()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        # Readers list `wal/` and `checkpoints/`, which are flat and small.
        for info in await asyncio.to_thread(lambda: sorted(self._walk(prefix))):
            if info.key > start_after:
                yield info

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        raise StoreRefused(f"{self.url} is opened read-only: {key} was not written")

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        raise StoreRefused(f"{self.url} is opened read-only: {key} was not written")

    async def delete(self, keys: Iterable[str]) -> None:
        raise StoreRefused(f"{self.url} is opened read-only: nothing was deleted")

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _read(self, key: str, start: int, length: int) -> bytes:
        with self._failing(key), open(self._root / key, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(length)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for directory, _, names in os.walk(self._root / prefix.rpartition("/")[0]):
            for name in names:
                path = Path(directory, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        stat = path.stat()
                        yield ObjectInfo(key, stat.st_size, stat.st_mtime_ns // 1_000_000)

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectNotFound(key) from None
        except OSError as error:
            raise Unavailable(f"{self.url}: {key} cannot be read: {error}") from error
