"""The memory of the requests that a listener's connections have received, in two sizes.

A large frame takes its whole size before it is received, and each frame gives its size back when
its request is answered. So large requests that are partly received cannot use up the memory that
one of them needs until its end. A small frame takes its size when it has arrived, from memory that
large frames cannot take. So a client that stops in the middle of a frame delays no small request of
another client.
"""

from tidelog.service.memory_pool import MemoryPool, Taker

DECODED_PART = 48
SHARED_BYTES = 64 * 1024
"""Size of the buffer for all connections of a listener that are not inside a frame."""
SMALL_BYTES_MAX = SHARED_BYTES
"""Largest frame that is received before it takes memory. A connection has no more than one."""


class SizedPools:
    """Memory of requests of two sizes: large ones delay no small one."""

    def __init__(self, small: int, large: int) -> None:
        self._small = MemoryPool(small)
        self._large = MemoryPool(large)
        self.limit = small + large

    @property
    def used(self) -> int:
        return self._small.used + self._large.used

    def take(self, taker: Taker, size: int) -> bool:
        """Hold the bytes of a request; see MemoryPool."""
        return self._pool(size).take(taker, size)

    def give(self, owner: str, size: int) -> None:
        """Give the bytes of a request back."""
        self._pool(size).give(owner, size)

    def leave(self, taker: Taker) -> None:
        """Forget a taker that waits."""
        for pool in (self._small, self._large):
            pool.leave(taker)

    def _pool(self, size: int) -> MemoryPool:
        return self._large if size > SMALL_BYTES_MAX else self._small


class RequestMemory(SizedPools):
    """The bytes of requests that the broker has not answered, of a listener's connections."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit // 4, limit - limit // 4)
        decoded = limit // DECODED_PART
        self.decoded = SizedPools(decoded - decoded // 2, decoded // 2)
        """The bytes of the requests that are decoded and not answered. A frame that is partly
        received has none of them, so it delays no other request."""

    def leave(self, taker: Taker) -> None:
        super().leave(taker)
        self.decoded.leave(taker)
