"""Checkpoints of the cluster state: damaged bytes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import Spec, applied, chunk, with_records
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit, HotMark, IdempotencyKey
from tidelog.storage.core.actions import Append
from tidelog.storage.core.errors import Corrupt, NewerLevel
from tidelog.storage.state.cluster_state import ClusterState


@given(st.binary(max_size=300))
@examples(200)
def test_noise_is_no_checkpoint(noise: bytes) -> None:
    with pytest.raises((Corrupt, NewerLevel), match="checkpoints/7"):
        ClusterState.decode(noise, "checkpoints/7")


def test_a_damaged_checkpoint_is_corrupt_or_still_a_checkpoint() -> None:
    """Its checksum is the WAL's business: here, any damage gives Corrupt, or another level."""
    state = with_records(3, 4)
    applied(
        state,
        Spec(
            0,
            [chunk(1)],
            [Commit(b"", [Append(0, 0, 1)], IdempotencyKey("k", b"f"), HotMark("h", 2))],
        ),
    )
    body = state.encode()
    for length in range(len(body)):
        with pytest.raises(Corrupt):
            ClusterState.decode(body[:length], "checkpoints/7")
    for position in range(len(body)):
        damaged = bytearray(body)
        damaged[position] ^= 0x41
        with contextlib.suppress(Corrupt, NewerLevel):
            ClusterState.decode(bytes(damaged), "checkpoints/7")
