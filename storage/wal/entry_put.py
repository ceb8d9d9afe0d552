"""The PUT of an entry and its three outcomes: done, lost, unknown (DESIGN 4; I1, I6).

**On a crash** before the PUT, nothing is left. During the PUT, the entry or nothing is left, and
the next reader of the WAL sees which. After the PUT, the entry is left.
"""

import asyncio
import logging

from tidelog.storage.codec.entry import DecodedEntry, Entry
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, ObjectNotFound, StoreRefused, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.view_age import Freshness
from tidelog.storage.wal.wal_objects import WalObjects

log = logging.getLogger("tidelog.wal")

FAILED_PUTS_MAX = 5
"""A PUT may fail with an exception that no store should raise. After this number of such failures
of one entry, the broker gives up the entry: its outcome stays unknown, and another entry may take
the number. Without a limit, one PUT that the store's SDK cannot send would block the WAL."""


class EntryPut:
    """The PUTs of the entries of one WAL view.

    If the outcome of a PUT can no longer be found, EntryPut expires the view.
    """

    def __init__(self, objects: WalObjects, freshness: Freshness, retry_s: float) -> None:
        self.objects = objects
        self.retry_s = retry_s
        self._freshness = freshness

    async def put(self, key: str, parts: list[Part], entry: Entry, entry_hash: bytes) -> bool:
        """PUT the entry.

        Return True if this entry has its number, False if another entry definitely has the number.

        The hash of the whole header shows whether the stored entry is this one. Ids do not show
        this, because two copies of a process may write different entries under the same ids.
        """
        is_ambiguous, pause_s, failures = False, self.retry_s, 0
        self.objects.counters.bytes_written += sum(len(part) for part in parts)
        while True:
            self.objects.counters.puts += 1
            try:
                created = await self.objects.store.create(key, parts)
                # **On a crash** here: the entry is in the WAL, but the clients have no response. A
                # retry with the same Idempotency-Key gets the first response from the state.
            except StoreRefused:
                if not is_ambiguous:
                    raise  # a definite refusal, and there is no earlier PUT that may still arrive
                created = Created.UNKNOWN
            except TASK_ENDS:
                raise
            except BaseException as error:  # it does not show whether the PUT arrived
                failures += 1
                if failures == FAILED_PUTS_MAX:
                    raise
                log.error("put of %s failed: %r", key, error, exc_info=error)
                created = Created.UNKNOWN
            if created is Created.DONE:
                return True
            if created is Created.UNKNOWN:
                is_ambiguous = True
                self.objects.counters.unknown += 1
                log.warning("put of %s: outcome unknown, reading it back", key)
            stored_entry = await self._read_back(key, entry.seq)
            if stored_entry is not None:
                return stored_entry.hash == entry_hash
            if created is Created.EXISTS:
                # The object existed and was collected. It may have been this entry, because an
                # earlier PUT may have stored it, or the transport may have sent this PUT twice.
                raise self._outcome_lost(key)
            # The number is absent, but an earlier PUT may still arrive. So it is safe to repeat the
            # PUT at the same number, but not to take another number.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)

    async def is_in_chain(self, seq: int, entry_hash: bytes) -> bool:
        """Return whether entry `seq`, which is stored, is part of the WAL.

        Retries without limit, because an error would report a failure although the entry may be
        committed.
        """
        while True:
            try:
                if not await self.objects.numbers_after(seq):
                    return True  # the newest entry is never collected
                return (await self.objects.read(seq + 1)).entry.previous == entry_hash
            except ObjectNotFound:  # the next entry was collected
                raise self._outcome_lost(object_keys.wal(seq)) from None
            except Unavailable as error:
                log.warning(
                    "reading the entry after %s failed, retrying: %s", object_keys.wal(seq), error
                )
            await asyncio.sleep(1.0)

    def _outcome_lost(self, key: str) -> CommitUnknown:
        """Expire the view; return the error for entry `key`, collected before it was read back.

        The process was suspended longer than the WAL retention, an hour or more, and no client
        waits that long. A request with acks=1 may be committed again, because it has a hot mark,
        which `apply` accepts once.
        """
        self._freshness.expire()
        return CommitUnknown(f"{key} was deleted before it was read back: commit outcome unknown")

    async def _read_back(self, key: str, seq: int) -> DecodedEntry | None:
        pause_s = self.retry_s
        while True:
            try:
                return await self.objects.find(seq)
            except Unavailable as error:
                log.warning("reading back %s failed, retrying: %s", key, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)
