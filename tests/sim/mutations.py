"""Deliberate faults: each takes one guard out of the real code, and the simulator must notice.

A harness that misses one is not finished. Faults are patches from outside, for as long as one
simulation runs; the product has no switch for any of them. `seeds_max` is the promise: so many
seeds of the named kinds find it.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

import tidelog.compaction.garbage
import tidelog.storage.cluster.sequencer
import tidelog.storage.groups.rest_members
import tidelog.storage.tables.delta
import tidelog.storage.tables.manifest
import tidelog.storage.write.writer
from tests.sim import (
    backup_mutations,
    batch_mutations,
    clock_mutations,
    damage_mutations,
    doubt_mutations,
    failures,
    idle_mutations,
    level_mutations,
    pace_mutations,
    table_mutations,
    upload_mutations,
    wal_mutations,
)
from tests.sim.backups import simulate_backups
from tests.sim.clones import simulate_clones
from tests.sim.damage import simulate_damage
from tests.sim.doubled import simulate_doubled
from tests.sim.foreign import simulate_foreign
from tests.sim.idle import simulate_idle
from tests.sim.plans import KINDS, Plan, plan_of
from tests.sim.runs import Result, simulate
from tests.sim.stores import Commit, MemoryDelta
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.newest_per_key import Latest
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.codec.entry import Draft, Entry
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import MoveLogStart, Sealed
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.groups.positions import Positions
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.groups.rest_members import MemberSession, RestMembers
from tidelog.storage.records import ClusterRecords
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.state.applied_drafts import AppliedDrafts
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.group_members import GroupMembers
from tidelog.storage.state.idempotency_records import IdempotencyRecords
from tidelog.storage.state.producers import Producers
from tidelog.storage.wal.chunk_uploads import ChunkUploads
from tidelog.storage.wal.merged_drafts import refer
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.requests import AppendRequest

FOREIGN = ("foreign",)
BACKUPS = ("backups",)
DOUBLED = ("doubled",)
WORLDS: dict[tuple[str, ...], Callable[[int], Result]] = {
    FOREIGN: simulate_foreign,
    BACKUPS: simulate_backups,
    DOUBLED: simulate_doubled,
    damage_mutations.DAMAGE: simulate_damage,
    damage_mutations.CLONES: simulate_clones,
    idle_mutations.IDLE: simulate_idle,
}
"""Worlds with seeds of their own, each in the module of its name."""

Patch = tuple[Any, str, Any]
Made = Callable[[], list[Patch]]


class Mutation(NamedTuple):
    """A guard that is taken out, the kinds of world that should notice, and how soon they do."""

    name: str
    patches: Made
    kinds: tuple[str, ...]
    seeds_max: int
    has_its_faults: Callable[[Plan], bool] = lambda plan: True
    """Whether a world of these kinds has the faults that the guard is for; others are skipped."""

    def seeds(self) -> Iterator[int]:
        if self.kinds in WORLDS:
            return itertools.count()
        of_kind = (seed for seed in itertools.count() if KINDS[seed % len(KINDS)] in self.kinds)
        return (seed for seed in of_kind if self.has_its_faults(plan_of(seed)))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, value in self.patches():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield


def seeds_needed(mutation: Mutation, seeds: Iterable[int]) -> tuple[int | None, str]:
    """How many seeds it takes until one fails, and the kinds of what is seen there."""
    with mutation.applied():
        for count, seed in enumerate(seeds, 1):
            run = WORLDS.get(mutation.kinds) or simulate
            violations = run(seed).violations
            if violations:
                kinds = sorted({violation.kind for violation in violations})
                return count, ", ".join(kinds)
    return None, ""


# -- the write path


def _offset_before_the_bytes() -> list[Patch]:
    async def upload(self: ChunkUploads, draft: Draft) -> Draft:
        if not draft.bodies:
            return draft
        key = object_keys.data(self.wal.clock.new_id().hex(), self.wal.clock.now_ms() + 3_600_000)
        uploading = asyncio.create_task(self.wal.store.create(key, draft.bodies))
        uploading.add_done_callback(lambda future: future.cancelled() or future.exception())
        return refer(draft, [(key, draft.bodies)])

    return [(ChunkUploads, "upload_if_large", upload)]


def _timeout_is_a_no() -> list[Patch]:
    return [(tidelog.storage.write.writer, "CommitUnknown", Unavailable)]


def _no_keys() -> list[Patch]:
    return [(IdempotencyRecords, "remember", lambda self, *_: None)]


def _no_sequences() -> list[Patch]:
    return [
        (Producers, "_first_offset", lambda *_: None),
        (Producers, "_check", lambda *_: None),
    ]


def _no_origins() -> list[Patch]:
    see, on_applied = AppliedDrafts.see, Sequencer.on_applied

    def forgetful(self: AppliedDrafts, entry: Entry, time_ms: int) -> frozenset[int]:
        see(self, entry, time_ms)
        return frozenset()

    def blind(self: Sequencer, entry: Entry, applied: Any) -> None:
        waiting, self._queue = self._queue, {}
        on_applied(self, entry, applied)
        self._queue = waiting
        for draft in [
            draft for draft in self._batch if draft in waiting and draft.origin is not None
        ]:
            self._finish(draft, entry.seq)

    return [(AppliedDrafts, "see", forgetful), (Sequencer, "on_applied", blind)]


def _refusals_are_forgotten() -> list[Patch]:
    return [(Sequencer, "_note_refused", lambda *_: None)]


class _Forgetful(dict[str, int]):
    def get(self, log_id: str, default: Any = None) -> Any:
        return default


def _no_hot_marks() -> list[Patch]:
    real = ClusterState.__init__

    def begin(self: ClusterState, *arguments: Any) -> None:
        real(self, *arguments)
        self.hot_logs = _Forgetful()

    def decode(*arguments: Any) -> ClusterState:
        state = decode_real(*arguments)
        state.hot_logs = _Forgetful(state.hot_logs)
        return state

    decode_real = ClusterState.decode
    return [(ClusterState, "__init__", begin), (ClusterState, "decode", staticmethod(decode))]


def _promise_before_the_disk() -> list[Patch]:
    return [(HotLog, "_write", lambda self, first, payloads: None)]


# -- tables


def _no_transactions() -> list[Patch]:
    def commit(self: MemoryDelta, change: Any) -> None:
        self._write(Commit(change.added, change.removed, dict(change.transactions)))

    return [
        (tidelog.storage.tables.delta, "check_transactions", lambda *_: None),
        (MemoryDelta, "commit", commit),
    ]


def _sealed_by_an_old_view() -> list[Patch]:
    """Stop every second sealer between its commit to the table and its action in the WAL.

    Only then the guard matters. The stop is no fault by itself.
    """
    real, plan, add = Sealer._seal_some, Sealer._plan, Sealer._add
    topics: dict[str, Any] = {}
    commits = itertools.count()

    async def seal_some(self: Sealer, topic: Any, *arguments: Any) -> int:
        topics[topic.topic_id] = topic
        return await real(self, topic, *arguments)

    async def planned(self: Sealer, topic: Any, *arguments: Any) -> None:
        await plan(self, topics[topic.topic_id], *arguments)

    async def added(self: Sealer, *arguments: Any) -> None:
        await add(self, *arguments)
        if next(commits) % 2:
            raise Unavailable("the answer to the commit is lost")

    return [
        (Sealer, "_seal_some", seal_some),
        (Sealer, "_plan", planned),
        (Sealer, "_add", added),
    ]


def _sealed_before_the_table() -> list[Patch]:
    real = Sealer._add

    async def add(
        self: Sealer, topic: Any, table: Any, files: Any, ends: Any, started: Any
    ) -> None:
        actions: list[Any] = [
            Sealed(topic.topic_id, int(app_id.removeprefix("seal-")), end)
            for app_id, end in ends.items()
        ]
        request = AppendRequest((), 0, actions=actions)
        await self.writer.append(request, Acks.ALL)
        await real(self, topic, table, files, ends, started)

    return [(Sealer, "_add", add)]


def _seal_a_record_too_many() -> list[Patch]:
    real = TailSegments.encoded

    async def encoded(self: TailSegments, topic: Any, ranges: Any, damage: Any) -> Any:
        last = {
            number: end - 1 if end - base > 1 else end for number, (base, end) in ranges.items()
        }
        shorter = {number: (base, last[number]) for number, (base, _) in ranges.items()}
        async for segment in real(self, topic, shorter, damage):
            end = ranges[segment.file.partition][1]
            longer = segment._replace(file=segment.file._replace(end_offset=end))
            yield longer if segment.file.end_offset == last[segment.file.partition] else segment

    return [(TailSegments, "encoded", encoded)]


def _remove_before_the_log_start() -> list[Patch]:
    real = MaintenanceSession.commit

    async def cut(
        cluster: MaintenanceSession, topic: Any, table: Any, cuts: Any, *, is_dry: bool
    ) -> list[Any]:
        removed = {}
        for number, partition_cut in cuts.items():
            index = await table.segments(number)
            files = [file for file in index if file.end_offset <= partition_cut.log_start_offset]
            app_id = tidelog.storage.tables.manifest.maintenance_app_id(number)
            if files:
                removed[app_id] = files
                version = (await table.transaction_version(app_id) or 0) + 1
                await table.replace(files, [], {app_id: version}, data_change=True)
        if cuts:
            await real(
                cluster,
                [
                    MoveLogStart(topic.topic_id, number, partition_cut.log_start_offset)
                    for number, partition_cut in cuts.items()
                ],
            )
        return []

    return [(tidelog.compaction.retention, "move_log_starts", cut)]


def _compaction_drops_a_row() -> list[Patch]:
    real = Latest.kept

    def kept(self: Latest) -> Any:
        result = real(self)
        return result._replace(offsets=np.sort(result.offsets)[1:])

    return [(Latest, "kept", kept)]


# -- collection (DESIGN 5)


def _collect_unsealed() -> list[Patch]:
    return [(tidelog.compaction.garbage, "live_objects", lambda state: frozenset())]


def _collect_without_grace() -> list[Patch]:
    return [(tidelog.compaction.garbage, "_is_old", lambda info, now_ms, age_ms: True)]


def _collect_uncovered() -> list[Patch]:
    def of_wal(infos: Any, base: Any, live: Any, now_ms: int, grace: Any) -> Iterator[Any]:
        infos = list(infos)
        for info in infos[:-1]:
            if info.key not in live and now_ms - info.modified_ms >= grace.wal_ms:
                yield tidelog.compaction.garbage._garbage(info, "sealed")

    return [(tidelog.compaction.garbage, "of_wal", of_wal)]


def _collect_a_segment_too_many() -> list[Patch]:
    real = tidelog.compaction.garbage.of_table

    def of_table(infos: Any, prefix: str, named: Any, *arguments: Any) -> Iterator[Any]:
        return real(infos, prefix, set(sorted(named)[1:]), *arguments)

    return [(tidelog.compaction.garbage, "of_table", of_table)]


# -- groups (DESIGN 9)


def _no_generations() -> list[Patch]:
    return [(GroupMembers, "check_commit", lambda self, commit: None)]


def _sent_is_delivered() -> list[Patch]:
    def advance(self: Positions, partition: Any, old_next: int, new_next: int) -> None:
        position = self._held.get(partition)
        if position is not None and position.next == old_next:
            position.next = position.delivered = new_next
            self.is_due = True

    return [(Positions, "advance", advance)]


def _everybody_owns() -> list[Patch]:
    real = GroupMembers.settle

    def settle(self: GroupMembers) -> set[str]:
        changed = real(self)
        for group in self:
            shared = sorted(
                {partition for member in group.members.values() for partition in member.owned}
            )
            for member in group.members.values():
                if member.is_subscribed:
                    member.owned = list(shared)
        return changed

    return [(GroupMembers, "settle", settle)]


def _replaced_serves_on() -> list[Patch]:
    async def alone(self: RestMembers, heard: MemberSession) -> MemberSession:
        return self.revalidate(heard)

    return [
        (RestMembers, "wait_for_exclusive", alone),
        (tidelog.storage.groups.rest_members, "VIEW_AGE_MAX_S", math.inf),
        (tidelog.storage.groups.rest_members, "HANDOVER_S", 0.0),
    ]


def _seeks_are_lost() -> list[Patch]:
    async def seek(self: RestGroups, heard: MemberSession, positions: Any) -> None:
        heard.instance.wake()

    return [(RestGroups, "_seek", seek)]


def _results_before_offsets() -> list[Patch]:
    real = ClusterRecords.transact

    async def transact(self: ClusterRecords, parts: Any, offsets: Any, **arguments: Any) -> Any:
        if not parts:
            return await real(self, parts, offsets, **arguments)
        placements = await real(self, parts, [], **arguments)
        _ = await real(self, [], offsets, size=1, is_json=False)
        return placements

    return [(ClusterRecords, "transact", transact)]


def _checkpoints_forget_seeks() -> list[Patch]:
    real = GroupMembers.load

    def load(self: GroupMembers, checkpoint: Any) -> None:
        real(self, checkpoint)
        for group in self:
            for member in group.members.values():
                member.sought = []

    return [(GroupMembers, "load", load)]


MUTATIONS = (
    *itertools.starmap(Mutation, wal_mutations.MUTATIONS),
    *itertools.starmap(Mutation, batch_mutations.MUTATIONS),
    Mutation("the offset before the bytes", _offset_before_the_bytes, ("brokers",), 5),
    Mutation("a timeout counts as a no", _timeout_is_a_no, ("brokers",), 60),
    Mutation("idempotency keys are forgotten", _no_keys, ("brokers",), 5),
    Mutation("sequences of producers are not looked at", _no_sequences, ("brokers",), 20),
    Mutation("a handed-over draft is put twice", _no_origins, ("brokers",), 40),
    Mutation("a refused draft that comes again is taken", _refusals_are_forgotten, DOUBLED, 60),
    Mutation("hot marks are forgotten", _no_hot_marks, ("disks",), 20),
    Mutation("acks=1 before the disk has it", _promise_before_the_disk, ("disks",), 60),
    *itertools.starmap(Mutation, level_mutations.MUTATIONS),
    *itertools.starmap(Mutation, clock_mutations.MUTATIONS),
    *itertools.starmap(Mutation, pace_mutations.MUTATIONS),
    *itertools.starmap(Mutation, upload_mutations.MUTATIONS),
    *itertools.starmap(Mutation, table_mutations.MUTATIONS),
    Mutation("the Delta transaction is no lock", _no_transactions, ("tables",), 30),
    Mutation(
        "a seal goes on with the topic of an old view", _sealed_by_an_old_view, ("sleepers",), 160
    ),
    Mutation("sealed in the WAL before the table", _sealed_before_the_table, ("tables",), 30),
    Mutation("a segment that misses its last record", _seal_a_record_too_many, ("tables",), 5),
    Mutation("removed before the log start moves", _remove_before_the_log_start, ("tables",), 60),
    Mutation("compaction drops a row", _compaction_drops_a_row, ("tables",), 20),
    Mutation("a table in doubt is obeyed", doubt_mutations.doubt_is_obeyed, FOREIGN, 40),
    Mutation(
        "files of a table in doubt are collected", doubt_mutations.doubt_is_collected, FOREIGN, 60
    ),
    Mutation(
        "foreign files are read instead of the log's", doubt_mutations.newest_is_served, FOREIGN, 40
    ),
    Mutation(
        "a table in doubt stops other topics", doubt_mutations.one_doubt_stops_all, FOREIGN, 40
    ),
    Mutation("collects entries of tails", _collect_unsealed, ("sleepers",), 30),
    Mutation("collects without a grace", _collect_without_grace, ("sleepers",), 80),
    Mutation("collects what no checkpoint covers", _collect_uncovered, ("sleepers",), 30),
    Mutation("collects a segment too many", _collect_a_segment_too_many, ("sleepers",), 20),
    Mutation("commits of any generation", _no_generations, ("groups",), 80),
    Mutation("what is sent counts as delivered", _sent_is_delivered, ("groups",), 60),
    Mutation("every member owns everything", _everybody_owns, ("groups",), 5),
    Mutation("a coordinator that was replaced serves on", _replaced_serves_on, ("groups",), 400),
    Mutation("seeks are acked and lost", _seeks_are_lost, ("groups",), 5),
    Mutation("results before their offsets", _results_before_offsets, ("groups",), 5),
    Mutation("checkpoints forget seeks", _checkpoints_forget_seeks, ("groups",), 60),
    *itertools.starmap(Mutation, failures.MUTATIONS),
    *itertools.starmap(Mutation, backup_mutations.MUTATIONS),
    *itertools.starmap(Mutation, damage_mutations.MUTATIONS),
    *itertools.starmap(Mutation, idle_mutations.MUTATIONS),
)
