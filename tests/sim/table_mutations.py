"""Deliberate faults of the log's own commits to tables, for tests/sim/mutations.py."""

from typing import Any

from tidelog.service.server.merges import Merges
from tidelog.storage.store.object_store import Created
from tidelog.storage.tables import commit_put
from tidelog.storage.tables.delta import DeltaManifest
from tidelog.storage.tables.manifest import ManifestVersion

Patch = tuple[Any, str, Any]


def existing_is_ours() -> list[Patch]:
    async def put(store: Any, key: str, body: bytes) -> None:
        while await store.create(key, [body]) is Created.UNKNOWN:
            pass

    return [(commit_put, "put_commit", put)]


def commits_overwrite() -> list[Patch]:
    async def put(store: Any, key: str, body: bytes) -> None:
        await store.put(key, [body])

    return [(commit_put, "put_commit", put)]


def removes_are_dropped() -> list[Patch]:
    real = ManifestVersion.after

    def after(self: ManifestVersion, commit: Any) -> ManifestVersion:
        return real(self, commit._replace(removed={}))

    return [(ManifestVersion, "after", after)]


def any_commit_is_taken() -> list[Patch]:
    real = DeltaManifest._take

    async def take(self: DeltaManifest, body: bytes, pool: Any, *, is_own: bool = False) -> bool:
        try:
            return await real(self, body, pool, is_own=True)
        except Exception:  # noqa: BLE001 - damage
            return False

    return [(DeltaManifest, "_take", take)]


def merged_inputs_are_deleted() -> list[Patch]:
    real = Merges._merge

    async def merge(self: Merges, session: Any, work: Any, inputs: Any) -> bool:
        is_merged = await real(self, session, work, inputs)
        if is_merged:
            await session.store.delete([f"{work.topic.prefix}/{file.path}" for file in inputs])
        return is_merged

    return [(Merges, "_merge", merge)]


MUTATIONS: tuple[tuple[Any, ...], ...] = (
    ("a commit that exists is taken for the own one", existing_is_ours, ("tables",), 30),
    ("a commit to a table overwrites another", commits_overwrite, ("tables",), 30),
    ("removes of others' commits are dropped", removes_are_dropped, ("tables",), 30),
    ("inputs of merges are deleted at once", merged_inputs_are_deleted, ("backups",), 60),
    ("a commit follows that of any program", any_commit_is_taken, ("foreign",), 120),
)
