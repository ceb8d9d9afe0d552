"""Encoded pages that several readers of a partition use, so that a broker encodes each page once.

A key identifies the records and their format. The records at given offsets of a topic id never
change, but retention, compaction and repairs remove some of them. So a key also has the number of
records.
"""

import asyncio
from typing import NamedTuple

from tidelog.service.formats.pages import RecordPage

KEPT_S = 1.0
"""A page is kept for one to two periods of this length, or for a shorter time if all pages together
reach SHARED_BYTES_MAX."""
SHARED_BYTES_MAX = 32 * 1024 * 1024


class PageKey(NamedTuple):
    """The records of a page, in `[offset, next_offset)`, and their format."""

    topic_id: str
    partition: int
    offset: int
    next_offset: int
    records: int
    format_name: str
    embedded: str
    on_error: str


class SharedPages:
    """The pages of the last two seconds. Together, they have at most SHARED_BYTES_MAX bytes.

    Owned by one event loop.
    """

    def __init__(self) -> None:
        self._new: dict[PageKey, RecordPage] = {}
        self._old: dict[PageKey, RecordPage] = {}
        self._new_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def get(self, key: PageKey) -> RecordPage | None:
        return self._new.get(key) or self._old.get(key)

    def add(self, key: PageKey, page: RecordPage) -> None:
        """Keep the page, unless it has more than half of SHARED_BYTES_MAX."""
        size = len(page.body)
        if size > SHARED_BYTES_MAX // 2:
            return
        if self._new_bytes + size > SHARED_BYTES_MAX // 2:
            self._age()
        self._new[key] = page
        self._new_bytes += size
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._age()
        self._timer = None
        if self._old:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._on_timer)

    def _age(self) -> None:
        self._old, self._new, self._new_bytes = self._new, {}, 0
