"""A commit to a Delta table: its content, and deltalake's actions for it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deltalake.transaction import AddAction, RemoveAction

from tidelog.storage.core.model import SegmentFile
from tidelog.storage.tables.delta_json import statistics
from tidelog.storage.tables.manifest import NO_RESET, ManifestVersion


class TableChange(NamedTuple):
    """The content of one commit."""

    added: Sequence[SegmentFile]
    transactions: Mapping[str, int]
    removed: Sequence[SegmentFile] = ()
    data_change: bool = True
    reset: Mapping[str, int] = NO_RESET

    def is_in(self, view: ManifestVersion) -> bool:
        if not self.removed:
            return view.has(self.added)
        return view.shows(self.added, self.removed)


def remove_action(file: SegmentFile, now_ms: int, data_change: bool) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=data_change,
        deletion_timestamp=now_ms,
        size=file.size,
        partition_values={"partition": str(file.partition)},
    )


def add_action(file: SegmentFile, now_ms: int, data_change: bool) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={"partition": str(file.partition)},
        modification_time=now_ms,
        data_change=data_change,
        stats=statistics(file),
    )
