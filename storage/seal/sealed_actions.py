"""The last step of a seal: its actions in the WAL, together with other requests of the broker.

An entry costs a PUT, whatever it has. So the actions of seals that no caller waits for wait for the
next request of any client, and go into its entry; or for the actions of other topics. They wait for
a few seconds at most.

**On a crash** meanwhile, the tables are ahead of the WAL, as after any crash between the two
commits of a seal: the next sealer verifies the segments and writes the actions.
"""

import asyncio
from collections.abc import Sequence

from tidelog.storage.core.actions import AnyAction
from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.waiters import Waiter
from tidelog.storage.write.writer import Writer

ACTIONS_MAX = 1000
"""Maximum number of actions in one request: `apply` takes ~3 us for each."""
SEALS_MAX = 8
"""Seals that wait at the same time. It is less than the number of topics that are sealed side by
side, so no seal waits while others cannot begin."""


class SealedActions:
    """The actions of a broker's seals. Owned by one event loop."""

    def __init__(self, writer: Writer, wait_s: float) -> None:
        self._writer = writer
        self._wait_s = wait_s
        # A request for each seal, because the refusal of one (its topic was deleted) is not that of
        # the others.
        self._waiting: list[tuple[AppendRequest, asyncio.Future[Waiter]]] = []
        self._timer: asyncio.TimerHandle | None = None
        writer.on_enqueued = self.send

    async def commit(self, actions: Sequence[AnyAction], *, is_patient: bool) -> None:
        """Commit the actions. Raises the errors of `Writer.append`."""
        for start in range(0, len(actions), ACTIONS_MAX):
            some = list(actions[start : start + ACTIONS_MAX])
            if is_patient:
                try:
                    await self._commit_with_others(some)
                    continue
                except Unavailable:
                    pass  # the store may have refused the entry for the sake of another request
            await self._writer.append(AppendRequest((), 0, actions=some), Acks.ALL)

    async def _commit_with_others(self, actions: list[AnyAction]) -> None:
        request = AppendRequest((), 0, actions=actions)
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[Waiter] = loop.create_future()
        self._waiting.append((request, sent))
        if len(self._waiting) >= SEALS_MAX:
            self.send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self.send)
        await (await sent)

    def send(self) -> None:
        """Let the actions that wait go into the entry that the writer makes next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for request, sent in waiting:
            if sent.done():  # cancelled
                continue
            try:
                waiter = self._writer.submit(request)
            except LogError as error:
                sent.set_exception(error)
            else:
                waiter.add_done_callback(retrieve_exception)  # the seal may be cancelled
                sent.set_result(waiter)
