"""The committed requests of a crashed process's hot log, also if a copy of the process ran.

`apply` accepts each mark of a hot log once. A cloned machine or a restored snapshot continues the
log with the same id. Then two requests may have the same mark, and `apply` accepts only the first
request. A restored disk also brings back requests whose marks are retired. A request gets its
commit id when it enters the log, so the commit ids in the WAL show which requests are committed.

A recovery reads the WAL backwards until it knows which requests are committed. Without a copy, it
needs only the newest two entries that have commits of the log. **On a crash** at any moment the
files are as they were; a claim (see CLAIM) may be left in the WAL.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from tidelog.storage.codec.entry import Commit, Draft, DraftId, Entry, HotMark, shares
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import RetireHotLog
from tidelog.storage.core.errors import Corrupt, ObjectNotFound
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalObjects
from tidelog.storage.write.hot_log_file import Recovered
from tidelog.storage.write.requests import AppendRequest

READS_AT_ONCE = 16
ENTRIES_MAX = 20_000
"""Maximum number of entries that one recovery reads back. Over S3 this takes about ten seconds."""


CLAIM = 1 << 62
"""A mark of this number or above is a claim: CLAIM + 1 + the highest mark committed before it."""


async def settled(wal: WalView, files: Sequence[Recovered]) -> list[Recovered]:
    """Claim the logs of these files, and return the files without the requests that are committed.

    The remaining requests get marks of a new log. Requests that are set aside stay as they are.

    At level 1, return all files as they are, because version 0.1 may recover them next. Version 0.1
    does not know claims. The marks of all requests are below a claim, so version 0.1 would take
    these requests for committed and delete the files.

    Raises LogError. **On a crash**: a claim is left, which the next recovery finds.
    """
    if wal.state.level == format_levels.FIRST:
        return list(files)
    search = _Search(files)
    if search.logs:
        await wal.commit_next(lambda: search.claims(wal))
        await search.run(wal)
    return [file if file.is_kept else search.left_of(file) for file in files]


class _Taken(NamedTuple):
    """A commit in an entry.

    `share` is the index, in the entry, of the forwarded draft that has the commit. It is -1 if no
    forwarded draft has the commit.
    """

    share: int
    origin_id: str
    number: int
    mark: HotMark | None
    commit_id: bytes
    is_empty: bool
    retired: tuple[str, ...] = ()


class _Search:
    """A search for the commits of these files' logs, from the newest entry of the WAL backwards.

    Usually it needs the newest two entries that have commits of a log. All marks in the newer entry
    are of the crashed process, and they are higher than all marks in the older entry. If this is
    not so, a copy has used marks of the log. Then the search continues to the oldest entry, for at
    most ENTRIES_MAX entries.
    """

    def __init__(self, files: Sequence[Recovered]) -> None:
        self._requests: dict[str, dict[int, AppendRequest]] = {}
        for file in files:
            if file.requests and not file.is_kept:
                marks = self._requests.setdefault(file.log_id, {})
                marks |= {
                    request.hot.seq: request for request in file.requests if request.hot is not None
                }
        self.logs = frozenset(self._requests)
        self._before: dict[str, int] = {}
        """The highest mark of each log before it was claimed."""
        self._open = set(self.logs)
        self._shared: set[str] = set()
        self._own_from: dict[str, int] = {}
        self._entries: list[list[_Taken]] = []
        self._committed: set[bytes] = set()
        self._used_up: set[HotMark] = set()
        self._lowest: dict[str, int] = {}

    def claims(self, wal: WalView) -> Draft | None:
        """Return the claims: commits that use up all marks of the logs.

        So no copy can commit with these marks later. If all logs are claimed already, return None.
        Call this when all entries before the claims are applied.
        """
        commits: list[Commit] = []
        for log_id in sorted(self.logs):
            newest = wal.state.hot_logs.get(log_id, -1)
            self._before[log_id] = newest - CLAIM - 1 if newest >= CLAIM else newest
            if newest < CLAIM:
                commits.append(
                    Commit(wal.clock.new_id(), [], hot=HotMark(log_id, CLAIM + 1 + newest))
                )
        return Draft(commits, [], []) if commits else None

    async def run(self, wal: WalView) -> None:
        for log_id, newest in self._before.items():
            if 0 <= newest < min(self._requests[log_id]):
                self._open.discard(log_id)  # the file of that request is deleted
        if self._open:
            async for entry in _backwards(wal.objects, wal.state.seq):
                self._see(list(self._taken(entry)))
                if not self._open:
                    break
        self._fold()

    def _taken(self, entry: Entry) -> Iterator[_Taken]:
        drafts = {
            index: (share, origin)
            for share, (origin, commits) in enumerate(shares(entry))
            for index in commits
        }
        for index, commit in enumerate(entry.commits):
            share, origin = drafts.get(index, (-1, DraftId("", -1, 0)))
            mark = commit.hot
            retired = tuple(
                action.log_id for action in commit.actions if isinstance(action, RetireHotLog)
            )
            if origin.origin_id or mark or retired:
                is_empty = not commit.actions
                of = origin.origin_id, origin.number
                yield _Taken(share, *of, mark, commit.commit_id, is_empty, retired)

    def _see(self, commits: list[_Taken]) -> None:
        self._entries.append(commits)
        marks: dict[str, list[_Taken]] = {}
        for commit in commits:
            if commit.mark is not None and not commit.is_empty and commit.mark.log_id in self.logs:
                marks.setdefault(commit.mark.log_id, []).append(commit)
        for log_id in self._open & marks.keys():
            seqs = [commit.mark.seq for commit in marks[log_id] if commit.mark is not None]
            own_from = self._own_from.get(log_id)
            if own_from is None and all(self._is_own(commit) for commit in marks[log_id]):
                self._own_from[log_id] = min(seqs)
            elif own_from is not None and max(seqs) < own_from and log_id not in self._shared:
                self._open.discard(log_id)
            else:
                self._shared.add(log_id)

    def _is_own(self, commit: _Taken) -> bool:
        assert commit.mark is not None, "only marks are compared"
        requests = self._requests[commit.mark.log_id]
        if commit.mark.seq < min(requests):
            return True  # the file of that request is deleted
        request = requests.get(commit.mark.seq)
        return request is not None and request.commit_id == commit.commit_id

    def _fold(self) -> None:
        """Find the commits that `apply` has accepted, in the order of the WAL."""
        marks: dict[str, int] = {}
        drafts: dict[str, int] = {}
        for entry in reversed(self._entries):
            repeated: dict[int, bool] = {-1: False}
            for commit in entry:
                if commit.share not in repeated:
                    repeated[commit.share] = commit.number <= drafts.get(commit.origin_id, -1)
                    drafts[commit.origin_id] = max(commit.number, drafts.get(commit.origin_id, -1))
                if repeated[commit.share]:
                    continue
                for log_id in commit.retired:
                    marks.pop(log_id, None)
                if commit.mark is None or commit.mark.seq <= marks.get(commit.mark.log_id, -1):
                    continue
                log_id, seq = commit.mark.log_id, commit.mark.seq
                marks[log_id] = seq
                if seq >= CLAIM:
                    continue
                self._lowest[log_id] = min(seq, self._lowest.get(log_id, seq))
                self._committed.add(commit.commit_id)
                if commit.is_empty:
                    self._used_up.add(commit.mark)

    def left_of(self, file: Recovered) -> Recovered:
        """Return the file without the requests that are committed."""
        if not file.requests:
            return file
        # Requests below the lowest mark that was found are committed. If no mark was found, the
        # requests up to the highest mark before the claim are committed.
        lowest = self._lowest.get(file.log_id, self._before[file.log_id] + 1)
        open_requests = [
            request
            for request in file.requests
            if request.commit_id not in self._committed
            and request.hot is not None
            and request.hot not in self._used_up
            and request.hot.seq >= lowest
        ]
        # If this recovery crashes, the next one makes the same id. For other requests, the id
        # differs.
        ids = b"".join(request.commit_id for request in file.requests)
        log_id = hashlib.blake2b(ids, digest_size=16).hexdigest()
        for request in open_requests:
            assert request.hot is not None, "requests without a mark are left out above"
            request.hot = HotMark(log_id, request.hot.seq)
        return file._replace(log_id=log_id, requests=open_requests)


async def _backwards(objects: WalObjects, newest: int) -> AsyncIterator[Entry]:
    """Yield the entries from `newest` backwards, at most ENTRIES_MAX.

    Stop at an entry that collection deleted; omit damaged entries.
    """

    async def read(seq: int) -> Entry | None:
        try:
            return (await objects.read(seq)).entry
        except Corrupt:
            return None

    last = max(newest - ENTRIES_MAX, 0)
    width = 1
    while newest > last:
        first = max(newest - width, last)
        results = await asyncio.gather(
            *(read(seq) for seq in range(newest, first, -1)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, ObjectNotFound):
                return
            if isinstance(result, BaseException):
                raise result
            if result is not None:
                yield result
        newest, width = first, min(width * 4, READS_AT_ONCE)
