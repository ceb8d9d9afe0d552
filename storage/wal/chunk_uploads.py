"""Uploads of a draft's chunks to `data/`, in parts, several at a time.

One PUT sends about 80 MB/s to S3, however large it is. So a broker that sends one at a time takes
no more from its clients, and a part takes a tenth of a second.

**On a crash**, also between two parts: objects are left that no entry names; collection deletes
them. The key of each has a time after which no new entry names it (FORMAT rule 8).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import SequencerSettings
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.tasks import together
from tidelog.storage.store.object_store import UPLOAD_RETRY_S, upload
from tidelog.storage.wal.merged_drafts import not_after_ms, parts, refer
from tidelog.storage.wal.view import WalView

log = logging.getLogger("tidelog.wal")

ATTEMPTS_MAX = 3
"""How often an upload is tried, each time under a new key. A draft of many parts would otherwise
fail more often than one of one part. It fails for good if the store refuses all: a full disk."""


class ChunkUploads:
    """The uploads of one broker's drafts. Owned by one event loop."""

    def __init__(
        self,
        wal: WalView,
        settings: SequencerSettings,
        has_peers: Callable[[], bool],
        on_upload: Callable[[], None],
    ) -> None:
        """`on_upload` is called for each draft that is uploaded."""
        self.wal = wal
        self.settings = settings
        self.has_peers = has_peers
        self._on_upload = on_upload
        self._turns = asyncio.Semaphore(settings.uploads_max)

    @property
    def retention_ms(self) -> int:
        """Return the elapsed time in ms for which an upload may wait for its entry."""
        return int(self.wal.state.bounds.now.wal_retention_ms / 2)

    async def upload_if_large(self, draft: Draft) -> Draft:
        """Return the draft; if it is large, upload its chunks and refer to the uploads.

        With peers, raises the store's error if an upload fails. A broker alone can do without.
        """
        has_peers = self.has_peers()
        settings = self.settings
        bytes_max = settings.handover_bytes_max if has_peers else settings.alone_bytes_max
        if body_bytes(draft) <= bytes_max:
            return draft
        try:
            return await self.upload(draft)
        except LogError as error:
            if has_peers:
                raise
            log.warning("a large flush is not uploaded in parts: %s", error)
            return draft

    async def upload(self, draft: Draft) -> Draft:
        """Upload the chunks in parts; return the draft, which refers to the uploads.

        Each body of the draft must be one chunk. Copies no bytes.

        A suspended process or a late message does no harm. Collection deletes an upload only after
        an entry whose elapsed time is past the time in the upload's key. A broker that makes an
        entry has applied all entries before this entry, so it names no upload that may be deleted.
        """
        if not draft.bodies:
            return draft
        self._on_upload()
        objects = parts(draft, self.settings.upload_bytes)
        keys = await together(*map(self._upload, objects))
        return refer(draft, list(zip(keys, objects, strict=True)))

    def is_fresh(self, draft: Draft) -> bool:
        """Return whether an entry can be made with the draft's uploads, with time to spare."""
        return not_after_ms(draft) - self.wal.state.elapsed_ms > self.retention_ms / 2

    async def _upload(self, bodies: Sequence[Part]) -> str:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            async with self._turns:
                key = object_keys.data(self.wal.clock.new_id().hex(), self._end_ms())
                try:
                    await upload(self.wal.store, key, bodies)
                    return key
                except LogError as error:
                    if attempt == ATTEMPTS_MAX:
                        raise
                    log.warning("upload of %s failed, retrying under a new key: %s", key, error)
            await asyncio.sleep(UPLOAD_RETRY_S)
        raise AssertionError("the last attempt raises or returns")

    def _end_ms(self) -> int:
        state = self.wal.state
        is_first = state.level == format_levels.FIRST
        now_ms = max(state.time_ms, self.wal.clock.now_ms()) if is_first else state.elapsed_ms
        return int(now_ms) + self.retention_ms


def body_bytes(draft: Draft) -> int:
    """Return the bytes of the draft's chunks that are not in uploads."""
    return sum(map(len, draft.bodies))
