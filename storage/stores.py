"""From a `--store` URL to an object store, and the proof that it keeps its word (DESIGN 4).

The probe writes below `probe/` only, under an id of its own, and removes what it made. A crash in
between leaves a few small objects there, which nothing reads.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from storage import keys
from storage.clock import Clock
from storage.errors import LogError, NotFound, StoreRefused, StoreUnfit, Unavailable
from storage.folder import FolderStore
from storage.objectstore import Created, MemoryStore, ObjectStore
from storage.s3_options import S3Options

T = TypeVar("T")

# Several races of two, not one of many: SeaweedFS answers two contenders in 5 ms, three in 1 s, and
# eight in up to 12 s.
_RACES = 3


async def open_store(url: str, *, s3: S3Options | None = None) -> ObjectStore:
    """`memory://`, `file:///folder`, a plain path, or `s3://bucket/prefix`.

    Raises `StoreUnfit` where the URL or what it leads to cannot be used until somebody changes it,
    `Unavailable` where the store does not answer.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "memory":
            return MemoryStore()
        case "" if url:
            return await asyncio.to_thread(FolderStore, Path(url))
        case "file" if not parts.netloc and len(parts.path) > 1:
            return await asyncio.to_thread(FolderStore, Path(unquote(parts.path)))
        case "s3" if parts.netloc:
            from storage.s3 import S3Store  # its SDK is slow to load, and a folder needs none

            return await S3Store.open(parts.netloc, unquote(parts.path), s3)
        case _:
            raise StoreUnfit(
                f"store url {url!r} is none of memory://, file:///folder, a path, s3://bucket/prefix"
            )


async def probe(store: ObjectStore, clock: Clock) -> None:
    """Refuse a store that does not keep its word: `StoreUnfit` names the property and the store."""
    base = f"{keys.PROBE}{clock.new_id().hex()}/"
    made = [base + name for name in ("a/c", "a-b", *(f"race-{it}" for it in range(_RACES)))]
    try:
        await _probe(store, base)
    except BaseException as error:
        with contextlib.suppress(LogError):  # the first failure says more
            await store.delete(made)
        if isinstance(error, StoreRefused):
            raise _unfit(store, "writing", str(error)) from error
        raise
    await store.delete(made)
    with contextlib.suppress(NotFound):
        await store.get(f"{base}a-b")
        raise _unfit(store, "DELETE", "a deleted object is still there")


async def _probe(store: ObjectStore, base: str) -> None:
    # `-` sorts before `/`: as keys `a-b` comes first, in a tree of directories `a`.
    first, second = f"{base}a-b", f"{base}a/c"
    *winners, one, two = await _together(
        *(_race(store, f"{base}race-{number}") for number in range(_RACES)),
        store.create(first, [b"1st"]),
        store.create(second, [b"2", b"nd"]),
    )
    outcomes = [one, two]
    if outcomes != [Created.DONE, Created.DONE]:
        _answered(store, outcomes)
        raise _unfit(store, "create-if-absent", "a key that nobody used is said to exist")
    winner, body = f"{base}race-0", winners[0]
    whole, middle, end, beyond, listed, again = await _together(
        _present(store, second),
        store.get_range(winner, 1, 2),
        store.get_range(winner, 3, 1000),
        store.get_range(winner, len(body) + 10, 5),
        _listed(store, base, start_after=first),
        store.create(winner, [b"overwritten"]),
    )
    if whole != b"2nd":
        raise _unfit(store, "read-after-write", f"a new object of 2nd reads as {whole!r}")
    if (middle, end, beyond) != (body[1:3], body[3:], b""):
        raise _unfit(store, "range GET", f"of {body!r} it gave {middle!r}, {end!r}, {beyond!r}")
    if listed != [second, *(f"{base}race-{number}" for number in range(_RACES))]:
        raise _unfit(store, "LIST", f"after {first} in byte order it gave {listed}")
    if again is not Created.EXISTS:
        _answered(store, [again])
        raise _unfit(store, "create-if-absent", "a second create of one key succeeded")
    if (left := await _present(store, winner)) != body:
        raise _unfit(store, "create-if-absent", f"a lost create turned {body!r} into {left!r}")


async def _race(store: ObjectStore, key: str) -> bytes:
    """What the one winner wrote."""
    # A miss first, as a reader of the WAL's next number makes it: a cache may remember it.
    with contextlib.suppress(NotFound):
        await store.get(key)
        raise _unfit(store, "read-after-write", "an object is there before it was written")
    bodies = [b"1st of " + key.encode(), b"2nd of " + key.encode()]
    outcomes = await _together(*(store.create(key, [body]) for body in bodies))
    done = [body for body, it in zip(bodies, outcomes, strict=True) if it is Created.DONE]
    if len(done) > 1:
        raise _unfit(store, "create-if-absent", "both of two concurrent creates succeeded")
    if not done and Created.UNKNOWN not in outcomes:
        raise _unfit(store, "create-if-absent", "none of two concurrent creates succeeded")
    try:
        body = await store.get(key)
    except NotFound:
        if not done:
            _answered(store, outcomes)
        raise _unfit(store, "read-after-write", "a new object is not there") from None
    if body not in (done or bodies):  # S3 may answer 409 to one that lost, or to both
        raise _unfit(store, "read-after-write", f"{done or bodies} reads as {body!r}")
    return body


def _answered(store: ObjectStore, outcomes: list[Created]) -> None:
    if Created.UNKNOWN in outcomes:
        raise Unavailable(f"{store.url} does not answer conditional PUTs: check it, try again")


async def _present(store: ObjectStore, key: str) -> bytes:
    try:
        return await store.get(key)
    except NotFound:
        raise _unfit(store, "read-after-write", "a new object is not there") from None


async def _listed(store: ObjectStore, prefix: str, *, start_after: str) -> list[str]:
    return [info.key async for info in store.list(prefix, start_after=start_after)]


async def _together(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Their results; the first failure, by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _unfit(store: ObjectStore, what: str, why: str) -> StoreUnfit:
    return StoreUnfit(f"{store.url} cannot carry a log: {what} does not hold: {why}")
