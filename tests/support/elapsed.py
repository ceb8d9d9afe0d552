"""The cluster's elapsed time in tests of the state: one writer, whose clock is that time."""

from tidelog.storage.codec.entry import DecodedEntry, Entry
from tidelog.storage.core import object_keys
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.elapsed_time import STEP_MS_MAX

WRITER = "b"


def elapse(state: ClusterState, until_ms: int, writer: str = WRITER) -> int:
    """Apply empty entries of the writer, to at most one step before that time.

    The writer must have an entry; the steps count in full. Return the time at which its next entry
    advances to it.
    """
    until_ms = max(until_ms, state.elapsed_ms)
    for at_ms in range(state.elapsed_ms + STEP_MS_MAX, until_ms, STEP_MS_MAX):
        seq = state.seq + 1
        entry = Entry(state.level, seq, state.hash, b"id", writer, at_ms, [], [])
        state.apply(DecodedEntry(entry, seq.to_bytes(32, "big"), 0), object_keys.wal(seq))
    return until_ms
