"""When a broker collects garbage: one broker of the cluster, while garbage is expected.

A collection lists all objects, so in an idle cluster it would be most of the bill. An entry makes
garbage later: when a checkpoint covers it and its retention is over. After that time without an
entry, only files of tables are left, whose grace is a day or more.
"""

import math

from tidelog.storage.broker import Broker

TASK = "collection"
ROUNDS = 12
"""Rounds of retention between two collections while garbage is expected: about an hour."""
IDLE_ROUNDS = 24 * ROUNDS
"""The same while none is: about a day."""
OTHERS_ROUNDS = 2 * IDLE_ROUNDS
"""The same for the other brokers: the one that collects may run no maintenance."""


class CollectionSchedule:
    """The collections of one broker."""

    def __init__(self, broker: Broker, round_s: float) -> None:
        """`round_s` is the mean time between two rounds of retention."""
        self._broker = broker
        self._round_s = round_s
        self._began_s = broker.clock.boot_s()
        self._collected_s = -math.inf
        self._changed_s = self._began_s
        self._seq = broker.state.seq
        self.clean_topics: dict[str, bytes] = {}
        """For `compaction.collect.plan`, from one collection to the next."""

    def begin_if_due(self) -> bool:
        """Return whether this broker collects in this round, which then counts as a collection."""
        now_s, state = self._broker.clock.boot_s(), self._broker.state
        if state.seq != self._seq:
            self._seq, self._changed_s = state.seq, now_s
        if not self._broker.cluster.owns(TASK):
            last_s = max(self._collected_s, self._began_s)
            pause_s = OTHERS_ROUNDS * self._round_s
        else:
            last_s = self._collected_s
            # The base is at least as old as the retention, and the next one as old again.
            expected_s = 2 * state.bounds.now.wal_retention_ms / 1000 + ROUNDS * self._round_s
            is_expected = now_s < self._changed_s + expected_s
            pause_s = (ROUNDS if is_expected else IDLE_ROUNDS) * self._round_s
        # A round comes at its own time: half a round early is on time.
        is_due = now_s >= last_s + pause_s - self._round_s / 2
        if is_due:
            self._collected_s = now_s
        return is_due
