"""Hot logs that tests crash, and what a recovery finds in their directory."""

import os
from pathlib import Path
from typing import Any

from tests.support.clock import ManualClock
from tests.support.records import request, rows
from tidelog.storage.codec.entry import HotMark
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import LogError
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_log_file import Recovered, recover
from tidelog.storage.write.requests import AppendRequest

CLUSTER_ID = "c0ffee"
LOG_ID = "f" * 32


class Opened:
    """A hot log, and what it handed on."""

    def __init__(self, directory: Path, log_id: str = LOG_ID) -> None:
        self.handed: list[AppendRequest] = []
        self.failed: list[AppendRequest] = []
        self.clock = ManualClock()
        self.level = format_levels.NEWEST
        self.log = HotLog(
            directory, CLUSTER_ID, log_id, self.handed.append, self._fail, lambda: self.level
        )

    def _fail(self, failed: AppendRequest, _error: LogError) -> None:
        self.failed.append(failed)

    async def append(self, *values: str) -> None:
        await self.log.append(request(self.clock, {0: rows(*values)}))

    async def crash(self) -> None:
        """End the process: its files stay as they are, without a lock."""
        await self.log.close(is_drained=False)


def names(directory: Path, pattern: str = "*.hot") -> list[Path]:
    return sorted(directory.glob(pattern))


def values(requests: list[AppendRequest]) -> list[str]:
    texts: list[str] = []
    for append_request in requests:
        for part in append_request.parts:
            records = part.columns
            assert not isinstance(records, Rows)
            column: list[Any] = records.column("value").to_pylist()
            texts += [str(value, "ascii") for value in column]
    return texts


def marks(requests: list[AppendRequest]) -> list[HotMark | None]:
    return [append_request.hot for append_request in requests]


def values_of_lists(requests: list[AppendRequest]) -> list[str]:
    """As they were before they went into a file."""
    texts: list[str] = []
    for part in (part for append_request in requests for part in append_request.parts):
        assert isinstance(part.rows, Rows)
        texts += [str(value, "ascii") for value in part.rows.values if value is not None]
    return texts


def let_go(files: list[Recovered]) -> None:
    """End the recovering process, too."""
    for file in files:
        os.close(file.fd)


def requests_in(directory: Path) -> list[AppendRequest]:
    files = recover(directory, CLUSTER_ID)
    let_go(files)
    return [request for file in files for request in file.requests]


def failing(*_: object) -> None:
    """A system call on a dying disk."""
    raise OSError(5, "Input/output error")
