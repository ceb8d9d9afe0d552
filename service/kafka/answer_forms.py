"""The forms of a handler's answer that are not a response: later, encoded, none."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple


class Later:
    """An answer that is not known yet.

    The connection sets `on_answer`, and the handler calls it once with the response. A Later costs
    less than a future: a future needs one more turn of the event loop.

    While `begun` is not done, the next request of its connection does not begin, so that batches
    keep their order.
    """

    __slots__ = ("begun", "on_answer")

    def __init__(self) -> None:
        self.on_answer: Callable[[Any], None] | None = None
        self.begun: asyncio.Future[None] | None = None


class EncodedAnswer(NamedTuple):
    """An answer in bytes. `release` is called when the socket has taken all its bytes."""

    pieces: list[bytes | memoryview]
    release: Callable[[], object] | None = None
    throttle_s: float = 0.0


class CloseConnection(Exception):
    """The failure of a request that gets no answer (acks=0).

    The end of the connection shows the failure to the client.
    """
