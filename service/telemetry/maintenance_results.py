"""The result of the last run of each kind of maintenance.

A command may run on a machine without a broker, so it stores its result: one small object for each
kind (FORMAT.md section 2). A broker keeps the results of its own rounds in memory, because a round
comes every few minutes.

**On a crash** of a command: the object has the result of an earlier run.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, ObjectNotFound

if TYPE_CHECKING:  # commands also use this module; the modules below are slow to import
    from tidelog.storage.broker import Broker
    from tidelog.storage.store.object_store import ObjectStore

log = logging.getLogger("tidelog.care")

Kind = Literal["retain", "compact", "collect", "scrub"]
KINDS: Final[tuple[Kind, ...]] = ("retain", "compact", "collect", "scrub")
READ_AGAIN_S = 300.0
"""Time between two readings of the results, of 4 GETs each: 35,000 GETs a month."""
WHAT_CHARS_MAX = 500


class MaintenanceResult(msgspec.Struct, frozen=True):
    """The result of the last run of one kind.

    Times are Unix times in ms. `success_ms` is 0 if no run was complete. `what` is one line.
    `damage` counts the damage that a scrub found.
    """

    kind: str
    at_ms: int
    success_ms: int
    is_ok: bool
    what: str = ""
    damage: int = 0

    def followed_by(self, later: "MaintenanceResult") -> "MaintenanceResult":
        """Return the later result, which keeps the time of the last complete run."""
        success_ms = max(self.success_ms, later.success_ms)
        return msgspec.structs.replace(later, success_ms=success_ms)


def result(kind: Kind, at_ms: int, failure: str = "", *, damage: int = 0) -> MaintenanceResult:
    """Return the result of a run that ended now. An empty `failure` means that it was complete."""
    success_ms = 0 if failure else at_ms
    return MaintenanceResult(kind, at_ms, success_ms, not failure, failure, damage)


def decoded(body: bytes | None) -> MaintenanceResult | None:
    """Return a stored result, or None if there is none that can be decoded."""
    try:
        return None if body is None else msgspec.json.decode(body, type=MaintenanceResult)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def store_result(store: "ObjectStore", now: MaintenanceResult) -> None:
    """Store the result in place of the last one of its kind.

    Raises LogError. If two commands end at the same time, one of the two results is stored.
    """
    key = object_keys.maintenance(now.kind)
    try:
        old_result = decoded(await store.get(key))
    except ObjectNotFound:
        old_result = None
    new_result = now if old_result is None else old_result.followed_by(now)
    short = msgspec.structs.replace(
        new_result, what=" ".join(new_result.what.split())[:WHAT_CHARS_MAX]
    )
    await store.put(key, [msgspec.json.encode(short)])


class StoredResults:
    """The stored results as this broker last read them. Owned by one event loop."""

    def __init__(self, broker: "Broker") -> None:
        self.found: Mapping[str, MaintenanceResult] = {}
        self._broker = broker
        self._read_s: float | None = None

    async def refresh(self, age_max_s: float = READ_AGAIN_S) -> None:
        """Read the results, unless they were read within `age_max_s`.

        If the store does not answer, `found` stays as it is.
        """
        now_s = self._broker.clock.boot_s()
        if self._read_s is not None and now_s - self._read_s < age_max_s:
            return
        self._read_s = now_s
        try:
            bodies = {kind: await self._broker.stored.read_maintenance(kind) for kind in KINDS}
        except LogError as error:
            log.info("the results of maintenance cannot be read: %s", error)
            return
        read = ((kind, decoded(body)) for kind, body in bodies.items())
        self.found = {kind: last_result for kind, last_result in read if last_result is not None}
