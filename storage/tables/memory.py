"""A manifest in memory: the reference implementation, for tests and the simulator."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tidelog.storage.core.model import SegmentFile
from tidelog.storage.tables.foreign_commits import served
from tidelog.storage.tables.manifest import (
    NO_RESET,
    ManifestConflict,
    ManifestVersion,
    Removal,
    SegmentColumns,
    SegmentIndex,
    TableCommit,
    check_transactions,
)


class MemoryCommit(NamedTuple):
    """One version of a table in memory."""

    files: tuple[SegmentFile, ...]
    transactions: Mapping[str, int]
    removed: frozenset[str] = frozenset()
    at_ms: int = 0
    data_change: bool = True


Catalog: TypeAlias = dict[str, list[MemoryCommit]]
"""Tables by prefix: the list of their commits, index = version."""


class MemoryManifest:
    """A table in a catalog, for tests and simulations.

    Instances with the same catalog and prefix share one table; each has its own loaded version.
    """

    def __init__(
        self, catalog: Catalog, prefix: str, now_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self._catalog = catalog
        self._prefix = prefix
        self._now_ms = now_ms
        self._view: ManifestVersion | None = None

    @property
    def version(self) -> int:
        return -1 if self._view is None else self._view.version

    async def segments(self, partition: int) -> SegmentIndex:
        return (await served(self, self._loaded())).segments(partition)

    async def refresh(self) -> None:
        self._load()

    async def transaction_version(self, app_id: str) -> int | None:
        return self._found(app_id, self._loaded().version)

    async def transaction_versions(self, app_ids: Sequence[str]) -> Mapping[str, int | None]:
        version = self._loaded().version
        return {app_id: self._found(app_id, version) for app_id in app_ids}

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        loaded = self._loaded().version
        if not self._load().has(files):
            self._commit(loaded, MemoryCommit(tuple(files), dict(transactions)))

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
        reset: Mapping[str, int] = NO_RESET,
    ) -> None:
        loaded = self._loaded().version
        newest = self._load()
        if newest.shows(added, removed):
            return
        if not newest.has(removed):
            raise ManifestConflict("files to remove are not in the table: refresh and plan again")
        paths = frozenset(file.path for file in removed)
        commit = MemoryCommit(tuple(added), dict(transactions), paths, data_change=data_change)
        self._commit(loaded, commit, reset)

    async def paths(self) -> set[str]:
        return self._loaded().paths()

    async def removed_since(self, since_ms: int) -> list[Removal]:
        return [
            Removal(commit.at_ms, commit.removed, frozenset(file.path for file in commit.files))
            for commit in self._catalog.get(self._prefix, [])
            if commit.at_ms >= since_ms and commit.removed
        ]

    async def newest(self) -> ManifestVersion:
        return self._loaded()

    async def commits(self, count: int) -> list[TableCommit]:
        numbers = range(self._loaded().version, 0, -1)
        return [self._table_commit(number) for number in numbers[:count]]

    async def files_at(self, version: int) -> SegmentColumns | None:
        return self._files_at(version)

    async def log_retention_ms(self) -> int | None:
        return None  # its log is not in the store

    def _commit(
        self, loaded: int, commit: MemoryCommit, reset: Mapping[str, int] = NO_RESET
    ) -> None:
        transactions = commit.transactions
        versions = {app_id: self._found(app_id, loaded) for app_id in transactions}
        check_transactions(commit.files, transactions, versions)
        commits = self._catalog.setdefault(self._prefix, [MemoryCommit((), {})])
        for number, later in enumerate(commits[loaded + 1 :], loaded + 1):
            if moved := later.transactions.keys() & transactions.keys():
                raise ManifestConflict(f"{sorted(moved)} moved after version {loaded}")
            if self._table_commit(number).is_foreign:
                raise ManifestConflict(f"version {number} is of another program: start again")
        all_of_them = {**transactions, **reset}
        commits.append(commit._replace(transactions=all_of_them, at_ms=self._now_ms()))
        self._load()

    def _table_commit(self, number: int) -> TableCommit:
        commits = self._catalog[self._prefix]
        commit = commits[number]
        partitions = {file.path: file.partition for older in commits for file in older.files}
        removed = {path: partitions.get(path, -1) for path in commit.removed}
        return TableCommit(
            number,
            commit.files,
            removed,
            commit.transactions,
            data_change=commit.data_change,
            at_ms=commit.at_ms,
        )

    def _loaded(self) -> ManifestVersion:
        return self._view or self._load()

    def _load(self) -> ManifestVersion:
        version = len(self._catalog.get(self._prefix, [])) - 1
        self._view = ManifestVersion(version, self._prefix, self._files_at(version))
        return self._view

    def _files_at(self, version: int) -> SegmentColumns:
        files: dict[str, tuple[SegmentFile, int]] = {}
        for commit in self._catalog.get(self._prefix, [])[: version + 1]:
            for path in commit.removed:
                files.pop(path, None)
            files.update((file.path, (file, commit.at_ms)) for file in commit.files)
        timed_files = files.values()
        return SegmentColumns.of(
            [file for file, _ in timed_files], [at_ms for _, at_ms in timed_files]
        )

    def _found(self, app_id: str, version: int) -> int | None:
        for commit in reversed(self._catalog.get(self._prefix, [])[: version + 1]):
            if app_id in commit.transactions:
                return commit.transactions[app_id]
        return None
