"""The start-up check of a store: create-if-absent, read-after-write, ranges, LIST, DELETE work.

A store may refuse, time out or lose an answer at each call. The probe repeats such calls. If a
create has no clear answer, the probe compares the stored bytes (DESIGN 4). A call without an answer
does not make the store unfit.

The probe writes below `probe/` only, under an id of its own, and deletes the objects that it wrote.
**On a crash** before the delete: a few small objects are left, which no process reads.
"""

import contextlib

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, ObjectNotFound, StoreUnfit, Unavailable
from tidelog.storage.core.log_settings import START_RETRY_S
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import together
from tidelog.storage.store.object_store import Created, ObjectStore
from tidelog.storage.store.start_retry import StartRetry

# Several races of two creates each, not one race of many creates, because SeaweedFS answers two
# concurrent creates in 5 ms, three in 1 s, and eight in up to 12 s.
_RACES = 3
_DELETES_MAX = 3
"""Largest number of deletes in one probe. A create without an answer may arrive after a delete. So
if the first key exists again, the probe repeats the delete."""


async def probe(store: ObjectStore, clock: Clock, *, retry_s: float = START_RETRY_S) -> None:
    """Test the guarantees that a log needs.

    If a test fails, raises StoreUnfit with the names of the guarantee and the store. If the store
    does not answer for `retry_s`, raises Unavailable.
    """
    await _Probe(store, StartRetry(clock, retry_s)).run()


class _Probe:
    """One probe, below a prefix of its own."""

    def __init__(self, store: ObjectStore, retry: StartRetry) -> None:
        self._store = store
        self._retry = retry
        base = f"{object_keys.PROBE}{retry.clock.new_id().hex()}/"
        self._base = base
        # In byte order, `a-b` is before `a/c`, because `-` is before `/`. A store that lists a
        # tree of folders may list the folder `a`, with `a/c`, before `a-b`.
        self._first, self._second = f"{base}a-b", f"{base}a/c"
        self._races = [f"{base}race-{number}" for number in range(_RACES)]

    async def run(self) -> None:
        try:
            await self._write_and_read()
        except BaseException:
            with contextlib.suppress(LogError):  # the first error is the one to report
                await self._store.delete(self._keys)
            raise
        await self._delete()

    @property
    def _keys(self) -> list[str]:
        return [self._second, self._first, *self._races]

    async def _write_and_read(self) -> None:
        *bodies, _, _ = await together(
            *(self._race(key) for key in self._races),
            self._create_unused(self._first, b"1st"),
            self._create_unused(self._second, b"2nd"),
        )
        winner, body = self._races[0], bodies[0]
        whole, middle, end, beyond, listed, again = await together(
            self._present(self._second),
            self._range(winner, 1, 2),
            self._range(winner, 3, 1000),
            self._range(winner, len(body) + 10, 5),
            self._listed(),
            self._create(winner, b"overwritten"),
        )
        if whole != b"2nd":
            raise self._unfit("read-after-write", f"a new object of b'2nd' reads as {whole!r}")
        if (middle, end, beyond) != (body[1:3], body[3:], b""):
            raise self._unfit(
                "range GET", f"ranges of {body!r} are {middle!r}, {end!r}, {beyond!r}"
            )
        if listed != [self._second, *self._races]:
            raise self._unfit("LIST", f"a listing in byte order after {self._first} gave {listed}")
        if again is Created.DONE:
            raise self._unfit("create-if-absent", "a second create of one key succeeded")
        if (new_body := await self._present(winner)) != body:
            raise self._unfit("create-if-absent", f"a lost create changed {body!r} to {new_body!r}")

    async def _race(self, key: str) -> bytes:
        """Race two creates of one key; return the winner's bytes."""
        # First read the missing key, as readers of the WAL do with the next number. If a cache
        # keeps the answer "not found", the read below does not find the object.
        if await self._found(key) is not None:
            raise self._unfit("read-after-write", "an object exists before it was written")
        bodies = [b"1st of " + key.encode(), b"2nd of " + key.encode()]
        outcomes = await together(*(self._create(key, body) for body in bodies))
        created_bodies = [
            body for body, it in zip(bodies, outcomes, strict=True) if it is Created.DONE
        ]
        if len(created_bodies) > 1:
            raise self._unfit("create-if-absent", "both of two concurrent creates succeeded")
        body = await self._found(key)
        if body is None and not created_bodies:
            raise self._unfit("create-if-absent", "neither of two concurrent creates succeeded")
        # Without a clear success, either create may have won. S3 may answer 409 to the loser, or
        # to both. A transport that repeats a request makes a success look like a loss.
        if body is None or body not in (created_bodies or bodies):
            raise self._unfit(
                "read-after-write", f"a new object of {created_bodies or bodies} reads as {body!r}"
            )
        return body

    async def _create_unused(self, key: str, body: bytes) -> None:
        if await self._create(key, body) is not Created.DONE and await self._found(key) != body:
            raise self._unfit(
                "create-if-absent", "a create of an unused key answered that it exists"
            )

    async def _create(self, key: str, body: bytes) -> Created:
        """Repeat the create until the store has the key.

        If it is unknown which create stored the object, return UNKNOWN. The caller then compares
        the bytes.
        """

        async def create() -> Created:
            created = await self._store.create(key, [body[:1], body[1:]])
            if created is Created.UNKNOWN and not await self._exists(key):
                raise Unavailable(
                    f"{self._store.url} does not answer conditional PUTs: check the store, retry"
                )
            return created

        try:
            return await self._retry.until_done(create)
        except StoreUnfit as error:
            raise self._unfit("writing", str(error)) from error

    async def _exists(self, key: str) -> bool:
        try:
            await self._store.get(key)
        except ObjectNotFound:
            return False
        return True

    async def _found(self, key: str) -> bytes | None:
        async def get() -> bytes | None:
            try:
                return await self._store.get(key)
            except ObjectNotFound:
                return None

        return await self._retry.until_done(get)

    async def _present(self, key: str) -> bytes:
        body = await self._found(key)
        if body is None:
            raise self._unfit("read-after-write", "a new object was not found")
        return body

    async def _range(self, key: str, start: int, length: int) -> bytes:
        try:
            return await self._retry.until_done(lambda: self._store.get_range(key, start, length))
        except ObjectNotFound:
            raise self._unfit("read-after-write", "a new object was not found") from None

    async def _listed(self) -> list[str]:
        async def listed() -> list[str]:
            listing = self._store.list(self._base, start_after=self._first)
            return [info.key async for info in listing]

        return await self._retry.until_done(listed)

    async def _delete(self) -> None:
        for _ in range(_DELETES_MAX):
            await self._retry.until_done(lambda: self._store.delete(self._keys))
            if await self._found(self._first) is None:
                return
        raise self._unfit("DELETE", "a deleted object still exists")

    def _unfit(self, test_name: str, why: str) -> StoreUnfit:
        return StoreUnfit(
            f"{self._store.url} cannot store a log: the test of {test_name} failed: {why}"
        )
