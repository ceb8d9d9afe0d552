"""Liveness: this broker's object in `brokers/`, overwritten every few seconds, and a look at the
others'.

Soft state: nothing here decides what is in the log. A crash at any moment leaves an object that
falls silent, which every other broker counts for itself; the object is swept much later.
"""

import asyncio
import contextlib
import logging

import msgspec

from storage import keys
from storage.clock import Clock
from storage.errors import LogError, NotFound
from storage.members import PROTOCOL, Member, MembershipSettings, MemberView, ranked
from storage.objectstore import ObjectStore

log = logging.getLogger("tidelog.members")


class Membership:
    """Owned by one event loop; alone until `join`."""

    def __init__(
        self, store: ObjectStore, clock: Clock, name: str, settings: MembershipSettings
    ) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.me = Member(clock.new_id().hex(), name, "", clock.new_id().hex(), clock.now_ms())
        self.cluster_id = ""
        self.others: list[Member] = []
        """Live peers."""
        self.ranking: list[Member] = [self.me]
        """They and this broker, the sequencer first."""
        self._view = MemberView(settings)
        self._known: dict[str, Member | None] = {}
        self._beat: asyncio.Task[None] | None = None

    async def join(self, cluster_id: str, address: str, port: int) -> None:
        """Say that we are here, at `address` for peers and `port` for clients, and see who else is.
        Then `run`."""
        self.cluster_id = cluster_id
        self.me = msgspec.structs.replace(self.me, address=address, port=port)
        await self._beat_and_look()

    async def run(self) -> None:
        """Beat and look, for ever."""
        while True:
            await asyncio.sleep(self.settings.heartbeat_interval_s)
            await self._beat_and_look()

    def is_first_for(self, what: str) -> bool:
        """Whether a duty of this name is this broker's by habit; it may be another's, too."""
        return ranked(f"{self.cluster_id}/{what}", self.ranking)[0].id == self.me.id

    async def leave(self) -> None:
        """No more of us; `run` has ended."""
        self.others, self.ranking = [], [self.me]
        if self._beat is not None:  # one under way would be stored after the delete, and stay
            await asyncio.wait([self._beat])
        with contextlib.suppress(LogError):  # it falls silent all the same
            await self.store.delete([keys.broker(self.me.id)])

    async def _beat_and_look(self) -> None:
        try:
            await self.beat()
        except LogError as error:
            log.warning("cannot tell others that this broker lives: %s", error)
        try:
            await self.look()
        except LogError as error:
            log.warning("cannot see who lives: %s", error)

    async def beat(self) -> None:
        self.me = msgspec.structs.replace(self.me, beat=self.me.beat + 1)
        # Every other beat is a byte longer: some stores tell times by the second, sizes exactly.
        body = msgspec.json.encode(self.me) + b" " * (self.me.beat % 2)
        put = self.store.put(keys.broker(self.me.id), [body])
        self._beat = asyncio.create_task(put, name="tidelog-beat")
        await asyncio.shield(self._beat)

    async def look(self) -> None:
        """One LIST, and one GET for each broker never seen before."""
        now_s = self.clock.boot_s()
        self._view.look(now_s, [info async for info in self.store.list(keys.BROKERS)])
        live = self._view.live
        self._known = {key: self._known[key] for key in live if key in self._known}
        mine = keys.broker(self.me.id)
        for key in live:
            if key not in self._known and key != mine:
                self._known[key] = await self._read(key)
        self._set([member for member in self._known.values() if member is not None])
        if forgotten := [key for key in self._view.forgotten if key != mine]:
            log.info("sweeping %d liveness objects of brokers long gone", len(forgotten))
            await self.store.delete(forgotten)

    async def _read(self, key: str) -> Member | None:
        try:
            member = msgspec.json.decode(await self.store.get(key), type=Member)
        except NotFound:
            return None  # it has just left
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s is no liveness object of ours: %s", key, error)
            return None
        if member.protocol != PROTOCOL or keys.broker(member.id) != key:
            log.warning(
                "%s speaks version %d of the peers' protocol, this broker %d: they go on without "
                "each other",
                key,
                member.protocol,
                PROTOCOL,
            )
            return None
        return member

    def _set(self, others: list[Member]) -> None:
        before, was = {member.id for member in self.others}, self.ranking[0]
        self.others = others
        self.ranking = ranked(self.cluster_id, [self.me, *others])
        now = {member.id for member in others}
        if now != before or was.id != self.ranking[0].id:
            first = self.ranking[0]
            who = "this broker" if first.id == self.me.id else f"broker {first.name}"
            log.info("%d brokers live; the sequencer is %s", len(others) + 1, who)
