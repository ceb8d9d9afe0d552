"""Changes of the bounds of a cluster.

storage.state.time_bounds_in_effect says when a change comes into effect. **On a crash**: the
command may have made its change or not; run it again.
"""

from typing import NamedTuple

from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.time_bounds_in_effect import ClusterBounds


class BoundState(NamedTuple):
    """One bound, in milliseconds. `waits_ms`: the elapsed time until `set_to` is in effect."""

    name: str
    in_effect: int
    set_to: int
    waits_ms: int


async def bounds_of(cluster: MaintenanceSession) -> list[BoundState]:
    """Return the bounds as of now."""
    await cluster.refresh()
    return _shown(cluster.state.bounds, cluster.state.elapsed_ms)


async def change_bounds(
    cluster: MaintenanceSession, change: SetBounds, *, is_dry: bool
) -> list[BoundState]:
    """Change the bounds, and return the new ones.

    Raises InvalidRequest if the cluster cannot have these bounds, or if its level is 1.
    """
    await cluster.refresh()
    state = cluster.state
    if state.level == format_levels.FIRST:
        raise InvalidRequest(
            "bounds can be changed from level 2 of the format on: run `tidelog upgrade` first"
        )
    refusal = state.bounds.check(change)
    if refusal is not None:
        raise refusal
    if not is_dry:
        await cluster.commit([change])
        return await bounds_of(cluster)
    planned = ClusterBounds(state.bounds.now)
    planned.load(state.bounds.kept())
    planned.set(change, state.elapsed_ms)
    return _shown(planned, state.elapsed_ms)


def _shown(bounds: ClusterBounds, elapsed_ms: int) -> list[BoundState]:
    due = bounds.due_ms
    return [
        BoundState(
            name,
            getattr(bounds.now, name),
            getattr(bounds.set_to, name),
            max(due.get(name, elapsed_ms) - elapsed_ms, 0),
        )
        for name in Bounds.__struct_fields__
    ]
