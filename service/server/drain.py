"""The end of a broker's service: from the first signal until the port may close.

1. The broker is not ready, so that balancers with health checks send requests to other brokers.
   Each answer ends its connection, so that clients, and balancers without health checks, open new
   connections.
2. The long polls under way end. The peers take the roles of sequencer and coordinator.
3. The broker serves all requests for `drain_s`, also those of new connections. It sends clients of
   Kafka's protocol to other brokers.

A drain without connections and requests ends after QUIET_S. A second signal ends it at once.

**On a crash** in a drain: as in any other crash. A peer that has already taken a role keeps it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tidelog.storage.runtime.tasks import surviving

log = logging.getLogger("tidelog")

QUIET_S = 0.2
"""A drain ends early if there is neither a connection nor a request for this time."""
LOOK_S = 0.02


class Drained(Protocol):
    """The broker, as a drain uses it."""

    async def hand_over(self) -> None: ...

    def drain(self) -> None: ...


class Clients(Protocol):
    """The listener for HTTP clients, as a drain uses it."""

    @property
    def activity(self) -> tuple[int, int]:
        """The number of open connections, and of requests that were answered so far."""

    def begin_drain(self) -> None: ...

    def stop(self) -> None: ...


class KafkaDrain(Protocol):
    """The listener for Kafka clients, as a drain uses it."""

    @property
    def is_drained(self) -> bool: ...

    def begin_drain(self) -> None: ...


class Drain:
    """The drain of one broker. Owned by one event loop."""

    def __init__(
        self,
        broker: Drained,
        clients: Clients,
        kafka: KafkaDrain | None,
        drain_s: float,
        now_s: Callable[[], float],
        repeat_s: float = 0.0,
    ) -> None:
        """`now_s` is a clock that does not go back.

        A signal within `repeat_s` after the first one does not count as the second, because a
        worker gets one from the terminal and one from its parent.
        """
        self._broker = broker
        self._clients = clients
        self._kafka = kafka
        self._drain_s = drain_s
        self._now_s = now_s
        self._repeat_s = repeat_s
        self._began_s = 0.0
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """Begin the drain. At the second call, end it."""
        if self._task is None:
            log.info(
                "stopping: clients have up to %g s to disconnect; a second signal ends this time",
                self._drain_s,
            )
            self._began_s = self._now_s()
            self._task = asyncio.create_task(self._run(), name="tidelog-drain")
        elif self._now_s() - self._began_s >= self._repeat_s:
            self._hurry.set()

    async def close(self) -> None:
        """End the drain, if one has begun."""
        self._hurry.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        end_s = self._began_s + self._drain_s
        self._clients.begin_drain()
        handing_over = asyncio.create_task(self._hand_over(), name="tidelog-handover")
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({handing_over, hurry}, return_when=asyncio.FIRST_COMPLETED)
            await self._until_over(end_s)
        finally:
            hurry.cancel()
            handing_over.cancel()
            self._broker.drain()
            self._clients.stop()

    async def _hand_over(self) -> None:
        with surviving(log, "the handover to other brokers"):
            await self._broker.hand_over()
        if self._kafka is not None:  # only now, so that the peers name the new coordinators
            self._kafka.begin_drain()

    async def _until_over(self, end_s: float) -> None:
        old_activity, since_s = self._clients.activity, self._now_s()
        while not self._hurry.is_set() and (now_s := self._now_s()) < end_s:
            activity = self._clients.activity
            is_busy = self._kafka is not None and not self._kafka.is_drained
            if is_busy or activity[0] or activity != old_activity:
                old_activity, since_s = activity, now_s
            elif now_s - since_s >= QUIET_S:
                return
            await asyncio.sleep(LOOK_S)
