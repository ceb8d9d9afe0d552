"""The bounds of a cluster: how old a view may be, and how long what it may name is kept.

All processes must agree on them: a broker that follows the WAL by one bound loses records where a
collector deletes entries by another. So they are the cluster's: written once, into `cluster.json`,
by the process that creates the cluster, and obeyed by every broker and command. Pure.
"""

import msgspec

from tidelog.storage.core.errors import InvalidRequest

RETENTION_FACTOR_MIN = 4
"""WAL retention in view ages (DESIGN 5)."""


class Bounds(msgspec.Struct, frozen=True):
    """Milliseconds. The defaults are those of a cluster whose `cluster.json` has none: level 1."""

    view_age_ms: int = 600_000
    """A view of the WAL that was not refreshed for this time is expired."""
    wal_retention_ms: int = 3_600_000
    """Entries, `data/` and checkpoints are kept at least for this time."""

    @property
    def is_test(self) -> bool:
        """Return whether they are below the least, which only a cluster for tests may have."""
        return any(
            mine < least
            for mine, least in zip(
                msgspec.structs.astuple(self), msgspec.structs.astuple(LEAST), strict=True
            )
        )


LEAST = Bounds(view_age_ms=60_000, wal_retention_ms=3_600_000)


def check(bounds: Bounds) -> InvalidRequest | None:
    """Return why no cluster can have these bounds, or None."""
    if bounds.view_age_ms < 1 or (
        bounds.wal_retention_ms < RETENTION_FACTOR_MIN * bounds.view_age_ms
    ):
        return InvalidRequest(
            f"the WAL retention ({bounds.wal_retention_ms} ms) must be at least "
            f"{RETENTION_FACTOR_MIN} times the age at which a view expires "
            f"({bounds.view_age_ms} ms)"
        )
    return None
