"""Deliberate faults in the guards against damage and copies, for tests/sim/mutations.py.

The copies are of a process (DESIGN 8 and 11).
"""

from collections.abc import Sequence
from typing import Any

import tidelog.storage.core.errors
import tidelog.storage.wal.wal_objects
from tidelog.compaction import scrub_wal
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.kafka_log import KafkaLog
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.wal.clone_fence import CloneFence
from tidelog.storage.wal.wal_objects import WalObjects
from tidelog.storage.write import recovered_requests
from tidelog.storage.write.hot_log import HotLog

Patches = list[tuple[Any, str, Any]]
IDS_WAITING = 1000

# -- damage


def no_copy_of_the_header() -> Patches:
    async def whole(self: WalObjects, seq: int, damage: Corrupt) -> Any:
        raise damage

    return [(WalObjects, "_read_whole", whole)]


def no_checkpoint_before() -> Patches:
    real = WalObjects.newest_checkpoint

    async def newest(self: WalObjects, cluster: Any) -> Any:
        keys = [info.key async for info in self.store.list(object_keys.CHECKPOINTS)]
        if keys:
            body = await self.store.get(keys[-1])
            tidelog.storage.wal.wal_objects.decode_checkpoint(
                body, keys[-1], cluster.cluster_id, cluster.bounds
            )
        return await real(self, cluster)

    return [(WalObjects, "newest_checkpoint", newest)]


def no_strays() -> Patches:
    async def none(self: WalObjects, numbers: Sequence[int]) -> list[int]:
        return []

    return [(WalObjects, "strays", none)]


def damage_stops_all_seals() -> Patches:
    real = Sealer._upload

    async def upload(self: Sealer, topic: Any, work: Any, damage: Any) -> None:
        await real(self, topic, work, damage)
        for error in damage.values():
            raise tidelog.storage.core.errors.Unavailable(str(error)) from error

    return [(Sealer, "_upload", upload)]


def scrub_skips_copies() -> Patches:
    real = scrub_wal._verify

    def verify(
        seq: int, body: bytes, previous: Any, verified: Any, damaged: Any, findings: Any
    ) -> Any:
        return real(seq, body, previous, verified, damaged, [])

    return [(scrub_wal, "_verify", verify)]


# -- copies of a process


def no_fence() -> Patches:
    return [(CloneFence, "check_writer", lambda self, decoded: None)]


def no_fence_after_a_reload() -> Patches:
    return [
        (CloneFence, "check_loaded", lambda self, state: None),
        (HotLog, "has_copy", lambda self, marks, *, is_reset: False),
    ]


def a_fenced_broker_forwards() -> Patches:
    real = Sequencer._commit_through

    async def through(self: Sequencer, target: Any, draft: Any) -> Any:
        fence: Any = self.wal.clone_fence
        fence.check_fence = lambda: None
        try:
            return await real(self, target, draft)
        finally:
            del fence.check_fence

    return [(Sequencer, "_commit_through", through)]


def used_marks_are_committed() -> Patches:
    async def settled(wal: Any, files: Sequence[Any]) -> list[Any]:
        return list(files)

    return [(recovered_requests, "settled", settled)]


def ids_wait_in_memory() -> Patches:
    async def reserve(self: KafkaLog) -> int:
        ids: list[int] = vars(self).setdefault("ids", [])
        if not ids:
            first = await self._records.reserve_producers(IDS_WAITING)
            ids += range(first, first + IDS_WAITING)
        return ids.pop(0)

    return [(KafkaLog, "reserve_producer_id", reserve)]


DAMAGE = ("damage",)
CLONES = ("clones",)
MUTATIONS = (
    ("copies of headers are not read", no_copy_of_the_header, DAMAGE, 40),
    ("a damaged checkpoint is not passed over", no_checkpoint_before, DAMAGE, 20),
    ("strays are entries", no_strays, DAMAGE, 20),
    ("damage in a partition stops the seals of others", damage_stops_all_seals, DAMAGE, 59),
    ("a scrub looks at one copy of a header", scrub_skips_copies, DAMAGE, 20),
    ("a copy does not fence", no_fence, CLONES, 20),
    ("a copy does not fence a view that was loaded", no_fence_after_a_reload, CLONES, 59),
    ("a fenced broker forwards drafts", a_fenced_broker_forwards, CLONES, 59),
    ("producer ids wait in a broker's memory", ids_wait_in_memory, CLONES, 20),
    ("a recovery takes marks of a copy for its own", used_marks_are_committed, CLONES, 59),
)
