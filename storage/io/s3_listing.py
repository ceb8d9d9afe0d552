"""Listing in byte order of keys, for a server that lists in the order of a directory tree.

SeaweedFS lists `a/b` before `a-b`, and a listing that starts after `a-b` omits `a/b`. So this
module lists each directory with a request of its own. It yields a subdirectory's objects when the
subdirectory's name *with the slash* is next in byte order. The cost is one request per directory.
A flat prefix such as `wal/` costs no more than in S3.
"""

import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from operator import itemgetter
from typing import TypeAlias

from tidelog.storage.io.object_store import ObjectInfo

Pages: TypeAlias = Callable[
    [str, str, str], AsyncIterator[tuple[Sequence[ObjectInfo], Sequence[str]]]
]
"""(prefix, start_after, delimiter) -> pages of objects and of directories (with their slash)."""


async def in_byte_order(
    pages: Pages, prefix: str, start_after: str, *, directory: str = ""
) -> AsyncIterator[ObjectInfo]:
    """Yield objects as `ObjectStore.list` does. Holds one page per directory level, and the
    directories that wait."""
    directory = directory or prefix[: prefix.rfind("/") + 1]
    if start_after > directory and not start_after.startswith(directory):
        return
    # A listing after `first` omits the directory `first/`. It also omits directories with a shorter
    # name but a greater key: after `a-b`, the server omits `a/`. So `waiting` begins with them.
    is_inside = start_after.startswith(directory)
    first = start_after.removeprefix(directory).partition("/")[0] if is_inside else ""
    waiting = [
        path
        for end in range(1, len(first) + 1)
        if (first + "\0")[end] < "/" and (path := f"{directory}{first[:end]}/").startswith(prefix)
    ]
    heapq.heapify(waiting)
    async for infos, directories in pages(prefix, directory + first if first else "", "/"):
        page: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in infos]
        page += [(path.removesuffix("/"), None) for path in directories]
        for name, info in sorted(page, key=itemgetter(0)):
            while waiting and waiting[0] < name:
                path = heapq.heappop(waiting)
                async for inner in in_byte_order(pages, path, start_after, directory=path):
                    yield inner
            if info is not None:
                if info.key > start_after:
                    yield info
            elif f"{name}/" not in waiting:
                heapq.heappush(waiting, f"{name}/")
    while waiting:
        path = heapq.heappop(waiting)
        async for inner in in_byte_order(pages, path, start_after, directory=path):
            yield inner
