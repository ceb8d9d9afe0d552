"""The requests that deltalake sends to the store, counted by the commits that it reads and writes.

deltalake does not report its requests, and on S3 each has a price. The rules are those of
deltalake 1.6, found by a server that counts (tests/contract/test_delta_requests.py compares
them). Retries are not counted.
"""

from tidelog.storage.store.metered import DELTALAKE, StoreCounters
from tidelog.storage.store.object_store import ObjectStore

CHECKPOINT_INTERVAL = 50
"""Commits between two checkpoints. To open a table, deltalake reads at most this many commits."""
COMMIT_READS = 2
"""deltalake reads each commit twice: once for the protocol, and once for the files."""
CHECKPOINT_READS = 11
"""Ranges of a checkpoint's Parquet file."""


class DeltaRequests:
    """The counts of one table. If the store has no counters, it counts nothing."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._counters: StoreCounters | None = getattr(store, "counters", None)
        self._key = f"{prefix}/_delta_log/"

    def count_open(self, version: int) -> None:
        """Count the load of a version; -1: there is no table."""
        self._count("list")
        self._count("get", 1 + COMMIT_READS * _uncovered(version))
        if _checkpoint(version) >= 0:
            self._count("get", CHECKPOINT_READS)

    def count_update(self, old_version: int, version: int) -> None:
        """Count the load of the commits after `old_version`."""
        self._count("list")
        self._count("get", COMMIT_READS * (version - old_version) or 1)

    def count_create(self) -> None:
        """Count the commit of version 0."""
        self._count("list", 4)
        self._count("get", 9)
        self._count("create")

    def count_commit(self, version: int) -> None:
        """Count a commit, and the checkpoint that deltalake writes after some of them."""
        self._count("list", 2)
        self._count("get", 2)
        self._count("create")
        if (version + 1) % CHECKPOINT_INTERVAL == 0:
            self._count("list")
            self._count("get", COMMIT_READS * CHECKPOINT_INTERVAL)
            self._count("put", 2)

    def count_checkpoint(self, version: int) -> None:
        """Count a checkpoint of the newest version that is not part of a commit."""
        self.count_open(version)
        self._count("list")
        self._count("put", 2)

    def count_transaction_search(self, version: int) -> None:
        """Count the search for the version of a transaction in all commits since a checkpoint."""
        self._count("get", _uncovered(version))

    def _count(self, verb: str, requests: int = 1) -> None:
        if self._counters is not None:
            self._counters.count(verb, self._key, requests, client=DELTALAKE)


def _checkpoint(version: int) -> int:
    """Return the newest version with a checkpoint, or -1."""
    return (version + 1) // CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL - 1


def _uncovered(version: int) -> int:
    """Return the number of commits up to `version` that no checkpoint covers."""
    return version - _checkpoint(version)
