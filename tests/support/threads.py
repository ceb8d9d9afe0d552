"""Threads that run for as long as a block."""

import threading
from collections.abc import Callable
from typing import Self


class Threads:
    """Runs each of `works` in a thread, from `with` to the end of the block, or to `end`.

    Then `stop` is set, and each work must return soon.
    """

    def __init__(self, *works: Callable[[], None], stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._threads = [threading.Thread(target=work) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop the threads and wait for them. A second call does nothing."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
