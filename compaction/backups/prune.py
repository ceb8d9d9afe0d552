"""Removal of old backups from a place, and of the objects that no other backup needs (FORMAT 9).

1. Copy the manifest of each old backup to `pruned/`.
2. Read the WAL to its end. If there is another hold, stop.
3. Delete these manifests in `backups/`. From then on the backups do not exist.
4. Read the manifests of all backups that are left. Delete each object that a manifest in `pruned/`
   names and no manifest in `backups/` names. Other objects stay, because an interrupted backup left
   them, and the next backup may use them.
5. Delete the manifests in `pruned/`.

A backup removes old backups under its hold, after its own manifest is written. At its start, a
backup looks for manifests in `pruned/`, which an interrupted removal left. If there are any, and
another hold is in force, the backup ends with an error, because the other backup may still delete
objects. If no other hold is in force, the backup first completes the removal. A backup looks into
`pruned/` after it took its hold. A removal looks for other holds after it wrote to `pruned/`. So if
two backups run at once, at least one of them finds the other, and no backup copies while another
one deletes. The newest manifest is never removed.

**On a crash**: each backup in `backups/` has all its objects, and the next backup completes the
removal.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from tidelog.compaction.backups.place import (
    BACKUPS,
    OBJECTS,
    PRUNED,
    backups_in,
    decode,
    read_manifest,
    store_once,
)
from tidelog.storage.store.object_store import ObjectStore

DELETE_BATCH = 1000
"""Number of keys in one delete request to S3. The hold is renewed before each request."""

Check: TypeAlias = Callable[[], Awaitable[None]]


class Pruned(NamedTuple):
    """Number of removed backups, and the number and bytes of the deleted objects."""

    backups: int = 0
    objects: int = 0
    size: int = 0


async def prune(place: ObjectStore, keep: int, confirm: Check, alone: Check) -> Pruned:
    """Remove all backups but the `keep` newest ones; the newest one always stays.

    Call `confirm` before each delete: it renews the hold, and raises if the hold is over. `alone`
    raises if another hold is in force. If a manifest is damaged, the objects of its backup are not
    known. Then delete no object, and raise Corrupt. If that manifest is in `backups/`, change
    nothing at all. Raises Unavailable, and InvalidRequest if the hold is over.
    """
    names = await backups_in(place)
    for name in names:
        await read_manifest(place, name)
    old = names[: -max(keep, 1)]
    for name in old:
        body = await place.get(name.key)
        await store_once(place, f"{PRUNED}{name.key.removeprefix(BACKUPS)}", [body])
    await alone()
    return (await finish(place, confirm))._replace(backups=len(old))


async def is_unfinished(place: ObjectStore) -> bool:
    """Return whether a removal of backups was interrupted."""
    async for _ in place.list(PRUNED):
        return True
    return False


async def finish(place: ObjectStore, confirm: Check) -> Pruned:
    """Complete each removal that has a manifest in `pruned/`, by steps 3 to 5 of the module's list.

    `confirm` and the errors are as in `prune`. If a manifest is damaged, no object is deleted, but
    step 3 may have deleted manifests.
    """
    markers = [info.key async for info in place.list(PRUNED)]
    sizes: dict[str, int] = {}
    older = (await backups_in(place))[:-1]
    removed: list[str] = []
    for key in markers:
        manifest = decode(await place.get(key), key)
        sizes |= {backup_object.key: backup_object.size for backup_object in manifest.objects}
        if manifest.name in older:
            removed.append(manifest.name.key)
    await _delete(place, removed, confirm)
    for name in await backups_in(place):
        for backup_object in (await read_manifest(place, name)).objects:
            sizes.pop(backup_object.key, None)
    await _delete(place, [f"{OBJECTS}{key}" for key in sorted(sizes)], confirm)
    await _delete(place, markers, confirm)
    return Pruned(0, len(sizes), sum(sizes.values()))


async def _delete(place: ObjectStore, keys: Sequence[str], confirm: Check) -> None:
    for first in range(0, len(keys), DELETE_BATCH):
        await confirm()
        await place.delete(keys[first : first + DELETE_BATCH])
