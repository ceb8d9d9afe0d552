"""The bounds of a cluster: how old a view may be, and how long entries and files are kept.

All processes must agree on the bounds. If a broker follows the WAL by one bound and a collector
deletes entries by another, records are lost. So the bounds belong to the cluster: `cluster.json`
has the first bounds, and the cluster state has the bounds in effect
(storage.state.time_bounds_in_effect). Every broker and command obeys the bounds in effect. Pure.
"""

import msgspec

from tidelog.storage.core.errors import InvalidRequest

RETENTION_FACTOR_MIN = 4
"""The WAL retention must be at least this many times the view age (DESIGN 5)."""


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of a cluster in ms. A `cluster.json` without bounds means the defaults."""

    view_age_ms: int = 600_000
    """A view of the WAL that was not refreshed for this time is expired."""
    wal_retention_ms: int = 3_600_000
    """Entries, `data/` and checkpoints are kept at least for this time after a later checkpoint
    makes them unnecessary."""
    file_grace_ms: int = 86_400_000
    """A file that a commit removed from a table is kept at least for this time after the commit."""

    @property
    def is_test(self) -> bool:
        """Return whether a bound is below its value in `LEAST`.

        Only a cluster for tests may have such a bound.
        """
        return any(
            mine < least
            for mine, least in zip(
                msgspec.structs.astuple(self), msgspec.structs.astuple(LEAST), strict=True
            )
        )


DEFAULT_BOUNDS = Bounds()
LEAST = Bounds(view_age_ms=60_000, wal_retention_ms=3_600_000, file_grace_ms=3_600_000)
"""The least bounds of a cluster that is not for tests."""
MOST = Bounds(view_age_ms=648_000_000, wal_retention_ms=2_592_000_000, file_grace_ms=518_400_000)
"""The greatest bounds that may be chosen (I10): 7.5 days, 30 days and 6 days. For 7 days, a table's
log keeps the names of the files that a commit removed. The file grace must be shorter, because
collection reads these names when the grace is over."""


def check(bounds: Bounds) -> InvalidRequest | None:
    """Return why no cluster can have these bounds. If a cluster can have them, return None."""
    if bounds.view_age_ms < 1 or (
        bounds.wal_retention_ms < RETENTION_FACTOR_MIN * bounds.view_age_ms
    ):
        return InvalidRequest(
            f"the WAL retention ({bounds.wal_retention_ms} ms) must be at least "
            f"{RETENTION_FACTOR_MIN} times the age at which a view expires "
            f"({bounds.view_age_ms} ms)"
        )
    if bounds.file_grace_ms < 0:
        return InvalidRequest(f"the file grace ({bounds.file_grace_ms} ms) is below 0")
    return None


def check_choice(bounds: Bounds, *, is_test: bool) -> InvalidRequest | None:
    """Return why an operator may not choose these bounds.

    If the choice is valid, return None. Only a cluster for tests may have a bound below its value
    in `LEAST`.
    """
    for name, value in msgspec.structs.asdict(bounds).items():
        least, most = getattr(LEAST, name), getattr(MOST, name)
        if value > most or (value < least and not is_test):
            return InvalidRequest(f"{name} must be {least} to {most}, not {value}")
    return check(bounds)
