"""The simulated world whose store, tables and messages ask the stage what happens next."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from deltalake.exceptions import DeltaError

import tidelog.storage.tables.delta
from tests.explore import stage as stages
from tests.explore.stage import (
    ANSWER_LOST,
    CALLED_412,
    DONE,
    KILLED_AFTER,
    KILLED_AMID,
    KILLED_BEFORE,
    LATE,
    NOT_DONE,
    SUSPENDED,
    Request,
    Stage,
)
from tests.sim import machine
from tests.sim.machine import Process
from tests.sim.network import Air, Fate, Refusal, Silence
from tests.sim.stores import MemoryDelta, Way, Weather
from tests.sim.world import Broker, World
from tidelog.storage.cluster.liveness import Member, MembershipSettings
from tidelog.storage.cluster.messages import QUESTION, ForwardOutcomeUnknown, ForwardRefused
from tidelog.storage.cluster.peer_beats import PeerBeats
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Part
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.wal_objects import WalSettings
from tidelog.storage.write.writer import WriterSettings

T = TypeVar("T")

NEVER_S = 1e7
COLLECTOR = "collector"
VIEW_S = 13.0
WAL_S = 53.0
SETTINGS = LogSettings(
    wal=WalSettings(Bounds(int(VIEW_S * 1000), int(WAL_S * 1000), 60_000), 1_000_000, NEVER_S),
    writer=WriterSettings(answer_timeout_s=NEVER_S),
    membership=MembershipSettings(NEVER_S, NEVER_S, NEVER_S),
    sequencer=SequencerSettings(handover_timeout_s=0.3),
    poll_interval_s=NEVER_S,
    is_sealing=False,
    is_coordinating=False,
)
"""Nothing happens in the background: no poll, heartbeat, seal or checkpoint that no act begins."""

_OF_ENTRIES = (NOT_DONE, ANSWER_LOST, CALLED_412, LATE, KILLED_BEFORE, KILLED_AFTER)
_OF_UPLOADS = (NOT_DONE, ANSWER_LOST, KILLED_AFTER)
_QUIET = (object_keys.BROKERS, object_keys.CLUSTER, object_keys.SECRET, object_keys.PROBE)


class ExploredWorld(World):
    """Requests of its processes wait on the stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(0, SETTINGS, None, format_levels.NEWEST)
        self.air = Air(median_s=0.0)
        self.weather = Weather()
        self.stage = stage
        stage.note = self.note

    def way_of(self) -> Way:
        return _ExploredWay(self.bucket, self.draws, lambda: self.weather, self.note, self)

    def peers(self, broker: Broker) -> PeerTransport:
        return _ExploredPeers(self)

    def destroy(self, process: Process | None) -> None:
        """SIGKILL."""
        assert process is not None
        for broker in list(self.brokers.values()):
            if broker.process is process:
                self.kill(broker)
        process.kill()

    async def request(
        self,
        name: str,
        perform: Callable[[str], T],
        fates: Callable[[], Sequence[str]] = tuple,
        commutes: Callable[[], bool] = lambda: False,
        body: bytes = b"",
    ) -> T:
        """Wait for the turn of a request of the running process; return or raise its answer."""
        if self.stage.is_free:
            await asyncio.sleep(0)
            return perform(DONE)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        process = machine.current_process()
        of = machine.current()
        is_own = name.startswith((f"create {object_keys.CHECKPOINTS}", "announce"))
        lane = f"{of} {name}" if is_own else of

        def act(fate: str) -> None:
            if fate == SUSPENDED:
                self.stage.hold(request)
                return
            if fate == KILLED_BEFORE:
                self.destroy(process)
                return
            try:
                result = perform(fate)
            except Exception as error:  # noqa: BLE001 - of the store or of Delta, for the caller
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # its process may be killed
                return
            if fate in {KILLED_AMID, KILLED_AFTER}:
                self.destroy(process)
            elif not answer.done():
                answer.set_result(result)

        request = Request(lane, f"{of} {name}", process, act, fates, commutes, body)
        self.stage.send(request)
        return await answer

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Of deltalake's calls in threads: those that are requests to the store."""
        real = tidelog.storage.tables.delta.DeltaManifest._call

        async def call(manifest: Any, pool: Any, work: Any, *args: Any) -> Any:
            name = getattr(work, "__name__", "")
            if isinstance(getattr(work, "__self__", None), MemoryDelta) and name in _OF_TABLES:
                perform, fates = partial(_OF_TABLES[name], partial(work, *args)), _FATES[name]
                return await self.request(f"table {name}", perform, lambda: fates)
            return await real(manifest, pool, work, *args)

        async def no_beats(_: PeerBeats) -> None:
            """They would be choices in each half second, and tell nothing but what polls tell."""
            await asyncio.Event().wait()

        return [
            (tidelog.storage.tables.delta.DeltaManifest, "_call", call),
            (PeerBeats, "run", no_beats),
        ]


def _refresh(work: Callable[[], None], _: str) -> None:
    work()


def _commit(work: Callable[[], None], fate: str) -> None:
    if fate != NOT_DONE:
        work()
    if fate in {NOT_DONE, ANSWER_LOST}:
        raise DeltaError("no answer")


def _create(work: Callable[[], Exception | None], fate: str) -> Exception | None:
    problem = None if fate == NOT_DONE else work()
    return DeltaError("no answer") if fate in {NOT_DONE, ANSWER_LOST} else problem


_OF_TABLES: dict[str, Callable[..., Any]] = {
    "refresh": _refresh,
    "commit": _commit,
    "create": _create,
}
_FATES: dict[str, tuple[str, ...]] = {
    "refresh": (),
    "commit": (NOT_DONE, ANSWER_LOST, KILLED_BEFORE, KILLED_AFTER),
    "create": (NOT_DONE, ANSWER_LOST, KILLED_AFTER),
}


class _ExploredWay(Way):
    """One process's way to the bucket."""

    @property
    def stage(self) -> Stage:
        world: ExploredWorld = self._world
        return world.stage

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        body = b"".join(parts)

        def perform(fate: str) -> Created:
            if fate == LATE:
                self.stage.late.append((f"create {key}", lambda: self.bucket.make(key, body)))
            if fate in {LATE, NOT_DONE}:
                return Created.UNKNOWN
            outcome = self.bucket.make(key, body)
            if fate == CALLED_412:
                return Created.EXISTS
            return Created.UNKNOWN if fate == ANSWER_LOST else outcome

        return await self._request("create", key, perform, lambda: self._fates(key), body)

    def _fates(self, key: str) -> tuple[str, ...]:
        if key.startswith((object_keys.DATA, object_keys.TOPICS, object_keys.CHECKPOINTS)):
            return _OF_UPLOADS
        if not key.startswith(object_keys.WAL):
            return ()
        suspended = (SUSPENDED,) if self.stage.may_suspend else ()
        if key in self.bucket._objects:
            return (ANSWER_LOST, KILLED_BEFORE, *suspended)
        return (*_OF_ENTRIES, *suspended)

    async def delete(self, keys: Any) -> None:
        deleted_keys = list(keys)

        def perform(fate: str) -> None:
            self.bucket.remove(
                deleted_keys[: len(deleted_keys) // 2] if fate == KILLED_AMID else deleted_keys
            )

        await self._request(
            "delete", deleted_keys[0] if deleted_keys else "", perform, self._fates_of_delete
        )

    def _fates_of_delete(self) -> tuple[str, ...]:
        suspended = (SUSPENDED,) if self.stage.may_suspend else ()
        return (KILLED_BEFORE, KILLED_AMID, KILLED_AFTER, *suspended)

    async def _ask(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        return await self._request(verb, key, lambda _: effect(), tuple)

    async def _request(
        self,
        verb: str,
        key: str,
        perform: Callable[[str], T],
        fates: Callable[[], Sequence[str]],
        body: bytes = b"",
    ) -> T:
        world: ExploredWorld = self._world
        is_quiet, of = key.startswith(_QUIET), machine.current()
        try:
            return await world.request(
                f"{verb} {key}",
                perform,
                tuple if is_quiet else fates,
                lambda: is_quiet or self._commutes(verb, key, of),
                body,
            )
        finally:
            self.seen_ms = self.bucket.now_ms

    def _commutes(self, verb: str, key: str, of: str) -> bool:
        """Whether it does the same before and after any request of another process."""
        is_alone = not self.stage.has_deletes
        if verb in {"get", "get_range"}:  # objects are immutable, and the collector alone deletes
            return key in self.bucket._objects and (is_alone or of == COLLECTOR)
        return verb == "create" and not key.startswith(object_keys.WAL) and is_alone


class _ExploredPeers:
    """One broker's way to the others."""

    def __init__(self, world: ExploredWorld) -> None:
        self._world = world

    async def forward(self, peer: Member, message: bytes) -> bytes:
        async def take(broker: Broker) -> bytes:
            return await broker.log.cluster.peer_api.on_forward(message)

        return await self._send("forward", peer, take, (NOT_DONE, ANSWER_LOST, LATE, KILLED_AFTER))

    async def announce(self, peer: Member, message: bytes) -> bytes:
        if message == QUESTION:  # of a listing
            if peer.address not in self._world.brokers:
                raise ForwardRefused("connection refused")
            return b""

        async def take_announcement(broker: Broker) -> bytes:
            return broker.log.cluster.peer_api.on_announcements(message)

        return await self._send("announce", peer, take_announcement, (NOT_DONE,))

    async def read_object(self, peer: Member, message: bytes) -> bytes:
        async def read(broker: Broker) -> bytes:
            return await broker.log.cluster.read_object(message)

        return await self._send("read", peer, read, (NOT_DONE,))

    async def _send(
        self, verb: str, peer: Member, call: Callable[[Broker], Any], fates: tuple[str, ...]
    ) -> Any:
        world = self._world
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        name = f"{verb} to {peer.name}"

        def arrive(fate: Fate) -> None:
            world._arrive(peer.address, call, answer, fate)

        def perform(fate: str) -> None:
            if fate == LATE:
                world.stage.late.append((name, lambda: arrive(Fate.ANSWER_LOST)))
            elif fate == ANSWER_LOST:
                arrive(Fate.ANSWER_LOST)
            elif fate != NOT_DONE:
                arrive(Fate.GOOD)

        process = machine.current_process()
        patient = [process] if verb == "forward" and process is not None else []
        world.stage.patient += patient
        try:
            await world.request(name, perform, lambda: fates, lambda: verb == "announce")
            return await answer
        except Refusal as error:
            raise ForwardRefused(str(error)) from error
        except (Silence, Corrupt) as error:
            raise ForwardOutcomeUnknown(str(error)) from error
        finally:
            for process in patient:
                world.stage.patient.remove(process)


assert SETTINGS.sequencer.handover_timeout_s < stages.PASSED_S
