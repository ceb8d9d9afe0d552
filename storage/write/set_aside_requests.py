"""Acknowledged requests (acks=1) whose flush failed.

They are retried apart from all other requests, in order.

Requests of one hot log are committed in the order of their marks. If `apply` has accepted a mark,
it skips each lower mark of that log as already committed. So all requests of the hot log wait
behind a request that the store refuses, while other requests are flushed. A group that fails is
halved, so the refused request is soon tried alone. If this request fails again and again, it is set
aside in a file of its own, and tried again every KEPT_RETRY_S.

**On a crash** at any moment: each request is in a file of the hot log, with its mark.
"""

import logging
import math
from collections.abc import Sequence
from typing import Protocol

from tidelog.storage.codec.entry import Commit, Draft, HotMark
from tidelog.storage.core.errors import LogError, SetAside
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.wal.view import Committer, WalView
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.requests import AppendRequest

log = logging.getLogger("tidelog.writer")

ALONE_FAILURES_MAX = 5
"""A request that fails this many times alone is set aside, if the store then accepts another entry.
These attempts take two to ten seconds, because the pauses between them grow. If a store refuses one
PUT in twenty, one request in three million is set aside."""
PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
KEPT_RETRY_S = 60.0
"""Time between two attempts to commit the requests that are set aside."""
KEPT_MAX = 100
"""Maximum number of requests that are set aside (I10), each in a file. At this bound, acks=1 works
as acks=all."""


class Flusher(Protocol):
    """The writer of the requests.

    `commit` raises Unavailable or CommitUnknown. `fitting` returns how many of the requests, from
    the first on, fit into one entry.
    """

    async def flush(self, requests: list[AppendRequest]) -> bool: ...

    async def commit(self, requests: list[AppendRequest]) -> object: ...

    def fitting(self, requests: Sequence[AppendRequest]) -> int: ...

    def answer(
        self, request: AppendRequest, placements: list[AppendedRange], error: LogError | None
    ) -> None: ...

    async def retire(self, log_ids: set[str]) -> None: ...


class SetAsideRequests:
    """The refused requests of one writer.

    Requests that wait for their turn are in memory; requests that are set aside are on the disk.
    """

    def __init__(
        self, flusher: Flusher, wal: WalView, committer: Committer, hot_log: HotLog | None
    ) -> None:
        self.set_aside = 0
        """Requests set aside since the process started."""
        self._flusher = flusher
        self._wal = wal
        self._clock = wal.clock
        self._committer = committer
        self._hot_log = hot_log
        self._waiting: list[AppendRequest] = []
        self._group = 1
        self._failures = 0
        self._pause_s = PAUSE_S
        self._next_s = 0.0
        self._kept_next_s = 0.0
        self._new_log_id = ""
        """The id of the log in the new file of the first waiting request. It is set before the file
        is made. From then on the writer does not flush the request with its old mark, and each
        attempt makes the same file. Otherwise the request could be committed with its old mark, and
        a recovery would find it in the new file and commit it again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due_s(self) -> float:
        """The boot time of the next attempt, or infinity if no request waits for one."""
        if self._waiting:
            return self._next_s
        return self._kept_next_s if self._hot_log is not None and self._hot_log.kept else math.inf

    def split(
        self, requests: Sequence[AppendRequest]
    ) -> tuple[list[AppendRequest], list[AppendRequest]]:
        """Keep the requests of the hot log here, and return the others in two lists.

        The requests in the first list can be flushed now. Each request in the second list has
        records for a partition of a request that waits here. Such a request must wait too, so that
        the records of a producer stay in order.
        """
        self._waiting += [request for request in requests if request.hot is not None]
        waiting = {partition for request in self._waiting for partition in request.partitions()}
        other_requests = [request for request in requests if request.hot is None]
        passing = [
            request for request in other_requests if waiting.isdisjoint(request.partitions())
        ]
        passed = set(passing)
        return passing, [request for request in other_requests if request not in passed]

    def failed(self, requests: Sequence[AppendRequest], *, is_alone: bool) -> None:
        """Note that a flush with these requests failed.

        If no request waits here yet, these requests wait from now on. `is_alone` says that the
        flush had only one request, the first.
        """
        if not self._waiting:
            self._waiting = list(requests)
        self._failures = self._failures + 1 if is_alone else 0
        self._group = max(len(requests) // 2, 1)
        self._pause()

    async def retry(self) -> bool:
        """Try the requests that are due; return whether they were committed or set aside."""
        return await (self._retry_first() if self._waiting else self._retry_kept())

    async def _retry_first(self) -> bool:
        group = self._waiting[: self._group]
        group = group[: self._flusher.fitting(group)]
        if not self._new_log_id:
            if await self._flusher.flush(group):  # if not, it has called `failed`
                self._drop(len(group))
                return True
            if self._failures < ALONE_FAILURES_MAX:
                return False
        (first, *_) = group
        if self._hot_log is None or first.hot is None:
            return False
        try:
            await self._set_aside(self._hot_log, first, first.hot)
        except (LogError, OSError) as error:
            log.error("a refused request cannot be set aside yet, retrying: %s", error)
            self._pause()
            return False
        self._drop(1)
        return True

    def _drop(self, count: int) -> None:
        del self._waiting[:count]
        self._new_log_id = ""
        self._group = max(2 * count, 1)
        self._failures, self._pause_s, self._next_s = 0, PAUSE_S, 0.0

    def _pause(self) -> None:
        self._next_s = self._clock.boot_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def _set_aside(self, hot_log: HotLog, request: AppendRequest, mark: HotMark) -> None:
        """Move the request to a file of its own, with another mark.

        Raises LogError or OSError, also if the store refuses all other entries.

        **On a crash** before the new file is durable, the request is only in the old file. After
        that it is in both files, and a recovery commits it only from the new file
        (hot_log_file.recover). This process commits it from the new file only when its old mark is
        used up. Otherwise a later recovery of the old file could commit it a second time.
        """
        if not self._new_log_id:
            # An earlier attempt may have an unknown outcome. After this entry the outcome is known:
            # the attempt is in the WAL, or this entry has the number that the attempt wanted.
            await self._commit(Commit(self._clock.new_id(), []))
            if self._wal.state.hot_logs.get(mark.log_id, -1) >= mark.seq:
                self._flusher.answer(request, [], None)
                return
            self._new_log_id = self._clock.new_id().hex()
        kept_file = await hot_log.keep(request, self._new_log_id)
        await self._commit(Commit(self._clock.new_id(), [], hot=mark))
        hot_log.set_aside(kept_file)
        hot_log.committed([mark])
        self.set_aside += 1
        self._kept_next_s = self._clock.boot_s() + KEPT_RETRY_S
        why = (
            "the store refuses a request that was acknowledged with acks=1: "
            f"it is in {kept_file.path}"
        )
        log.error("%s and is tried again every %.0f s", why, KEPT_RETRY_S)
        self._flusher.answer(request, [], SetAside(why))

    async def _commit(self, commit: Commit) -> None:
        _ = await self._committer.commit(Draft([commit], [], []))
        self._wal.clone_fence.check_fence()  # if it raises, a copy may have used the mark

    async def _retry_kept(self) -> bool:
        """Try the requests that are set aside; stop at the first that is refused again."""
        hot_log = self._hot_log
        assert hot_log is not None, "the hot log has the files"
        for _ in range(len(hot_log.kept)):
            self._kept_next_s = self._clock.boot_s() + KEPT_RETRY_S
            kept_file = hot_log.kept[0]
            try:
                request = await hot_log.load(kept_file)
                # A refusal by `apply` is a final outcome: for example, the topic was deleted since.
                _ = await self._flusher.commit([request])
                finished = await hot_log.discard(kept_file)
            except (LogError, OSError) as error:
                hot_log.kept.rotate(-1)
                log.warning("the request in %s is refused again: %s", kept_file.path, error)
                return False
            log.warning("the request in %s, which was set aside, is committed", kept_file.path)
            await self._flusher.retire(finished)
        return True
