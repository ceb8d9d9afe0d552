"""Commits of our own to a table: create-if-absent of the next version, and when we may.

A commit is one PUT of `_delta_log/<version>.json`, with the outcomes of DESIGN 4: done, lost,
unknown. The bytes of each commit are unique, so the object at the version shows whose commit it is.

**On a crash** before the PUT, nothing is left. During it, the commit or nothing is left. After it,
the commit is in the table, and the next load of the table finds it.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.storage.core.errors import CommitUnknown, ObjectNotFound, StoreRefused, Unavailable
from tidelog.storage.store.object_store import Created, ObjectStore
from tidelog.storage.tables.delta_json import interval_ms

PUT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0)
"""After each attempt whose outcome is unknown. Then the commit's outcome stays unknown."""
LOG_RETENTION = "delta.logRetentionDuration"
FILE_RETENTION = "delta.deletedFileRetentionDuration"
APPEND_ONLY = "delta.appendOnly"
CHECKPOINT_INTERVAL = "delta.checkpointInterval"
_UNDERSTOOD = {
    LOG_RETENTION,
    FILE_RETENTION,
    APPEND_ONLY,
    CHECKPOINT_INTERVAL,
    "delta.enableExpiredLogCleanup",  # these commits clean up nothing
}
"""Properties of Delta that a commit of ours obeys. With any other, deltalake commits."""
_READER_VERSION, _WRITER_VERSION_MAX = 1, 2
"""Of Delta's protocol. Writer version 2 has `delta.appendOnly` and invariants of columns; the
latter are in the schema, and ours has none. Later ones have constraints, a feed of changes, ids of
rows, times of commits: what we do not write."""
NEWEST_S_MAX = 86_400.0
"""Time for which a version that was the newest may be taken as the base of the next commit. The
log of a table is kept for days, so a version after it is still there, and the PUT finds it. Later
the version after it may be gone, behind a checkpoint."""
NEWEST_S_MIN = 1800.0
"""Up to this time, no engine cleans a commit up. Up to NEWEST_S_MAX, another engine may, if an
operator has just shortened the time for which the table keeps its log."""
LOG_RETENTION_MS_MIN = 3_600_000
"""A table that keeps its log for less than this is left to deltalake, which lists the log."""


class TableProperties(NamedTuple):
    """The rules for commits. `is_plain`: the log may make the commits itself, without deltalake."""

    is_plain: bool
    is_append_only: bool
    checkpoint_interval: int
    log_retention_ms: int | None
    file_retention_ms: int | None

    @property
    def newest_s_max(self) -> float:
        """Return NEWEST_S_MAX, or less if the table keeps its log for less than two days."""
        return min(NEWEST_S_MAX, (self.log_retention_ms or 0) / 2000)


def properties_of(
    protocol: tuple[int, int, Any, Any],
    schema_json: str,
    partition_columns: list[str],
    configuration: Mapping[str, str],
    own: tuple[str, Mapping[str, str]],
) -> TableProperties:
    """Read a table's protocol (versions and features of reader and writer) and metadata.

    `own` is the schema and the properties of a new table of the log.
    """
    own_schema, own_properties = own
    reader, writer, reader_features, writer_features = protocol
    interval = configuration.get(CHECKPOINT_INTERVAL, own_properties[CHECKPOINT_INTERVAL])
    log_ms = interval_ms(configuration.get(LOG_RETENTION, own_properties[LOG_RETENTION]))
    file_ms = interval_ms(configuration.get(FILE_RETENTION, "interval 7 days"))
    foreign = {name for name in configuration if name.startswith("delta.")} - _UNDERSTOOD
    is_plain = (
        reader == _READER_VERSION
        and writer <= _WRITER_VERSION_MAX
        and not reader_features
        and not writer_features
        and not foreign
        and json.loads(schema_json) == json.loads(own_schema)
        and partition_columns == ["partition"]
        and interval.isascii()
        and interval.isdigit()
        and int(interval) > 0
        and file_ms is not None
        and (log_ms or 0) >= LOG_RETENTION_MS_MIN
    )
    return TableProperties(
        is_plain,
        configuration.get(APPEND_ONLY) == "true",
        int(interval) if is_plain else 0,
        log_ms,
        file_ms,
    )


def commit_key(prefix: str, version: int) -> str:
    return f"{prefix}/_delta_log/{version:020d}.json"


async def put_commit(store: ObjectStore, key: str, body: bytes) -> bytes | None:
    """PUT a commit; return None if it has its version, else the commit that has it.

    Raises StoreRefused if nothing was stored and nothing will be. Raises CommitUnknown if the
    commit may have its version, or may still get it.
    """
    is_ambiguous = False
    for pause_s in PUT_PAUSES_S:
        try:
            created = await store.create(key, [body])
        except StoreRefused:
            if not is_ambiguous:
                raise
            created = Created.UNKNOWN  # an earlier PUT may still arrive
        if created is Created.DONE:
            return None
        is_ambiguous = True
        try:
            stored_body = await store.get(key)
        except ObjectNotFound:
            if created is Created.EXISTS:  # it may have been ours
                raise CommitUnknown(f"{key} was deleted before it was read back") from None
        except Unavailable:
            pass  # the next PUT shows it
        else:
            return None if stored_body == body else stored_body
        await asyncio.sleep(pause_s)
    raise CommitUnknown(f"the outcome of the commit {key} is unknown: the store does not answer")
