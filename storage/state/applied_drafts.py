"""Marks of applied drafts: the highest number of a broker's forwarded drafts in the log.

If the sequencer does not answer, the broker that forwarded a draft commits the same draft itself.
If a second copy of a draft is in the chain, `apply` finds the copy by the mark and skips it. Pure:
a part of the cluster state, the same on every broker (I4).

Brokers keep second copies out of the chain even without the marks (storage.cluster.sequencer). A
broker that got a draft applies each entry before the entry that it writes. If one of them has the
draft, the broker omits the draft. A broker that reloads its view skips entries. So after a reload
it does not commit a draft that another broker may have committed. The marks are therefore a second
check, and `apply` may drop old marks (FORMAT rule 10).
"""

from collections.abc import Iterator

import msgspec

from tidelog.storage.codec.entry import Entry, shares

ORIGINS_MAX = 10_000
"""Bound of the brokers' marks (I10); ~80 bytes each. The longest unused is dropped first."""
ORIGIN_WINDOW_MS = 3_600_000
"""A mark is dropped after this elapsed time without a draft of its broker."""


class AppliedDraftMark(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The highest applied draft number of a broker, and the elapsed time at its last draft."""

    origin_id: str
    number: int
    at_ms: int


class AppliedDrafts:
    """The marks of all brokers, longest unused first. Owned by the cluster state."""

    def __init__(self) -> None:
        self._marks: dict[str, AppliedDraftMark] = {}

    def __iter__(self) -> Iterator[AppliedDraftMark]:
        return iter(self._marks.values())

    def load(self, marks: list[AppliedDraftMark]) -> None:
        self._marks = {mark.origin_id: mark for mark in marks}

    def number(self, origin_id: str) -> int:
        mark = self._marks.get(origin_id)
        return 0 if mark is None else mark.number

    def see(self, entry: Entry, time_ms: int) -> frozenset[int]:
        """Store the draft ids of an entry.

        Return the indexes of its commits that were applied before.
        """
        repeated: list[int] = []
        for origin, commits in shares(entry):
            mark = self._marks.pop(origin.origin_id, None)  # inserted again below, at the end
            number = origin.number
            if mark is not None and number <= mark.number:
                repeated += commits
                number = mark.number
            self._marks[origin.origin_id] = AppliedDraftMark(origin.origin_id, number, time_ms)
        self._forget(time_ms - ORIGIN_WINDOW_MS)
        return frozenset(repeated)

    def _forget(self, horizon_ms: int) -> None:
        while self._marks:
            oldest = next(iter(self._marks.values()))
            if oldest.at_ms >= horizon_ms and len(self._marks) <= ORIGINS_MAX:
                return
            del self._marks[oldest.origin_id]
