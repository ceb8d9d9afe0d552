"""A store behind blocking calls, for code without an event loop (Spark workers, jobs)."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tidelog.storage.store.read_only import open_to_read
from tidelog.storage.store.s3_options import S3Options

T = TypeVar("T")


class OpenedStore:
    """A store with a thread and event loop of its own; a context manager.

    It is for callers that are not async or that run inside another event loop. Its calls block, and
    any thread may make them.
    """

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

    def __exit__(self, *_: object) -> None:
        self.close()


async def _settle() -> None:
    """Cancel all other tasks of the loop and end the threads of its executor."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
