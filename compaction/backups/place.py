"""A backup place: a store with copied objects, and a manifest for each backup.

`objects/<key>` has the bytes of a cluster's object `key`. `backups/...` are the manifests. In
`pruned/...` are the manifests of removed backups, until the objects of these backups are deleted. A
manifest names each object of its backup with size and checksum. The manifest is written last, so
each backup with a manifest is complete. Several backups share objects (FORMAT 9).
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, InvalidRequest, ObjectNotFound, StoreUnfit
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore
from tidelog.storage.wal.wal_objects import ClusterIdentity

OBJECTS = "objects/"
BACKUPS = "backups/"
PRUNED = "pruned/"
MAGIC = b"TIDEBAK1"
FORM = 1
BATCH_OBJECTS = 16
BATCH_BYTES = 256 * 1024 * 1024
"""Upper bound of the total size of the objects that are copied at once (I10). A larger object is
copied alone."""
RETRY_S = 0.1
RETRY_MAX_S = 5.0


class BackupObject(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An object of a backup: the key that it has in the cluster, its size and CRC-32C."""

    key: str
    size: int
    crc32c: int


class BackupTable(msgspec.Struct, array_like=True, frozen=True):
    """The table of a topic: its version at the moment of the backup, and the oldest one in it.

    The oldest version can be loaded from its copied log. If the table is in doubt or damaged,
    `doubt` says why, and all of the topic's objects are in the backup as they are.
    """

    prefix: str
    version: int
    oldest: int
    doubt: str = ""


class BackupManifest(msgspec.Struct, array_like=True, frozen=True):
    """A backup of the cluster after entry `seq`, whose hash is `hash`.

    The copied WAL begins after the checkpoint `base`, or at entry 1 if `base` is 0. `from_ms` is
    the time of the first copied entry, `to_ms` the latest time of a copied entry.
    """

    form: int
    cluster: ClusterIdentity
    base: int
    seq: int
    hash: bytes
    from_ms: int
    to_ms: int
    objects: list[BackupObject]
    tables: list[BackupTable]

    @property
    def name(self) -> "BackupName":
        return BackupName(self.seq, self.from_ms, self.to_ms)


class BackupName(NamedTuple):
    """The parts of a manifest's key."""

    seq: int
    from_ms: int
    to_ms: int

    @property
    def key(self) -> str:
        return f"{BACKUPS}{self.seq:020d}-{self.from_ms}-{self.to_ms}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BackupManifest)


async def check_place(place: ObjectStore, store: ObjectStore) -> None:
    """Raise StoreUnfit if the place cannot have backups of the cluster in `store`."""
    if place.url.startswith(f"{store.url}/"):
        raise StoreUnfit(
            f"{place.url} is inside of the cluster's store {store.url}: a backup there is lost "
            "with the store"
        )
    async for info in place.list(object_keys.CLUSTER):
        raise StoreUnfit(f"{place.url} has {info.key}: it is a cluster, no place for backups")


def encode(manifest: BackupManifest) -> bytes:
    body = _encoder.encode(manifest)
    return MAGIC + crc32c(body).to_bytes(4, "little") + body


def decode(body: bytes, key: str) -> BackupManifest:
    """Decode a manifest.

    Raises Corrupt, and StoreUnfit if a newer version of tidelog wrote the manifest.
    """
    payload = body[12:]
    if body[:8] != MAGIC or int.from_bytes(body[8:12], "little") != crc32c(payload):
        raise Corrupt(key, "checksum of the backup's manifest differs")
    try:
        (form, *_) = msgspec.msgpack.decode(payload)
        if form != FORM:
            raise StoreUnfit(f"{key} has form {form} of a backup, this version reads {FORM}")
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise Corrupt(key, f"is no manifest of a backup: {error}") from error


async def backups_in(place: ObjectStore) -> list[BackupName]:
    """Return the complete backups in a place, the oldest first. Raises Unavailable."""
    backups: list[BackupName] = []
    async for info in place.list(BACKUPS):
        parts = info.key.removeprefix(BACKUPS).split("-")
        if len(parts) == len(BackupName._fields) and all(part.isdigit() for part in parts):
            backups.append(BackupName(*map(int, parts)))
    return sorted(backups)


async def read_manifest(place: ObjectStore, name: BackupName) -> BackupManifest:
    """Read the manifest of a backup. Raises Corrupt, ObjectNotFound, StoreUnfit, Unavailable."""
    return decode(await place.get(name.key), name.key)


async def read_object(place: ObjectStore, backup_object: BackupObject) -> bytes:
    """Read and verify an object of a backup.

    Raises Unavailable, and Corrupt, also if the object is gone.
    """
    key = f"{OBJECTS}{backup_object.key}"
    try:
        body = await place.get(key)
    except ObjectNotFound:
        raise Corrupt(key, "is in the manifest of the backup, but not in the place") from None
    if len(body) != backup_object.size or crc32c(body) != backup_object.crc32c:
        raise Corrupt(key, "is not the object that the backup's manifest names")
    return body


async def store_once(store: ObjectStore, key: str, parts: Sequence[Part]) -> bool:
    """Create an object, and return when it is durable.

    Return False if the object existed already. Return True if this call created the object, or if
    the outcome of its PUT is unknown and the object has these bytes. Raises InvalidRequest if an
    object with other bytes has the key. **On a crash**, the store has the whole object or nothing.
    """
    body, pause_s = b"".join(parts), RETRY_S
    while (outcome := await store.create(key, [body])) is not Created.DONE:
        try:
            if await store.get(key) != body:
                raise InvalidRequest(
                    f"{store.url} has another object {key}: the place belongs to another history "
                    "of the cluster, or another run writes to it; take an empty place"
                )
        except ObjectNotFound:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)
            continue
        return outcome is Created.UNKNOWN
    return True


class Pace:
    """Bounds the average rate at which a backup reads.

    Each object is read at full speed. A read begins when all bytes of the earlier reads would have
    arrived at that rate. Owned by one backup.
    """

    def __init__(self, clock: Clock, bytes_per_s: int | None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def wait(self, size: int) -> None:
        """Return when an object of `size` bytes may be read."""
        if self._bytes_per_s is None:
            return
        now_s = self._clock.boot_s()
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + size / self._bytes_per_s
        await asyncio.sleep(start_s - now_s)


def is_unique(key: str) -> bool:
    """Return whether the key contains a random id, so that no two objects have the same key.

    Other keys contain only numbers, so different objects may have the same key in two histories of
    a cluster.
    """
    path = key.partition("/partition=")
    return (
        key.startswith(object_keys.DATA)
        or object_keys.parse_segment(f"partition={path[2]}") is not None
    )


def batches(infos: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    """Group objects into batches. The objects of a batch are copied at once."""
    batch: list[ObjectInfo] = []
    size = 0
    for info in infos:
        if batch and (len(batch) == BATCH_OBJECTS or size + info.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(info)
        size += info.size
    if batch:
        yield batch


def is_sealed(topic: Topic) -> bool:
    return any(partition.sealed_end for partition in topic.partitions)
