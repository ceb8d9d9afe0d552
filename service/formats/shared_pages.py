"""Encoded pages that several readers of a partition use, so that a broker encodes each page once.

Readers that read the same offsets of an unchanged partition do not even read the records again: a
read costs more than the page of one record.

A key identifies the records and their format. The records at given offsets of a topic id never
change, but retention, compaction and repairs remove some of them. So a key also has the number of
records.
"""

import asyncio
from typing import NamedTuple

from tidelog.service.formats.fetched import FetchPage, FetchParams
from tidelog.service.formats.record_pages import RecordPage
from tidelog.storage.records import FetchResult

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


class ReadKey(NamedTuple):
    """The parameters of a read, and the offsets that its partition had.

    `losses` is `ClusterRecords.losses` at the time.
    """

    topic_id: str
    view: FetchParams
    offset: int
    log_start_offset: int
    high_watermark: int
    losses: int


class SharedPages:
    """The pages of the last two seconds. Together, they have at most SHARED_BYTES_MAX bytes.

    Owned by one event loop.
    """

    def __init__(self) -> None:
        self._new: dict[PageKey, RecordPage] = {}
        self._old: dict[PageKey, RecordPage] = {}
        self._new_bytes = 0
        self._new_reads: dict[ReadKey, tuple[PageKey, FetchResult]] = {}
        self._old_reads: dict[ReadKey, tuple[PageKey, FetchResult]] = {}
        """The pages of reads, and their results without records."""
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
        self._start_timer()

    def of_read(self, key: ReadKey) -> FetchPage | None:
        """Return the result of another such read, if its page is kept."""
        page_key, fetched = self._new_reads.get(key) or self._old_reads.get(key) or (None, None)
        if page_key is None or fetched is None:
            return None
        page = self.get(page_key)
        return None if page is None else FetchPage(fetched, page)

    def add_read(self, key: ReadKey, page_key: PageKey, fetched: FetchResult) -> None:
        """Keep the result of a read, which has no records, for as long as its page."""
        self._new_reads[key] = page_key, fetched
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._age()
        self._timer = None
        if self._old or self._old_reads:
            self._start_timer()

    def _age(self) -> None:
        self._old, self._new, self._new_bytes = self._new, {}, 0
        self._old_reads, self._new_reads = self._new_reads, {}
