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

import compaction.garbage
import compaction.retain
import storage.coordinator
import storage.manifest
import storage.sequencer
import storage.table
import storage.writer
from compaction.cluster import Cluster
from compaction.latest import Latest
from storage import entry as entries
from storage import keys
from storage.consumers import Consumers
from storage.coordinator import Coordinator, Heard
from storage.entry import Draft, Entry, Sealed
from storage.errors import Unavailable
from storage.exactly_once import ExactlyOnce
from storage.group_members import GroupMembers
from storage.handover import refer
from storage.hot import Request
from storage.hotlog import HotLog
from storage.objectstore import Created
from storage.origins import Origins
from storage.positions import Positions
from storage.producers import Producers
from storage.requests import RememberedKeys
from storage.sealer import Sealer
from storage.sequencer import Sequencer
from storage.state import ClusterState
from storage.wal import Committed, Wal
from storage.writer import Acks
from tests.sim.runs import KINDS, simulate
from tests.sim.stores import Bucket, Commit, MemoryDelta

Patch = tuple[Any, str, Any]
Made = Callable[[], list[Patch]]


class Mutation(NamedTuple):
    """A guard that is taken out, the kinds of world that should notice, and how soon they do."""

    name: str
    patches: Made
    kinds: tuple[str, ...]
    seeds_max: int

    def seeds(self) -> Iterator[int]:
        return (seed for seed in itertools.count() if KINDS[seed % len(KINDS)] in self.kinds)

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
            violations = simulate(seed).violations
            if violations:
                kinds = sorted({violation.kind for violation in violations})
                return count, ", ".join(kinds)
    return None, ""


# -- the WAL (DESIGN 4, 5)


def _unknown_is_done() -> list[Patch]:
    async def put(self: Wal, key: str, parts: list[Any], entry: Entry) -> bool:
        return await self.store.create(key, parts) is not Created.EXISTS

    return [(Wal, "_put", put)]


def _exists_is_lost() -> list[Patch]:
    real = Wal._put

    async def put(self: Wal, key: str, parts: list[Any], entry: Entry) -> bool:
        if await self.store.create(key, parts) is Created.EXISTS:
            return False
        return await real(self, key, parts, entry)

    return [(Wal, "_put", put)]


def _unknown_goes_to_the_next_number() -> list[Patch]:
    async def put(self: Wal, key: str, parts: list[Any], entry: Entry) -> bool:
        while True:
            created = await self.store.create(key, parts)
            if created is Created.UNKNOWN:
                found = await self._read_back(key, entry.seq)
                return found is not None and found.entry.entry_id == entry.entry_id
            return created is Created.DONE

    return [(Wal, "_put", put)]


def _made(wal: Wal, draft: Draft) -> tuple[Entry, bytes, bytes]:
    entry = Entry(
        format=entries.FORMAT,
        seq=wal.state.seq + 1,
        previous=wal.state.hash,
        entry_id=wal.clock.new_id(),
        writer=wal.writer,
        at_ms=max(wal.state.time_ms, wal.clock.now_ms()),
        chunks=draft.chunks,
        commits=draft.commits,
        origins=list(draft.origins),
    )
    return entry, *entries.encode_header(entry)


def _ack_before_the_put() -> list[Patch]:
    async def attempt(self: Wal, draft: Draft) -> Committed | None:
        entry, header, entry_hash = _made(self, draft)
        parts = [header, *draft.bodies]
        putting = asyncio.create_task(self._put(keys.wal(entry.seq), parts, entry))
        putting.add_done_callback(lambda done: done.cancelled() or done.exception())
        outcomes = self._on_entry(entries.Decoded(entry, entry_hash, len(header)))
        return Committed(entry, header, draft.bodies, outcomes)

    return [(Wal, "_attempt", attempt)]


def _tell_before_the_put() -> list[Patch]:
    real = Wal._put

    async def put(self: Wal, key: str, parts: list[Any], entry: Entry) -> bool:
        if isinstance(self.watcher, Sequencer):
            self.watcher._tell(Committed(entry, parts[0], parts[1:], []))
        return await real(self, key, parts, entry)

    return [(Wal, "_put", put)]


def _no_view_is_void() -> list[Patch]:
    return [(Wal, "_is_void", lambda self: False)]


def _no_look_after_the_put() -> list[Patch]:
    async def is_in_chain(self: Wal, seq: int, entry_hash: bytes) -> bool:
        return True

    return [(Wal, "_is_in_chain", is_in_chain)]


def _no_refresh() -> list[Patch]:
    async def refresh(self: Wal) -> None:
        await asyncio.sleep(0)

    return [(Wal, "refresh", refresh)]


def _overwriting_store() -> list[Patch]:
    def make(self: Bucket, key: str, body: bytes) -> Created:
        self.write(key, body)
        self.on_created(key, body)
        return Created.DONE

    return [(Bucket, "make", make)]


# -- the write path


def _offset_before_the_bytes() -> list[Patch]:
    async def upload(self: Sequencer, draft: Draft) -> Draft:
        if not draft.bodies:
            return draft
        key = keys.data(self.clock.new_id().hex(), self.clock.now_ms() + 3_600_000)
        uploading = asyncio.create_task(self.wal.store.create(key, draft.bodies))
        uploading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return refer(draft, key)

    return [(Sequencer, "_upload_if_large", upload)]


def _timeout_is_a_no() -> list[Patch]:
    return [(storage.writer, "CommitUnknown", Unavailable)]


def _no_keys() -> list[Patch]:
    return [(RememberedKeys, "remember", lambda self, key: None)]


def _no_sequences() -> list[Patch]:
    return [
        (Producers, "_first_offset", lambda *_: None),
        (Producers, "_check", lambda *_: None),
    ]


def _no_origins() -> list[Patch]:
    see, on_entry = Origins.see, Sequencer.on_entry

    def forgetful(self: Origins, entry: Entry, time_ms: int) -> frozenset[int]:
        see(self, entry, time_ms)
        return frozenset()

    def blind(self: Sequencer, entry: Entry, outcomes: Any) -> None:
        waiting, self._queue = self._queue, {}
        on_entry(self, entry, outcomes)
        self._queue = waiting
        for one in [one for one in self._batch if one in waiting and one.origin is not None]:
            self._finish(one, entry.seq)

    return [(Origins, "see", forgetful), (Sequencer, "on_entry", blind)]


class _Forgetful(dict[str, int]):
    def get(self, log_id: str, default: Any = None) -> Any:
        return default


def _no_hot_marks() -> list[Patch]:
    real = ClusterState.__init__

    def begin(self: ClusterState, cluster_id: str) -> None:
        real(self, cluster_id)
        self.hot_logs = _Forgetful()

    def decode(body: bytes, key: str) -> ClusterState:
        state = decode_real(body, key)
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
        (storage.table, "check_transactions", lambda *_: None),
        (MemoryDelta, "commit", commit),
    ]


def _sealed_before_the_table() -> list[Patch]:
    real = Sealer._add

    async def add(self: Sealer, topic: Any, table: Any, files: Any, ends: Any, at_s: float) -> None:
        actions: list[Any] = [
            Sealed(topic.topic_id, int(app_id.removeprefix("seal-")), end)
            for app_id, end in ends.items()
        ]
        request = Request(self.clock.new_id(), (), 0, actions=actions)
        await self.writer.append(request, Acks.ALL)
        await real(self, topic, table, files, ends, at_s)

    return [(Sealer, "_add", add)]


def _seal_a_record_too_many() -> list[Patch]:
    real = Sealer._write

    async def write(self: Sealer, topic: Any, number: int, base: int, end: int, files: Any) -> None:
        if end - base > 1:
            await real(self, topic, number, base, end - 1, files)
            files[-1] = files[-1]._replace(end_offset=end)
        else:
            await real(self, topic, number, base, end, files)

    return [(Sealer, "_write", write)]


def _remove_before_the_log_start() -> list[Patch]:
    real = Cluster.commit

    async def cut(
        cluster: Cluster, topic: Any, table: Any, cuts: Any, *, is_dry: bool
    ) -> list[Any]:
        removed = {}
        for number, each in cuts.items():
            index = await table.segments(number)
            files = [file for file in index if file.end_offset <= each.log_start_offset]
            app_id = storage.manifest.care_app_id(number)
            if files:
                removed[app_id] = files
                version = (await table.transaction_version(app_id) or 0) + 1
                await table.replace(files, [], {app_id: version}, data_change=True)
        if cuts:
            await real(
                cluster,
                [
                    compaction.retain.MoveLogStart(topic.topic_id, number, each.log_start_offset)
                    for number, each in cuts.items()
                ],
            )
        return []

    return [(compaction.retain, "_cut", cut)]


def _compaction_drops_a_row() -> list[Patch]:
    real = Latest.kept

    def kept(self: Latest) -> Any:
        found = real(self)
        return found._replace(offsets=np.sort(found.offsets)[1:])

    return [(Latest, "kept", kept)]


# -- collection (DESIGN 5)


def _collect_unsealed() -> list[Patch]:
    return [(compaction.garbage, "live_objects", lambda state: frozenset())]


def _collect_without_grace() -> list[Patch]:
    return [(compaction.garbage, "_is_old", lambda info, now_ms, age_ms: True)]


def _collect_uncovered() -> list[Patch]:
    def of_wal(infos: Any, base: Any, live: Any, now_ms: int, grace: Any) -> Iterator[Any]:
        infos = list(infos)
        for info in infos[:-1]:
            if info.key not in live and now_ms - info.modified_ms >= grace.wal_ms:
                yield compaction.garbage._garbage(info, "sealed")

    return [(compaction.garbage, "of_wal", of_wal)]


def _uploads_are_named_for_ever() -> list[Patch]:
    return [(storage.sequencer, "not_after_ms", lambda draft: float("inf"))]


def _collect_uploads_by_age() -> list[Patch]:
    def of_data(infos: Any, base: Any, live: Any, now_ms: int, grace: Any) -> Iterator[Any]:
        for info in infos:
            if info.key not in live and now_ms - info.modified_ms >= grace.wal_ms:
                yield compaction.garbage._garbage(info, "sealed or never committed")

    return [(compaction.garbage, "of_data", of_data)]


def _collect_a_segment_too_many() -> list[Patch]:
    real = compaction.garbage.of_table

    def of_table(infos: Any, prefix: str, named: Any, now_ms: int, grace: Any) -> Iterator[Any]:
        return real(infos, prefix, set(sorted(named)[1:]), now_ms, grace)

    return [(compaction.garbage, "of_table", of_table)]


# -- groups (DESIGN 8)


def _no_generations() -> list[Patch]:
    return [(GroupMembers, "check_commit", lambda self, commit: None)]


def _sent_is_delivered() -> list[Patch]:
    def advance(self: Positions, where: Any, before: int, after: int) -> None:
        held = self._held.get(where)
        if held is not None and held.next == before:
            held.next = held.delivered = after
            self.is_due = True

    return [(Positions, "advance", advance)]


def _everybody_owns() -> list[Patch]:
    real = GroupMembers.settle

    def settle(self: GroupMembers) -> None:
        real(self)
        for group in self:
            shared = sorted({one for member in group.members.values() for one in member.owned})
            for member in group.members.values():
                if member.is_subscribed:
                    member.owned = list(shared)

    return [(GroupMembers, "settle", settle)]


def _replaced_serves_on() -> list[Patch]:
    async def alone(self: Coordinator, heard: Heard) -> Heard:
        return self.still(heard)

    return [
        (Coordinator, "alone", alone),
        (storage.coordinator, "VIEW_AGE_MAX_S", math.inf),
        (storage.coordinator, "HANDOVER_S", 0.0),
    ]


def _seeks_are_lost() -> list[Patch]:
    async def seek(self: Consumers, heard: Heard, positions: Any) -> None:
        heard.instance.wake()

    return [(Consumers, "_seek", seek)]


def _results_before_offsets() -> list[Patch]:
    real = ExactlyOnce.transact

    async def transact(self: ExactlyOnce, parts: Any, offsets: Any, **more: Any) -> Any:
        if not parts:
            return await real(self, parts, offsets, **more)
        placements = await real(self, parts, [], **more)
        _ = await real(self, [], offsets, size=1, is_json=False)
        return placements

    return [(ExactlyOnce, "transact", transact)]


def _checkpoints_forget_seeks() -> list[Patch]:
    real = GroupMembers.load

    def load(self: GroupMembers, kept: Any) -> None:
        real(self, kept)
        for group in self:
            for member in group.members.values():
                member.sought = []

    return [(GroupMembers, "load", load)]


MUTATIONS = (
    Mutation("an unknown PUT counts as done", _unknown_is_done, ("brokers",), 5),
    Mutation("412 is always another's", _exists_is_lost, ("brokers",), 40),
    Mutation(
        "an unknown PUT that is absent goes to the next number",
        _unknown_goes_to_the_next_number,
        ("brokers",),
        5,
    ),
    Mutation("acked before the PUT", _ack_before_the_put, ("brokers",), 5),
    Mutation("told to peers before the PUT", _tell_before_the_put, ("brokers",), 40),
    Mutation("no view is too old", _no_view_is_void, ("sleepers",), 60),
    Mutation("a sleeper does not look after its PUT", _no_look_after_the_put, ("sleepers",), 80),
    Mutation("reads do not ask the WAL", _no_refresh, ("brokers",), 5),
    Mutation("a store that overwrites", _overwriting_store, ("brokers",), 5),
    Mutation("the offset before the bytes", _offset_before_the_bytes, ("brokers",), 5),
    Mutation("a timeout counts as a no", _timeout_is_a_no, ("brokers",), 60),
    Mutation("idempotency keys are forgotten", _no_keys, ("brokers",), 5),
    Mutation("sequences of producers are not looked at", _no_sequences, ("brokers",), 20),
    Mutation("a handed-over draft is put twice", _no_origins, ("brokers",), 40),
    Mutation("hot marks are forgotten", _no_hot_marks, ("disks",), 20),
    Mutation("acks=1 before the disk has it", _promise_before_the_disk, ("disks",), 60),
    Mutation("the Delta transaction is no lock", _no_transactions, ("tables",), 30),
    Mutation("sealed in the WAL before the table", _sealed_before_the_table, ("tables",), 30),
    Mutation("a segment that misses its last record", _seal_a_record_too_many, ("tables",), 5),
    Mutation("removed before the log start moves", _remove_before_the_log_start, ("tables",), 60),
    Mutation("compaction drops a row", _compaction_drops_a_row, ("tables",), 20),
    Mutation("collects entries of tails", _collect_unsealed, ("sleepers",), 20),
    Mutation("collects without a grace", _collect_without_grace, ("sleepers",), 20),
    Mutation("collects what no checkpoint covers", _collect_uncovered, ("sleepers",), 30),
    Mutation("uploads are named for ever", _uploads_are_named_for_ever, ("sleepers",), 400),
    Mutation("collects uploads by their age", _collect_uploads_by_age, ("sleepers",), 400),
    Mutation("collects a segment too many", _collect_a_segment_too_many, ("sleepers",), 5),
    Mutation("commits of any generation", _no_generations, ("groups",), 80),
    Mutation("what is sent counts as delivered", _sent_is_delivered, ("groups",), 60),
    Mutation("every member owns everything", _everybody_owns, ("groups",), 5),
    Mutation("a coordinator that was replaced serves on", _replaced_serves_on, ("groups",), 200),
    Mutation("seeks are acked and lost", _seeks_are_lost, ("groups",), 5),
    Mutation("results before their offsets", _results_before_offsets, ("groups",), 5),
    Mutation("checkpoints forget seeks", _checkpoints_forget_seeks, ("groups",), 60),
)
