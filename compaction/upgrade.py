"""Changes of the level of a cluster's format.

The level is raised only if every live broker knows the new level.

**On a crash**: the command may have made its change or not; run it again. If a broker of an older
version starts after the check, it stops at the entry that raised the level, and says why.
"""

import asyncio
from typing import NamedTuple

import msgspec

from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.cluster.liveness import LivenessTracker, Member
from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import ObjectNotFound, Unavailable
from tidelog.storage.core.log_settings import MembershipSettings
from tidelog.storage.wal.view import WalView

LOOK_S = 1.0
"""Pause between two listings of the brokers."""


class LevelChange(NamedTuple):
    """The cluster's level before and after the upgrade; equal if there is nothing to raise."""

    before: int
    after: int


async def upgrade(
    cluster: MaintenanceSession,
    *,
    is_dry: bool,
    level: int = format_levels.NEWEST,
    settings: MembershipSettings,
) -> LevelChange:
    """Raise the cluster's level to `level`, by default to the newest that this version knows.

    If live brokers do not know this level, raise Unavailable with their names. `settings` are the
    brokers' settings; they say when a broker without a heartbeat counts as dead.
    """
    await cluster.refresh()
    old_level = cluster.state.level
    if old_level >= level:
        return LevelChange(old_level, old_level)
    old = await live_brokers(cluster, settings, level)
    if old:
        raise Unavailable(
            f"live brokers do not know level {level} of the format: {', '.join(old)}; upgrade or "
            "stop them first"
        )
    if not is_dry:
        await raise_level(cluster.wal, level)
    return LevelChange(old_level, level)


async def raise_level(wal: WalView, level: int) -> None:
    """Raise the level of the WAL, by an entry for each step. Does not check the brokers."""

    def next_step() -> Draft | None:
        is_below = wal.state.level < level
        return Draft([], [], [], level=wal.state.level + 1) if is_below else None

    while await wal.commit_next(next_step) is not None:
        pass


async def live_brokers(
    cluster: MaintenanceSession, settings: MembershipSettings, level: int = format_levels.NEWEST + 1
) -> list[str]:
    """Return the names of live brokers that do not know the level; by default, of all live brokers.

    A killed broker leaves its liveness object, so only the time without a heartbeat shows that the
    broker is dead. A broker that writes rarely counts as live for the time between two heartbeats.
    """
    tracker = LivenessTracker(settings)
    clock, store = cluster.clock, cluster.store
    until_s = clock.boot_s() + settings.member_timeout_s
    while True:
        now_s = clock.boot_s()
        infos = [info async for info in store.list(object_keys.BROKERS)]
        tracker.look(now_s, infos, store_ms=store.seen_ms)
        live = set(tracker.live)
        keys = tracker.silent_for_less_than(settings.quiet_interval_s + settings.member_timeout_s)
        members = [await _old(cluster, key, level, is_live=key in live) for key in keys]
        old = [name for name in members if name]
        if not old or now_s > until_s:
            return old
        await asyncio.sleep(LOOK_S)


async def _old(cluster: MaintenanceSession, key: str, level: int, *, is_live: bool) -> str | None:
    """Return the name of a broker that does not know the level and may be live.

    `is_live`: its last heartbeat is young.
    """
    try:
        member = msgspec.json.decode(await cluster.store.get(key), type=Member)
    except ObjectNotFound:
        return None  # the broker stopped after the listing
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return key if is_live else None
    is_live = is_live or member.writes_rarely
    return member.name if is_live and member.level < level else None


# -- bounds
