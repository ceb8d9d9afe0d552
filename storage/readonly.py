"""A store opened to read: no folder is made, nothing is tried, no object is written.

What reads a log beside its brokers (Spark, on a driver and on its executors) must work on a mount
that is read-only and with credentials that may not write. In S3 that is a matter of policy; in a
folder `FolderStore` would already make its own temporary directory.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from storage.errors import NotFound, StoreRefused, StoreUnfit, Unavailable
from storage.objectstore import Created, ObjectInfo, ObjectStore, Part
from storage.s3_options import S3Options
from storage.stores import open_store

T = TypeVar("T")


async def open_to_read(url: str, s3: S3Options | None = None) -> ObjectStore:
    """`file:///folder`, a path, or `s3://bucket/prefix`; raises StoreUnfit, Unavailable."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        raise StoreUnfit("memory:// lives and dies inside one process: nobody else can read it")
    if parts.scheme == "file" or not parts.scheme:
        return ReadOnlyFolder(Path(unquote(parts.path) if parts.scheme else url))
    return await open_store(url, s3=s3)


class ReadOnlyFolder:
    """The objects of a `FolderStore`'s folder. Holds nothing open; safe for concurrent tasks."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))
        if not self._root.is_dir():
            raise StoreUnfit(f"{self.url} does not exist or is no folder")

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def table_uri(self, key: str) -> str:
        return str(self._root / key)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self._read, key, 0, -1)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await asyncio.to_thread(self._read, key, start, length)

    def map(self, key: str) -> pa.Buffer:
        """The object's bytes as the kernel maps them: objects are immutable, and unlinked ones stay
        readable while they are mapped."""
        with self._failing(key), pa.memory_map(str(self._root / key)) as file:
            return file.read_buffer()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        # What readers list (`wal/`, `checkpoints/`) is flat and small.
        for info in await asyncio.to_thread(lambda: sorted(self._walk(prefix))):
            if info.key > start_after:
                yield info

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        raise StoreRefused(f"{self.url} is opened to read: {key} is not written")

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        raise StoreRefused(f"{self.url} is opened to read: {key} is not written")

    async def delete(self, keys: Iterable[str]) -> None:
        raise StoreRefused(f"{self.url} is opened to read: nothing is deleted")

    async def close(self) -> None:
        """Nothing to release."""

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
                    with contextlib.suppress(FileNotFoundError):  # collected meanwhile
                        stat = path.stat()
                        yield ObjectInfo(key, stat.st_size, stat.st_mtime_ns // 1_000_000)

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFound(key) from None
        except OSError as error:
            raise Unavailable(f"{self.url}: {key} cannot be read: {error}") from error


class OpenedStore:
    """A store on an event loop of its own thread, for callers that are not async, or that run
    inside somebody else's loop. A context manager; its calls block, from any thread."""

    def __init__(self, url: str, s3: S3Options | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tidelog-store", daemon=True
        )
        self._thread.start()
        try:
            self.store = self.run(open_to_read(url, s3))
        except BaseException:
            self._stop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    def close(self) -> None:
        self.run(self.store.close())
        self._stop()

    def _stop(self) -> None:
        self.run(_settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "OpenedStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


async def _settle() -> None:
    """What was submitted and not waited for is cancelled; threads of the loop end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
