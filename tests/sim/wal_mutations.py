"""Deliberate faults of the WAL (DESIGN 4, 5), for tests/sim/mutations.py."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.stores import Bucket
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Draft, Entry
from tidelog.storage.core import object_keys
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.entry_put import EntryPut
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.wal.view import Committed, WalView

Patch = tuple[Any, str, Any]


def _unknown_is_done() -> list[Patch]:
    async def put(
        self: EntryPut, key: str, parts: list[Any], entry: Entry, entry_hash: bytes
    ) -> bool:
        return await self.objects.store.create(key, parts) is not Created.EXISTS

    return [(EntryPut, "put", put)]


def _exists_is_lost() -> list[Patch]:
    real = EntryPut.put

    async def put(
        self: EntryPut, key: str, parts: list[Any], entry: Entry, entry_hash: bytes
    ) -> bool:
        if await self.objects.store.create(key, parts) is Created.EXISTS:
            return False
        return await real(self, key, parts, entry, entry_hash)

    return [(EntryPut, "put", put)]


def _unknown_goes_to_the_next_number() -> list[Patch]:
    async def put(
        self: EntryPut, key: str, parts: list[Any], entry: Entry, entry_hash: bytes
    ) -> bool:
        while True:
            created = await self.objects.store.create(key, parts)
            if created is Created.UNKNOWN:
                stored_entry = await self._read_back(key, entry.seq)
                return stored_entry is not None and stored_entry.hash == entry_hash
            return created is Created.DONE

    return [(EntryPut, "put", put)]


def _made(wal: WalView, draft: Draft) -> tuple[Entry, bytes, bytes]:
    entry = Entry(
        level=wal.state.level,
        seq=wal.state.seq + 1,
        previous=wal.state.hash,
        entry_id=wal.clock.new_id(),
        writer=wal.writer,
        at_ms=max(wal.state.time_ms, wal.clock.now_ms()),
        chunks=draft.chunks,
        commits=draft.commits,
        origins=list(draft.origins),
    )
    return entry, *entries.encode_header(entry)


def _ack_before_the_put() -> list[Patch]:
    async def attempt(self: WalView, draft: Draft) -> Committed | None:
        entry, header, entry_hash = _made(self, draft)
        parts = [header, *draft.bodies]
        putting = asyncio.create_task(
            self._entry_put.put(object_keys.wal(entry.seq), parts, entry, entry_hash)
        )
        putting.add_done_callback(lambda future: future.cancelled() or future.exception())
        outcomes = self._on_entry(entries.DecodedEntry(entry, entry_hash, len(header)))
        return Committed(entry, header, draft.bodies, outcomes)

    return [(WalView, "_attempt", attempt)]


def _tell_before_the_put() -> list[Patch]:
    real = WalView._attempt

    async def attempt(self: WalView, draft: Draft) -> Committed | None:
        put = self._entry_put.put

        async def told(key: str, parts: list[Any], entry: Entry, entry_hash: bytes) -> bool:
            for subscriber in self.subscribers:
                if isinstance(subscriber, Sequencer):
                    subscriber._announce(Committed(entry, parts[0], parts[1:], []))
            return await put(key, parts, entry, entry_hash)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._entry_put, "put", told)
            return await real(self, draft)

    return [(WalView, "_attempt", attempt)]


def _no_view_is_void() -> list[Patch]:
    return [(WalView, "_is_void", lambda self: False)]


def _no_look_after_the_put() -> list[Patch]:
    async def is_in_chain(self: EntryPut, seq: int, entry_hash: bytes) -> bool:
        return True

    return [(EntryPut, "is_in_chain", is_in_chain)]


def _no_refresh() -> list[Patch]:
    async def refresh(self: WalView, since_s: float = math.inf) -> None:
        await asyncio.sleep(0)

    return [(WalView, "refresh", refresh)]


def _bytes_of_a_peer_are_not_checked() -> list[Patch]:
    async def read(self: TailObjects, key: str, position: int, size: int, crc: int) -> bytes:
        return await self._bytes(key, position, size, is_forwarded=False)

    return [(TailObjects, "read", read)]


def _overwriting_store() -> list[Patch]:
    def make(self: Bucket, key: str, body: bytes) -> Created:
        self.write(key, body)
        self.on_created(key, body)
        return Created.DONE

    return [(Bucket, "make", make)]


MUTATIONS: tuple[tuple[str, Callable[[], list[Patch]], tuple[str, ...], int], ...] = (
    ("an unknown PUT counts as done", _unknown_is_done, ("brokers",), 10),
    ("412 is always another's", _exists_is_lost, ("brokers",), 40),
    (
        "an unknown PUT that is absent goes to the next number",
        _unknown_goes_to_the_next_number,
        ("brokers",),
        40,
    ),
    ("acked before the PUT", _ack_before_the_put, ("brokers",), 5),
    ("announced to peers before the PUT", _tell_before_the_put, ("brokers",), 40),
    ("no view is too old", _no_view_is_void, ("sleepers",), 60),
    ("a suspended writer does not look after its PUT", _no_look_after_the_put, ("sleepers",), 500),
    ("reads do not ask the WAL", _no_refresh, ("brokers",), 5),
    ("bytes of a peer are not checked", _bytes_of_a_peer_are_not_checked, ("brokers",), 40),
    ("a store that overwrites", _overwriting_store, ("brokers",), 5),
)
