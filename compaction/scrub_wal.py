"""Scrub of the WAL: verify every kept entry and checkpoint, byte for byte.

Apply the entries again, from the oldest state after which no entry is missing. Verify every entry's
hash, header and chunks; every later checkpoint must equal the state after its entry (I4). Of an
entry before that oldest state, readers need only the chunks, so if its header is damaged, the log
is not. A missing entry is damage, unless two verified checkpoints are above it, because then
collection may have deleted it. If a checkpoint disappears during the scrub, this is no finding,
because collection deletes checkpoints. The scrub only reads.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub_checks import Finding, FindingKind
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import DecodedEntry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import Corrupt, ObjectNotFound
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.wal.wal_objects import empty_state

ENTRIES_AHEAD = 8
"""Entries fetched at once."""

Place = tuple[str, int]
"""Object and position of a chunk."""


class VerifiedWal(NamedTuple):
    """Result of a scrub of the WAL.

    `state` is the state after the newest entry, or None if no state can be read. `verified` are the
    chunks that were verified with their entries.
    """

    state: ClusterState | None
    verified: frozenset[Place]
    entries: int
    checkpoints: int


async def scrub_wal(
    cluster: MaintenanceSession, findings: list[Finding], on_bytes: Callable[[int], None]
) -> VerifiedWal:
    """Verify the WAL as it is listed now."""
    checkpoints = await _checkpoints(cluster, findings, on_bytes)
    seqs = await _seqs(cluster, max(checkpoints, default=0), findings)
    newest = max([*seqs, *checkpoints], default=0)
    first_bounds = cluster.wal.cluster.bounds
    state = _start(cluster, seqs, checkpoints, newest)
    first = state.seq if state is not None else 0
    findings += _holes(seqs, checkpoints, first, newest)
    verified: set[Place] = set()
    damaged: list[Place] = []
    count = 0
    async for seq, body in _bodies(cluster, [seq for seq in sorted(seqs) if seq <= first]):
        if body is not None:  # if it is None, collection deleted the entry
            count += 1
            on_bytes(len(body))
            findings += _verify_alone(seq, body, verified, damaged)
    if state is not None:
        async for seq, body in _bodies(cluster, range(first + 1, newest + 1)):
            if seq <= state.seq:  # below the checkpoint that replaced a damaged entry
                if body is not None:
                    findings += _verify_alone(seq, body, verified, damaged)
                continue
            if body is not None:
                count += 1
                on_bytes(len(body))
                try:
                    _fold(state, seq, body, verified, damaged, findings)
                except Corrupt as error:
                    findings.append(Finding(FindingKind.WAL, error.key, str(error)))
                    body = None
            if body is None:
                above = min(
                    (number for number in checkpoints if number >= seq),
                    default=None,
                )
                if above is None:
                    break
                state = _copy(checkpoints[above], first_bounds)
            _compare(state, checkpoints, findings)
    tails = () if state is None else state.partitions()
    named = {(run.object_key, run.position) for *_, partition in tails for run in partition.tail}
    findings += [  # if no tail names a chunk, its records are sealed or given up
        Finding(
            FindingKind.WAL,
            key,
            f"checksum of the chunk at {position} differs",
            (key, position) in named,
        )
        for key, position in damaged
    ]
    return VerifiedWal(state, frozenset(verified), count, len(checkpoints))


async def _seqs(cluster: MaintenanceSession, checkpoint: int, findings: list[Finding]) -> list[int]:
    """Return the numbers of the entries. Other objects in `wal/` are findings, but no damage."""
    infos: dict[int, ObjectInfo] = {}
    async for info in cluster.store.list(object_keys.WAL):
        if (seq := object_keys.seq_of(info.key)) is not None:
            infos[seq] = info
        else:
            findings.append(Finding(FindingKind.FOREIGN, info.key, "is no entry", is_damage=False))
    above = sorted(seq for seq in infos if seq > checkpoint)
    for seq in await cluster.wal.objects.strays([checkpoint, *above]):
        violation = "is no entry, and far beyond the chain (tidelog repair --strays)"
        info = infos.pop(seq)
        findings.append(
            Finding(FindingKind.FOREIGN, info.key, violation, is_damage=False, size=info.size)
        )
    return list(infos)


async def _checkpoints(
    cluster: MaintenanceSession, findings: list[Finding], on_bytes: Callable[[int], None]
) -> dict[int, ClusterState]:
    states: dict[int, ClusterState] = {}
    async for info in cluster.store.list(object_keys.CHECKPOINTS):
        seq = object_keys.seq_of(info.key)
        if seq is None:
            findings.append(
                Finding(FindingKind.FOREIGN, info.key, "is not a checkpoint", is_damage=False)
            )
            continue
        try:
            states[seq] = await cluster.checkpoint(info.key)
            on_bytes(info.size)
        except ObjectNotFound:
            continue
        except Corrupt as error:
            findings.append(Finding(FindingKind.CHECKPOINT, info.key, str(error), size=info.size))
    return states


def _start(
    cluster: MaintenanceSession,
    seqs: Sequence[int],
    checkpoints: Mapping[int, ClusterState],
    newest: int,
) -> ClusterState | None:
    """Return the oldest state after which no entry is missing.

    If there is none, return the newest checkpoint. If there is no checkpoint either, return None. A
    checkpoint after entry 1 may be of a restore, and then no entries lead to it.
    """
    present = set(seqs)
    whole_from = newest
    while whole_from in present:
        whole_from -= 1
    if whole_from == 0 and 1 not in checkpoints:
        return empty_state(cluster.wal.cluster)
    able = [seq for seq in checkpoints if seq >= whole_from] or [max(checkpoints, default=0)]
    return _copy(checkpoints[min(able)], cluster.wal.cluster.bounds) if checkpoints else None


def _holes(
    seqs: Sequence[int], checkpoints: Mapping[int, ClusterState], first: int, newest: int
) -> list[Finding]:
    ranked = sorted(checkpoints)
    safe_to = ranked[max(len(ranked) - 2, 0)] if ranked else 0
    first = max(min(first, min(seqs, default=newest) - 1), safe_to)
    present = [first, *(seq for seq in sorted(seqs) if seq > first), newest + 1]
    return [
        Finding(
            FindingKind.MISSING,
            object_keys.wal(previous_seq + 1),
            f"{next_seq - previous_seq - 1} entries of the WAL are missing before later ones",
        )
        for previous_seq, next_seq in itertools.pairwise(present)
        if next_seq > previous_seq + 1
    ]


async def _bodies(
    cluster: MaintenanceSession, seqs: Sequence[int]
) -> AsyncIterator[tuple[int, bytes | None]]:
    async def read(seq: int) -> bytes | None:
        try:
            return await cluster.store.get(object_keys.wal(seq))
        except ObjectNotFound:
            return None

    for first in range(0, len(seqs), ENTRIES_AHEAD):
        batch = seqs[first : first + ENTRIES_AHEAD]
        for seq, body in zip(batch, await asyncio.gather(*map(read, batch)), strict=True):
            yield seq, body


def _fold(
    state: ClusterState,
    seq: int,
    body: bytes,
    verified: set[Place],
    damaged: list[Place],
    findings: list[Finding],
) -> None:
    """Verify every byte of one entry and apply it. Raises Corrupt if it cannot be applied."""
    decoded = _verify(seq, body, state.hash, verified, damaged, findings)
    state.apply(decoded, object_keys.wal(seq))


def _verify_alone(
    seq: int, body: bytes, verified: set[Place], damaged: list[Place]
) -> list[Finding]:
    """Verify an entry that no reader applies any more: its findings are not damage."""
    findings: list[Finding] = []
    try:
        _verify(seq, body, None, verified, damaged, findings)
    except Corrupt as error:
        findings.append(Finding(FindingKind.WAL, error.key, str(error)))
    return [finding._replace(is_damage=False) for finding in findings]


def _verify(
    seq: int,
    body: bytes,
    previous: bytes | None,
    verified: set[Place],
    damaged: list[Place],
    findings: list[Finding],
) -> DecodedEntry:
    """Verify every byte of one entry; note its verified and its damaged chunks.

    One damaged copy of the header is a finding. Raises Corrupt if both copies are damaged, or if
    they do not name `previous` as the hash of the entry before.
    """
    key = object_keys.wal(seq)
    copy = entries.copy_in(body)
    try:
        decoded = entries.decode(body, key, seq=seq, previous=previous)
        if decoded.entry.level > format_levels.FIRST and copy != body[: decoded.body_start]:
            violation = "the copy of its header at the end differs"
            findings.append(Finding(FindingKind.WAL, key, violation))
    except Corrupt as error:
        if copy is None:
            raise
        decoded = entries.decode(copy, key, seq=seq, previous=previous)
        findings.append(Finding(FindingKind.WAL, key, f"{error}: its copy at the end is whole"))
    for chunk in decoded.entry.chunks:
        if chunk.data:
            continue
        position = decoded.body_start + chunk.position
        part = memoryview(body)[position : position + chunk.size]
        if len(part) != chunk.size or crc32c(part) != chunk.crc32c:
            damaged.append((key, position))
        else:
            verified.add((key, position))
    return decoded


def _compare(
    state: ClusterState, checkpoints: Mapping[int, ClusterState], findings: list[Finding]
) -> None:
    checkpoint = checkpoints.get(state.seq)
    if checkpoint is not None and not checkpoint.equals(state):
        key = object_keys.checkpoint(state.seq)
        findings.append(
            Finding(FindingKind.CHECKPOINT, key, "differs from the state after its entries")
        )


def _copy(state: ClusterState, bounds: Bounds) -> ClusterState:
    """Copy a state, to apply entries to the copy: `_compare` needs the original.

    `bounds` are those of `cluster.json`.
    """
    return ClusterState.decode(state.encode(), object_keys.checkpoint(state.seq), bounds)
