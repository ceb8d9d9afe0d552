"""The return of freed memory to the kernel after a peak, so that resident memory falls.

malloc keeps the memory that the process frees (storage.runtime.malloc), because the next request
needs it. In three cases the next request needs much less: after an outage during which requests
filled the write buffer, after a flood of TLS handshakes, and on a broker without load.
"""

import asyncio
import logging

from tidelog.service.http.handshakes import Handshakes
from tidelog.storage.broker import Broker
from tidelog.storage.runtime.malloc import return_freed

log = logging.getLogger("tidelog.memory")

CHECK_S = 10.0
PEAK_BYTES_MIN = 64 * 1024 * 1024
"""After a smaller peak nothing is returned, because the kernel would map and zero the memory again
for the next peak."""
IDLE_BYTES_MAX = 1024 * 1024
"""A writer that flushes at most this number of bytes between two checks is idle."""


class PeakWatch:
    """The detection of the end of a writer's peak.

    The buffer was large and has drained, or the writer has flushed much and is idle now.
    """

    def __init__(self) -> None:
        self._peak_bytes = 0
        self._flushed_bytes = 0  # at the last check
        self._returned_at = 0  # flushed bytes at the end of the last peak

    def is_over(self, buffered: int, flushed: int) -> bool:
        """Return whether a peak has ended.

        The arguments are the bytes in the buffer now, and the bytes flushed since the start. Called
        every CHECK_S.
        """
        self._peak_bytes = max(self._peak_bytes, buffered)
        is_idle = flushed - self._flushed_bytes <= IDLE_BYTES_MAX
        has_drained = self._peak_bytes >= PEAK_BYTES_MIN and buffered * 4 <= self._peak_bytes
        has_worked = flushed - self._returned_at >= PEAK_BYTES_MIN and not buffered
        self._flushed_bytes = flushed
        if not has_drained and not (has_worked and is_idle):
            return False
        self._peak_bytes, self._returned_at = buffered, flushed
        return True


async def return_memory(broker: Broker, handshakes: Handshakes) -> None:
    """Return freed memory to the kernel after each peak of the broker. Does not return."""
    watch, handshake_watch = PeakWatch(), PeakWatch()
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(CHECK_S)
        stats = broker.stats()
        is_over = watch.is_over(stats.buffered_bytes, stats.writer.flush_bytes)
        if handshake_watch.is_over(handshakes.peak_bytes(), flushed=0) or is_over:
            began_s = loop.time()
            await asyncio.to_thread(return_freed)
            log.debug("returned freed memory to the kernel in %.3f s", loop.time() - began_s)
