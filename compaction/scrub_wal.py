"""Scrub of the WAL: every entry and checkpoint that is kept, byte for byte.

The chain is folded anew from the oldest point from which it is whole, every entry's hash, header
and chunks are checked, and every checkpoint on the way must be what the fold comes to (I4). An
entry that is missing is damage unless two checkpoints that verify stand above it: then it was
collected. Reads the store and nothing else; what vanishes while it reads was collected.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from compaction.checks import Finding, Kind
from compaction.cluster import Cluster
from storage import entry as entries
from storage import keys
from storage.chunk import crc32c
from storage.errors import Corrupt, NotFound
from storage.state import ClusterState

AHEAD = 8
"""Entries that are fetched at once."""

Place = tuple[str, int]
"""Object and position of a chunk."""


class Chain(NamedTuple):
    """What the WAL comes to: the state after its newest entry, and the chunks that were verified on
    the way there. `state` is None where no state can be come by."""

    state: ClusterState | None
    verified: frozenset[Place]
    entries: int
    checkpoints: int
    size: int


async def scrub_wal(
    cluster: Cluster, findings: list[Finding], on_bytes: Callable[[int], None]
) -> Chain:
    """The WAL as it is listed now."""
    checkpoints = await _checkpoints(cluster, findings, on_bytes)
    seqs = [
        seq
        async for info in cluster.store.list(keys.WAL)
        if (seq := keys.seq_of(info.key)) is not None
    ]
    newest = max([*seqs, *checkpoints], default=0)
    state = _start(cluster, seqs, checkpoints, newest)
    first = state.seq if state is not None else 0
    findings += _holes(seqs, checkpoints, first, newest)
    verified: set[Place] = set()
    count = size = 0
    if state is not None:
        async for seq, body in _bodies(cluster, range(first + 1, newest + 1)):
            if seq <= state.seq:
                continue  # a checkpoint stood above damage: already beyond it
            if body is not None:
                count += 1
                size += len(body)
                on_bytes(len(body))
                try:
                    verified |= _fold(state, seq, body)
                except Corrupt as error:
                    findings.append(Finding(Kind.WAL, error.key, str(error)))
                    body = None
            if body is None:
                above = min((each for each in checkpoints if each >= seq), default=None)
                if above is None:
                    break
                state = _copy(checkpoints[above])
            _compare(state, checkpoints, findings)
    return Chain(state, frozenset(verified), count, len(checkpoints), size)


async def _checkpoints(
    cluster: Cluster, findings: list[Finding], on_bytes: Callable[[int], None]
) -> dict[int, ClusterState]:
    found: dict[int, ClusterState] = {}
    async for info in cluster.store.list(keys.CHECKPOINTS):
        seq = keys.seq_of(info.key)
        if seq is None:
            findings.append(Finding(Kind.FOREIGN, info.key, "is no checkpoint", is_damage=False))
            continue
        try:
            found[seq] = await cluster.checkpoint(info.key)
            on_bytes(info.size)
        except NotFound:
            continue
        except Corrupt as error:
            findings.append(Finding(Kind.CHECKPOINT, info.key, str(error), size=info.size))
    return found


def _start(
    cluster: Cluster, seqs: Sequence[int], checkpoints: Mapping[int, ClusterState], newest: int
) -> ClusterState | None:
    """The oldest state from which the chain is whole; the newest there is where none is."""
    present = set(seqs)
    whole_from = newest
    while whole_from in present:
        whole_from -= 1
    if whole_from == 0:
        return ClusterState(cluster.wal.cluster.cluster_id)
    able = [seq for seq in checkpoints if seq >= whole_from]
    if able:
        return _copy(checkpoints[min(able)])
    return _copy(checkpoints[max(checkpoints)]) if checkpoints else None


def _holes(
    seqs: Sequence[int], checkpoints: Mapping[int, ClusterState], first: int, newest: int
) -> list[Finding]:
    ranked = sorted(checkpoints)
    safe_to = ranked[max(len(ranked) - 2, 0)] if ranked else 0
    first = max(min(first, min(seqs, default=newest) - 1), safe_to)
    present = [first, *(seq for seq in sorted(seqs) if seq > first), newest + 1]
    return [
        Finding(
            Kind.MISSING,
            keys.wal(before + 1),
            f"{after - before - 1} of the WAL are not there, and it goes on after them",
        )
        for before, after in itertools.pairwise(present)
        if after > before + 1
    ]


async def _bodies(cluster: Cluster, seqs: range) -> AsyncIterator[tuple[int, bytes | None]]:
    async def read(seq: int) -> bytes | None:
        try:
            return await cluster.store.get(keys.wal(seq))
        except NotFound:
            return None

    for first in range(seqs.start, seqs.stop, AHEAD):
        some = range(first, min(first + AHEAD, seqs.stop))
        for seq, body in zip(some, await asyncio.gather(*map(read, some)), strict=True):
            yield seq, body


def _fold(state: ClusterState, seq: int, body: bytes) -> set[Place]:
    """Apply one entry whose every byte is checked; its chunks. Raises Corrupt."""
    key = keys.wal(seq)
    decoded = entries.decode(body, key, seq=seq, previous=state.hash)
    places: set[Place] = set()
    for chunk in decoded.entry.chunks:
        if chunk.data:
            continue
        at = decoded.body_start + chunk.position
        part = memoryview(body)[at : at + chunk.size]
        if len(part) != chunk.size or crc32c(part) != chunk.crc32c:
            raise Corrupt(key, f"checksum of the chunk at {at} differs")
        places.add((key, at))
    state.apply(decoded, key)
    return places


def _compare(
    state: ClusterState, checkpoints: Mapping[int, ClusterState], findings: list[Finding]
) -> None:
    held = checkpoints.get(state.seq)
    if held is not None and held.encode() != state.encode():
        key = keys.checkpoint(state.seq)
        findings.append(Finding(Kind.CHECKPOINT, key, "is not what the entries up to it come to"))


def _copy(state: ClusterState) -> ClusterState:
    """To fold on from; the original is compared with later."""
    return ClusterState.decode(state.encode(), keys.checkpoint(state.seq))
