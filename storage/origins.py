"""Drafts that were handed over, applied once: which numbers of which brokers the log has seen.

A broker that handed its draft to the sequencer and hears nothing puts the same draft into an entry
of its own. Both may end in the chain; `Origins` tells the first from the second. Pure: a part of
the cluster state, the same on every broker (I4).

It would even do without memory of long ago: an entry names the one before it, so whoever makes one
has read all that came before, and leaves out what is there already (storage.sequencer). What is
remembered here guards against a maker whose view was loaded anew in between.
"""

from collections.abc import Iterator

import msgspec

from storage.entry import Entry, shares

ORIGINS_MAX = 10_000
"""Brokers remembered (I10); the longest unused go first. ~80 bytes each."""
ORIGIN_WINDOW_MS = 3_600_000
"""How long, in entry time: several times the age at which a view is void."""


class OriginMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The highest number of a broker's drafts that was seen, and when one last was."""

    origin_id: str
    number: int
    at_ms: int


class Origins:
    """The marks, the longest unused first."""

    def __init__(self) -> None:
        self._marks: dict[str, OriginMark] = {}

    def __iter__(self) -> Iterator[OriginMark]:
        return iter(self._marks.values())

    def load(self, marks: list[OriginMark]) -> None:
        self._marks = {mark.origin_id: mark for mark in marks}

    def number(self, origin_id: str) -> int:
        """The highest number seen of that broker; 0 when there is none."""
        mark = self._marks.get(origin_id)
        return 0 if mark is None else mark.number

    def see(self, entry: Entry, time_ms: int) -> frozenset[int]:
        """The numbers of the entry's commits that were applied before; its drafts are known from
        now on."""
        repeated: list[int] = []
        for origin, commits in shares(entry):
            known = self._marks.pop(origin.origin_id, None)  # it comes last again
            number = origin.number
            if known is not None and number <= known.number:
                repeated += commits
                number = known.number
            self._marks[origin.origin_id] = OriginMark(origin.origin_id, number, time_ms)
        self._forget(time_ms - ORIGIN_WINDOW_MS)
        return frozenset(repeated)

    def _forget(self, horizon_ms: int) -> None:
        while self._marks:
            oldest = next(iter(self._marks.values()))
            if oldest.at_ms >= horizon_ms and len(self._marks) <= ORIGINS_MAX:
                return
            del self._marks[oldest.origin_id]
