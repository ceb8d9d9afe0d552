"""How rarely an idle broker reads the next number of the WAL.

Each commit of a broker is announced, and beats name the newest entry, so the read finds only the
commits of programs that are no brokers, and of brokers that this one does not know. If it finds
one, there may be more.
"""

import math
from typing import Protocol

from tidelog.storage.wal.view import WalView

UNTOLD_S = 600.0
"""After an entry that no broker announced, the WAL is read often for this time."""
VIEW_AGE_SHARE = 4
"""A view is refreshed so many times before it would expire."""


class Agreement(Protocol):
    """Whether all live brokers answer each other, and know the same newest entry."""

    def agreed_s(self) -> float:
        """Return the boot time since which they agree; -inf if they do not."""

    def is_quiet(self) -> bool:
        """Return whether they agree now."""

    def on_untold(self) -> None:
        """Handle an entry that none of them announced."""


class PollPace:
    """The pace of one broker's poll."""

    def __init__(
        self, wal: WalView, interval_s: float, quiet_interval_s: float, agreement: Agreement
    ) -> None:
        self._wal = wal
        self._interval_s = interval_s
        self._quiet_interval_s = quiet_interval_s
        self._agreement = agreement
        self._untold_seq = 0
        """The newest entry at the last call, if no broker had announced it then."""
        self._noted_seq = 0
        self._often_until_s = -math.inf

    def needed_s(self) -> float:
        """Return the boot time at which the view must have been fresh; inf: read the WAL now.

        Call this once an interval.
        """
        now_s = self._wal.clock.boot_s()
        self._note_untold(now_s)
        quiet_s = min(self._quiet_interval_s, self._wal.view_age_max_s / VIEW_AGE_SHARE)
        is_often = now_s < self._often_until_s or quiet_s <= self._interval_s
        return math.inf if is_often or not self._agreement.is_quiet() else now_s - quiet_s

    def _note_untold(self, now_s: float) -> None:
        """Note an entry that no broker has announced within an interval."""
        told_seq = max(self._wal.told_seq, self._noted_seq)
        if self._untold_seq > told_seq:
            self._often_until_s = now_s + UNTOLD_S
            self._noted_seq = told_seq = self._untold_seq
            self._agreement.on_untold()
        seq = self._wal.seq
        self._untold_seq = seq if seq > told_seq else 0
