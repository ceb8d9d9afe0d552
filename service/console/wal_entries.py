"""The console's page about the WAL.

It shows the newest entries with the kinds of their actions, and the newest checkpoints.

Each request reads a few objects of the store. The page caches entries, because entries never
change. Of the cluster state, the page uses only the sequence number.
"""

from collections import Counter, OrderedDict

from pydantic import BaseModel, Field

from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import Entry
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.store.object_store import ObjectInfo

ENTRIES_SHOWN = 25
CHECKPOINTS_SHOWN = 25
ENTRIES_CACHED = 200


class WalEntry(BaseModel):
    """One object of the WAL."""

    seq: int
    at_ms: int
    writer: str
    bytes: int
    commits: int
    chunks: int
    records: int
    actions: dict[str, int] = Field(description="number of actions by kind")
    drafts: int = Field(description="drafts that brokers forwarded for this entry")


class Checkpoint(BaseModel):
    seq: int
    bytes: int
    modified_ms: int


class WalPage:
    """Reader of the WAL through one broker's log, with a cache of entries."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: OrderedDict[int, WalEntry] = OrderedDict()

    async def entries(self) -> list[WalEntry]:
        """Return the newest entries, newest first.

        This takes one LIST, and one GET for each entry that is not cached.
        """
        first_seq = max(self._broker.state.seq - ENTRIES_SHOWN, 0)
        infos = await self._broker.stored.list_entries(first_seq)
        entries = []
        for info in reversed(infos[:ENTRIES_SHOWN]):
            seq = object_keys.seq_of(info.key)
            entry = None if seq is None else await self._entry(seq, info)
            if entry is not None:
                entries.append(entry)
        return entries

    async def _entry(self, seq: int, info: ObjectInfo) -> WalEntry | None:
        cached_entry = self._known.get(seq)
        if cached_entry is not None:
            return cached_entry
        try:
            entry = await self._broker.stored.read_entry(seq)
        except Corrupt:
            return None  # a stray, or a damaged entry
        if entry is None:
            return None  # deleted by collection since the listing
        self._known[seq] = _shown(entry, info.size)
        while len(self._known) > ENTRIES_CACHED:
            self._known.popitem(last=False)
        return self._known[seq]

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the newest checkpoints, newest first. This takes one LIST."""
        infos = await self._broker.stored.list_checkpoints()
        checkpoints = [
            Checkpoint(seq=seq, bytes=info.size, modified_ms=info.modified_ms)
            for info in infos
            if (seq := object_keys.seq_of(info.key)) is not None
        ]
        return checkpoints[::-1][:CHECKPOINTS_SHOWN]


def _shown(entry: Entry, size: int) -> WalEntry:
    kinds = Counter(
        str(action.__struct_config__.tag) for commit in entry.commits for action in commit.actions
    )
    return WalEntry(
        seq=entry.seq,
        at_ms=entry.at_ms,
        writer=entry.writer,
        bytes=size,
        commits=len(entry.commits),
        chunks=len(entry.chunks),
        records=sum(chunk.rows for chunk in entry.chunks),
        actions=dict(kinds.most_common()),
        drafts=len(entry.origins),
    )
