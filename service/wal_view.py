"""The end of the chain as people look at it: entries by what is in them, and checkpoints.

Reads the store, a few objects a look, and remembers entries, which never change. Knows nothing of
the state.
"""

from collections import Counter, OrderedDict

from pydantic import BaseModel, Field

from storage import keys
from storage.entry import Entry
from storage.errors import NotFound
from storage.log import Log
from storage.objectstore import ObjectInfo

ENTRIES = 25
CHECKPOINTS = 25
REMEMBERED = 200


class WalEntry(BaseModel):
    """One object of the WAL."""

    seq: int
    at_ms: int
    writer: str
    bytes: int
    commits: int
    chunks: int
    records: int
    actions: dict[str, int] = Field(description="how many of each kind")
    drafts: int = Field(description="that brokers handed over for it")


class Checkpoint(BaseModel):
    seq: int
    bytes: int
    modified_ms: int


class WalView:
    """Of one broker's log."""

    def __init__(self, broker: Log) -> None:
        self._log = broker
        self._known: OrderedDict[int, WalEntry] = OrderedDict()

    async def entries(self) -> list[WalEntry]:
        """The newest, newest first. One LIST, and one GET for each not seen before."""
        after = max(self._log.state.seq - ENTRIES, 0)
        infos = [info async for info in self._log.store.list(keys.WAL, start_after=keys.wal(after))]
        found = []
        for info in reversed(infos[:ENTRIES]):
            seq = keys.seq_of(info.key)
            entry = None if seq is None else await self._entry(seq, info)
            if entry is not None:
                found.append(entry)
        return found

    async def _entry(self, seq: int, info: ObjectInfo) -> WalEntry | None:
        known = self._known.get(seq)
        if known is not None:
            return known
        try:
            entry = (await self._log.wal.chain.read(seq)).entry
        except NotFound:
            return None  # collected since the listing
        self._known[seq] = _shown(entry, info.size)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[seq]

    async def checkpoints(self) -> list[Checkpoint]:
        """Newest first. One LIST."""
        infos = [info async for info in self._log.store.list(keys.CHECKPOINTS)]
        found = [
            Checkpoint(seq=seq, bytes=info.size, modified_ms=info.modified_ms)
            for info in infos
            if (seq := keys.seq_of(info.key)) is not None
        ]
        return found[::-1][:CHECKPOINTS]


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
