"""Decoders of backups: the manifest."""

from tests.tools.fuzz.target import Target, u32
from tidelog.compaction.backups import place
from tidelog.compaction.backups.place import BackupManifest, BackupObject, BackupTable
from tidelog.storage.codec import checksum
from tidelog.storage.core.errors import Corrupt, StoreUnfit
from tidelog.storage.wal.wal_objects import ClusterIdentity

KEY = "backups/00000000000000000003-1-2"


def _manifests() -> list[bytes]:
    objects = [BackupObject("wal/00000000000000000003", 70_000, 2**32 - 1)]
    tables = [BackupTable("topics/t-1", 3, 0), BackupTable("topics/u-1", -1, -1, "damaged")]
    identity = ClusterIdentity(2, "c0ffee", 1)
    full = BackupManifest(place.FORM, identity, 0, 3, bytes(32), 1, 2, objects, tables)
    bare = BackupManifest(place.FORM, identity, 2, 3, bytes(32), 1, 2, [], [])
    return [place.encode(full), place.encode(bare)]


def check_manifest(data: bytes) -> None:
    payload = data[12:]
    right = place.MAGIC + u32(checksum.crc32c(payload)) + payload
    for body in (data, right):
        try:
            manifest = place.decode(body, KEY)
        except (Corrupt, StoreUnfit):
            continue
        assert place.decode(place.encode(manifest), KEY) == manifest


TARGETS = [Target("backup", _manifests, check_manifest, 120)]
