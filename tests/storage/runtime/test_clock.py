"""The ids of a process (storage.runtime.clock)."""

import os

import pytest

from tidelog.storage.runtime.clock import SystemClock


def test_copies_of_a_machine_draw_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal ids, a broker would take a commit of its copy for its own, and acknowledge a
    request that is not in the log."""
    monkeypatch.setattr(os, "urandom", bytes)  # both copies get the same random bytes
    own_clock, copied_clock = SystemClock(), SystemClock()
    drawn = [clock.new_id() for _ in range(1000) for clock in (own_clock, copied_clock)]
    assert len(set(drawn)) == len(drawn)
    assert {len(drawn_id) for drawn_id in drawn} == {16}
