"""Hot logs that tests crash, and what a recovery finds in their directory."""

import os
from pathlib import Path

from storage.chunk import Rows
from storage.errors import LogError
from storage.hot import Request
from storage.hotlog import HotLog, Recovered, recover
from tests.support.clock import ManualClock
from tests.support.records import request, rows

CLUSTER_ID = "c0ffee"
LOG_ID = "f" * 32


class Opened:
    """A hot log, and what it handed on."""

    def __init__(self, directory: Path, log_id: str = LOG_ID) -> None:
        self.handed: list[Request] = []
        self.failed: list[Request] = []
        self.clock = ManualClock()
        self.log = HotLog(directory, CLUSTER_ID, log_id, self.handed.append, self._fail)

    def _fail(self, failed: Request, _error: LogError) -> None:
        self.failed.append(failed)

    async def append(self, *values: str) -> None:
        await self.log.append(request(self.clock, {0: rows(*values)}))

    async def crash(self) -> None:
        """The process is gone; its files are as they are and nobody holds them."""
        await self.log.close(is_drained=False)


def names(directory: Path, pattern: str = "*.hot") -> list[Path]:
    return sorted(directory.glob(pattern))


def values(requests: list[Request]) -> list[str]:
    found: list[str] = []
    for one in requests:
        for part in one.parts:
            assert not isinstance(part.rows, Rows)
            found += [str(value, "ascii") for value in part.rows.column("value").to_pylist()]
    return found


def values_of_lists(requests: list[Request]) -> list[str]:
    """As they were before they went into a file."""
    lists = [part.rows for one in requests for part in one.parts]
    return [str(value, "ascii") for part in lists for value in part.values]  # type: ignore[union-attr]


def let_go(files: list[Recovered]) -> None:
    """The recovering process dies, too."""
    for file in files:
        os.close(file.fd)


def requests_in(directory: Path) -> list[Request]:
    files = recover(directory, CLUSTER_ID)
    let_go(files)
    return [request for file in files for request in file.requests]


def failing(*_: object) -> None:
    """A system call on a dying disk."""
    raise OSError(5, "Input/output error")
