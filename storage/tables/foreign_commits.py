"""Foreign commits: checks if a version of a topic's table is what the log put there.

Finds the files that readers use if it is not (DESIGN 8, Tables in doubt).

Other programs may commit to a table, and a copy or a restore may contain a table from another
moment than its WAL. So each maintenance task checks a loaded version before it uses that version.
`doubt_of` compares the version's files with the state. It is pure and takes a few array operations.
All tasks call it through `check`.

Until `tidelog repair`, no seal, removal or collection changes a table in doubt. Reads continue
where possible (`served`). If another program rewrote a file that the log put there, readers use the
version before the rewrite, because its objects are kept. If a whole range was removed, a read of
this range raises TableInDoubt, so that no reader skips the range.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from tidelog.storage.core.errors import LogError, TableInDoubt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import (
    ManifestVersion,
    SegmentColumns,
    SegmentIndex,
    Table,
    TableCommit,
    in_no_segment,
)

HISTORY_MAX = 1000
"""Maximum number of commits that are read to find the last version before a foreign commit."""
BLAMED_MAX = 50
"""Maximum number of commits that are read to name a foreign commit in an error."""

Span = tuple[int, int]


class TableHistory(Protocol):
    """The part of a `Table` that `confirmed` needs."""

    @property
    def commits(self) -> Callable[[int], Awaitable[list[TableCommit]]]:
        """As in `Table`."""

    @property
    def files_at(self) -> Callable[[int], Awaitable[SegmentColumns | None]]:
        """As in `Table`."""


def missing(span: Span | None, start: int, end: int) -> Span | None:
    """Return the first part of [start, end) that a span of offsets does not cover, if any."""
    if start >= end:
        return None
    if span is None or span[1] <= start or span[0] > start:
        return start, end if span is None or span[1] <= start else min(span[0], end)
    return (span[1], end) if span[1] < end else None


def hole(index: SegmentIndex, start: int, end: int) -> Span | None:
    """Return the first range of [start, end) that is in no segment, if any."""
    while start < end:
        file = index.at_or_after(start)
        if file is None or file.base_offset > start:
            return start, end if file is None else min(file.base_offset, end)
        start = index.covered_to(start)
    return None


def doubt_of(
    version: ManifestVersion, partitions: Sequence[Partition], sealed_ends: Sequence[int]
) -> str | None:
    """Return why a version of a table is not what the log put there. If it is, return None.

    The caller must read `sealed_ends` before it loads the version, because a seal is committed to
    the table before the WAL. It must read `partitions` after it loads the version, because a log
    start is committed to the WAL before the table.
    """
    if (fault := version.fault()) is not None:
        return fault
    spans = version.spans()
    strangers = [number for number in spans if not 0 <= number < len(partitions)]
    if strangers:
        return f"it has partition {strangers[0]}, the topic has only {len(partitions)} partitions"
    for number, partition in enumerate(partitions):
        sealed_end = sealed_ends[number] if number < len(sealed_ends) else 0
        missing_span = missing(spans.get(number), partition.log_start_offset, sealed_end)
        if missing_span is not None:
            return f"partition {number}: {in_no_segment(*missing_span)}"
        if number in spans and spans[number][1] > partition.high_watermark:
            ends = f"it ends at {spans[number][1]}, the log at {partition.high_watermark}"
            return f"partition {number}: {ends}: the WAL is from another moment"
    return None


async def check(
    table: Table,
    topic_of: Callable[[], Topic | None],
    refresh: Callable[[], Awaitable[None]],
    *,
    is_newest: bool = True,
) -> None:
    """Load the newest version; raise TableInDoubt if it is not what the log put there.

    `refresh` reads the WAL to its end; `topic_of` returns the topic from the newest state, or None
    if the topic was deleted. If not `is_newest`, the loaded version will do: a commit above it
    fails if it is not the newest. A doubt is always one of the newest. Raises Corrupt, Unavailable.
    """
    why: str | None = None
    for is_last in (False, True):
        topic = topic_of()
        sealed_ends = (
            [] if topic is None else [partition.sealed_end for partition in topic.partitions]
        )
        if is_newest or is_last:
            await table.refresh()
        if is_last:  # the state may have been older than the table
            await refresh()
        topic = topic_of()
        if topic is None:
            return
        why = doubt_of(await table.newest(), topic.partitions, sealed_ends)
        if why is None:
            return
    newest = await table.newest()
    assert why is not None
    raise TableInDoubt(newest.prefix, newest.version, await blamed(table, why))


async def blamed(table: TableHistory, why: str) -> str:
    """Add to a reason the newest commit of another program, if there is one."""
    try:
        commits = await table.commits(BLAMED_MAX)
    except LogError:
        return why
    foreign = next((commit for commit in commits if commit.is_foreign), None)
    if foreign is None:
        return why
    return f"{why}; version {foreign.version} ({foreign.author}) was not committed by tidelog"


def replayed(base: SegmentColumns, commits: Iterable[TableCommit]) -> SegmentColumns:
    """Return the files after these commits, the oldest first, on top of `base`."""
    files = {file.path: file for file in SegmentIndex(base)}
    for commit in commits:
        for path in commit.removed:
            files.pop(path, None)
        files.update((file.path, file) for file in commit.added)
    return SegmentColumns.of(list(files.values()))


async def confirmed(
    history: TableHistory,
    newest: ManifestVersion,
    is_whole: Callable[[ManifestVersion], bool],
    is_foreign: Callable[[TableCommit], bool] = lambda commit: commit.is_foreign,
) -> ManifestVersion | None:
    """Return the newest version as it would be without its newest foreign commits.

    It is the version before these, with the log's own later commits. Omit as few foreign commits as
    `is_whole` permits. If the table's log does not have such a version, return None.
    """
    commits = await history.commits(HISTORY_MAX)
    for index, commit in enumerate(commits):
        if not is_foreign(commit):
            continue
        base = await history.files_at(commit.version - 1)
        if base is None:
            return None
        own = [
            later_commit
            for later_commit in reversed(commits[: index + 1])
            if not is_foreign(later_commit)
        ]
        version = ManifestVersion(newest.version, newest.prefix, replayed(base, own))
        if is_whole(version):
            return version
    return None


async def served(history: TableHistory, newest: ManifestVersion) -> ManifestVersion:
    """Return the version that readers use instead of `newest`.

    If files of a partition are no segments, or overlap, this version has the files that the log
    itself put into the partition.
    """
    if newest.is_readable():
        return newest
    own = await confirmed(history, newest, lambda version: version.fault() is None)
    if own is None:
        return newest
    files: list[SegmentFile] = []
    own_numbers = own.spans().keys()
    for number in newest.spans().keys() | own_numbers:
        is_own = number in own_numbers and not newest.is_readable(number)
        files += (own if is_own else newest).files(number)
    return ManifestVersion(newest.version, newest.prefix, SegmentColumns.of(files))
