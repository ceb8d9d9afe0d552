"""An object store that fails as S3 does: refusals, lost answers, 412 for one's own, slowness.

It never lies about what is there: `ObjectNotFound` and listings are true. It hides the outcome of
a `create` (DESIGN 4), and the time at which a call takes effect.
"""

import asyncio
import enum
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tidelog.storage.core.errors import StoreRefused, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore
from tidelog.storage.tables.memory import Catalog


class Fault(enum.Enum):
    """A fault of one call. Creates may have all but UNAVAILABLE, other calls that one alone."""

    REFUSED = "refused"  # a definite no: StoreRefused, nothing stored
    ABSENT = "absent"  # UNKNOWN, and nothing was stored
    STORED = "stored"  # UNKNOWN, though it was stored
    LATE = "late"  # UNKNOWN, and stored `late_s` afterwards unless the key exists by then
    OWN_412 = "own 412"  # stored, and reported as EXISTS
    UNAVAILABLE = "unavailable"  # a read, list, put or delete that raises Unavailable


class Call(NamedTuple):
    """One call as it was made; `key` is the prefix of a listing, the first key of a delete.

    `size` is the number of bytes that a create stores.
    """

    verb: str
    key: str
    size: int = 0


class Answered(NamedTuple):
    """A call and what came of it: an outcome's or an error's name, or `ok`."""

    call: Call
    outcome: str


_hanging: set[asyncio.Task[Any]] = set()
_catalogs: WeakKeyDictionary[ObjectStore, Catalog] = WeakKeyDictionary()

Plan = Callable[[Call], "Fault | None"]


class Script:
    """Faults for the next calls of one verb on keys with a prefix, in order; None is no fault."""

    def __init__(self, verb: str, prefix: str, faults: Iterable[Fault | None]) -> None:
        self._verb = verb
        self._prefix = prefix
        self._faults = iter(faults)

    def __call__(self, call: Call) -> Fault | None:
        if call.verb == self._verb and call.key.startswith(self._prefix):
            return next(self._faults, None)
        return None


class Seeded:
    """Each call fails with probability `rate`, how is drawn."""

    CREATES = (Fault.REFUSED, Fault.ABSENT, Fault.STORED, Fault.LATE, Fault.OWN_412)

    def __init__(self, seed: int, rate: float, *, creates: Sequence[Fault] = CREATES) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._creates = creates

    def __call__(self, call: Call) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        return self._random.choice(self._creates) if call.verb == "create" else Fault.UNAVAILABLE


@dataclass
class Gate:
    """Holds the next call of one verb on one key: before it reaches the store, or after."""

    verb: str
    key: str
    is_after: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class FaultyStore:
    """A broker's way to `inner`, which others may use too.

    Each call asks `plan` what goes wrong with it and `latency` how many seconds it takes.
    """

    def __init__(
        self,
        inner: ObjectStore,
        plan: Plan = lambda _: None,
        *,
        latency: Callable[[Call], float] | None = None,
        late_s: float = 0.5,
    ) -> None:
        self.inner = inner
        self.plan = plan
        self.latency = latency
        self.late_s = late_s
        self.answered: list[Answered] = []
        self.seen_ms = 0
        self.is_dead = False
        self._gates: list[Gate] = []
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._late: set[asyncio.Task[Created]] = set()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def now_ms(self) -> int:
        """The clock of a store in memory, which stamps its objects and its manifests' commits."""
        return getattr(self.inner, "now_ms", 0)

    @property
    def tables(self) -> Catalog:
        """The manifests of a store in memory: one catalog for all ways to it."""
        return _catalogs.setdefault(self.inner, {})

    # -- what tests hold

    def hold(self, verb: str, key: str, *, is_after: bool = False) -> Gate:
        """The next such call stops until the gate is opened."""
        gate = Gate(verb, key, is_after)
        self._gates.append(gate)
        return gate

    def kill(self) -> None:
        """The process is gone: no call of it returns or has an effect any more."""
        self.is_dead = True

    def freeze(self) -> None:
        """The process is stopped: no call of it moves on, on its way or back, until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def count(self, verb: str, prefix: str = "", outcome: str | None = None) -> int:
        """How many calls were answered so far."""
        return sum(
            call.verb == verb
            and call.key.startswith(prefix)
            and (outcome is None or outcome == answer)
            for call, answer in self.answered
        )

    async def land(self) -> None:
        """Wait until everything that is late has arrived."""
        while self._late:
            await asyncio.gather(*self._late)

    # -- ObjectStore

    async def get(self, key: str) -> bytes:
        call = Call("get", key)
        await self._before(call)
        return await self._finish(call, await self._told(call, self.inner.get(key)))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        call = Call("get_range", key)
        await self._before(call)
        return await self._finish(
            call, await self._told(call, self.inner.get_range(key, start, length))
        )

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        call = Call("create", key, sum(map(len, parts)))
        fault = await self._reach(call)
        body = [bytes(part) for part in parts]
        match fault:
            case Fault.REFUSED:
                self.answered.append(Answered(call, "StoreRefused"))
                raise StoreRefused(f"no space for {key}")
            case Fault.ABSENT:
                outcome = Created.UNKNOWN
            case Fault.LATE:
                late = asyncio.create_task(self._arrive_late(key, body))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                outcome = Created.UNKNOWN
            case _:
                outcome = await self.inner.create(key, body)
                if fault is Fault.STORED:
                    outcome = Created.UNKNOWN
                elif fault is Fault.OWN_412:
                    outcome = Created.EXISTS
        self.answered.append(Answered(call, outcome.value))
        return await self._finish(call, outcome)

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        call = Call("put", key)
        await self._before(call)
        await self._finish(call, await self._told(call, self.inner.put(key, parts)))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        call = Call("list", prefix)
        await self._before(call)
        infos = [info async for info in self.inner.list(prefix, start_after=start_after)]
        self.answered.append(Answered(call, "ok"))
        await self._finish(call, None)
        for info in infos:
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        call = Call("delete", keys[0] if keys else "")
        await self._before(call)
        await self._finish(call, await self._told(call, self.inner.delete(keys)))

    async def close(self) -> None:
        await self.inner.close()

    # -- how

    async def _arrive_late(self, key: str, body: Sequence[bytes]) -> Created:
        await asyncio.sleep(self.late_s)
        return await self.inner.create(key, body)

    async def _reach(self, call: Call) -> Fault | None:
        """The way to the store: gates, time, and what will go wrong there."""
        fault = self.plan(call)
        await self._pass(call, is_after=False)
        if self.latency is not None:
            await asyncio.sleep(self.latency(call) / 2)
        await self._thawed.wait()
        if self.is_dead:
            await self._hang()
        return fault

    async def _before(self, call: Call) -> None:
        if await self._reach(call) is not None:
            self.answered.append(Answered(call, "Unavailable"))
            raise Unavailable(f"{call.verb} {call.key}: the store does not answer")

    async def _told(self, call: Call, answer):
        try:
            result = await answer
        except Exception as error:
            self.answered.append(Answered(call, type(error).__name__))
            await self._finish(call, None)
            raise
        self.answered.append(Answered(call, "ok"))
        return result

    async def _finish(self, call: Call, answer):
        """The way back."""
        if self.latency is not None:
            await asyncio.sleep(self.latency(call) / 2)
        await self._pass(call, is_after=True)
        self.seen_ms = self.now_ms
        await self._thawed.wait()
        if self.is_dead:
            await self._hang()
        return answer

    async def _hang(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        _hanging.add(task)  # the loop alone would let go of it, and asyncio would mind
        task.add_done_callback(_hanging.discard)
        await asyncio.Event().wait()

    async def _pass(self, call: Call, *, is_after: bool) -> None:
        for gate in self._gates:
            if (gate.verb, gate.key, gate.is_after) == (call.verb, call.key, is_after):
                self._gates.remove(gate)
                gate.reached.set()
                await gate.opened.wait()
                return
