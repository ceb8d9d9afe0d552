"""How long each callback of an event loop runs, in CPU time of its thread."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

HELD_S_MAX = 0.1
"""The aim is 0.02. A slower machine, and a test that prepares its data on the loop, get more."""


class Held:
    """Callbacks that ran for longer than HELD_S_MAX: seconds and name. Collections of garbage do
    not count: a test process has more objects than a broker."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []
        self._collected_s = 0.0
        self._began_s = 0.0
        self.is_counted = True

    def on_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._began_s

    def run(self, run: Any, handle: Any) -> None:
        """Run a handle of the loop."""
        collected_s, began_s = self._collected_s, time.thread_time()
        shown = handle._callback
        self.is_counted = True
        run(handle)
        held_s = time.thread_time() - began_s - (self._collected_s - collected_s)
        if self.is_counted and held_s > HELD_S_MAX:
            self.found.append((round(held_s, 3), repr(shown)))


_measuring: list[Held] = []


def not_counted() -> None:
    """Leave out the callback that runs now: it prepares what is to be measured."""
    for held in _measuring:
        held.is_counted = False


@contextlib.contextmanager
def measured() -> Iterator[Held]:
    """Measure each callback of asyncio's loops (not uvloop's) in this process."""
    held, original = Held(), asyncio.Handle._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", lambda handle: held.run(original, handle))
        gc.callbacks.append(held.on_collection)
        _measuring.append(held)
        try:
            yield held
        finally:
            _measuring.remove(held)
            gc.callbacks.remove(held.on_collection)
