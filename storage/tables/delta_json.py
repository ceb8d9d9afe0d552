"""The JSON of a table's Delta log: commits, made and parsed. Pure."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np

from tidelog.storage.core import object_keys
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.tables.manifest import TableChange, TableCommit

T = TypeVar("T")

_UNITS_MS = {
    "week": 604_800_000,
    "day": 86_400_000,
    "hour": 3_600_000,
    "minute": 60_000,
    "second": 1000,
    "millisecond": 1,
}
_INTERVAL = re.compile(rf"(?:interval )?(\d{{1,12}}) ({'|'.join(_UNITS_MS)})s?")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_=./-]+")
ENGINE = "tidelog"
"""The engine that commits of this module name."""
_INT64_MAX = 2**63 - 1
_ISO_MS = range(-62_135_596_800_000, 253_402_300_800_000)  # years 1 to 9999


def statistics(file: SegmentFile) -> str:
    """Return a file's statistics in the Delta protocol's form. Engines use them to skip files.

    The statistics are bounds. The largest offset may be less than `end_offset - 1` after key
    compaction. A SegmentFile does not have the microseconds of timestamps, so the largest timestamp
    is the end of its millisecond. `tightBounds` is true if the offsets are exact.
    """
    low: dict[str, int | str] = {"offset": file.base_offset}
    high: dict[str, int | str] = {"offset": file.end_offset - 1}
    if file.timestamp_min in _ISO_MS and file.timestamp_max in _ISO_MS:
        low["timestamp"] = f"{np.datetime64(file.timestamp_min, 'ms')}Z"
        high["timestamp"] = f"{np.datetime64(file.timestamp_max, 'ms')}999Z"
    facts = {
        "numRecords": file.rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": {"offset": 0, "timestamp": 0},
        "tightBounds": file.rows == file.end_offset - file.base_offset,
    }
    return msgspec.json.encode(facts).decode()


def commit_body(change: TableChange, now_ms: int, commit_id: str) -> bytes:
    """Return a commit in JSON lines, as deltalake would write it.

    `commit_id` makes the bytes of each commit unique: a reader of them sees whose they are.
    """
    lines: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": "WRITE",
                "operationParameters": {"mode": "Append", "partitionBy": '["partition"]'},
                "isBlindAppend": not change.removed,
                "engineInfo": ENGINE,
                "txnId": commit_id,
            }
        }
    ]
    lines += [
        {
            "add": {
                "path": file.path,
                "partitionValues": {"partition": str(file.partition)},
                "size": file.size,
                "modificationTime": now_ms,
                "dataChange": change.data_change,
                "stats": statistics(file),
            }
        }
        for file in change.added
    ]
    lines += [
        {
            "remove": {
                "path": file.path,
                "dataChange": change.data_change,
                "deletionTimestamp": now_ms,
                "extendedFileMetadata": True,
                "partitionValues": {"partition": str(file.partition)},
                "size": file.size,
            }
        }
        for file in change.removed
    ]
    lines += [
        {"txn": {"appId": app_id, "version": version}}
        for app_id, version in change.all_transactions.items()
    ]
    return b"\n".join(map(msgspec.json.encode, lines))


def is_plain_path(path: str) -> bool:
    """Return whether a path has only characters that are the same in a commit's JSON."""
    return _PLAIN_PATH.fullmatch(path) is not None


def interval_ms(text: str) -> int | None:
    """Parse a duration of Delta's properties, such as `interval 7 days`, to ms.

    If the text has another form, return None.
    """
    match = _INTERVAL.fullmatch(text.strip().lower())
    return None if match is None else int(match[1]) * _UNITS_MS[match[2]]


def transactions_of(commit: bytes) -> dict[str, int]:
    """Parse the application transactions of a commit (JSON lines). Raises msgspec.DecodeError."""
    lines = _lines_of(commit, b'"txn"')
    return {txn.app_id: txn.version for txn in (_read(_txn_line, line).txn for line in lines)}


def removed_of(commit: bytes) -> set[str]:
    """Parse the paths that a commit (JSON lines) removed. Raises msgspec.DecodeError."""
    lines = _lines_of(commit, b'"remove"')
    return {unquote(_read(_remove_line, line).remove.path) for line in lines}


def added_of(commit: bytes) -> set[str]:
    """Parse the paths that a commit (JSON lines) added. Raises msgspec.DecodeError."""
    lines = _lines_of(commit, b'"add"')
    return {unquote(_read(_add_line, line).add.path) for line in lines}


def commit_of(body: bytes, version: int) -> TableCommit:
    """Parse a commit (JSON lines). Raises msgspec.DecodeError."""
    added: list[SegmentFile] = []
    added_ms: list[int] = []
    removed: dict[str, int] = {}
    transactions: dict[str, int] = {}
    author, data_change, is_plain, at_ms = "", False, True, 0
    for raw in body.splitlines():
        line = _read(_any_line, raw)
        is_plain = is_plain and _is_plain(line)
        if line.add is not None:
            added.append(_file_of(line.add))
            added_ms.append(line.add.modification_time)
            data_change |= line.add.data_change
        if line.remove is not None:
            path = unquote(line.remove.path)
            data_change |= line.remove.data_change
            removed[path] = _partition_of(path, line.remove.partition_values)
        if line.txn is not None:
            transactions[line.txn.app_id] = line.txn.version
        if line.commit_info is not None:
            commit_info = line.commit_info
            operation = commit_info.get("operation", "a commit")
            author = f"{operation} by {commit_info.get('engineInfo', 'unknown')}"
            at_ms = _whole(commit_info.get("timestamp"))
    return TableCommit(
        version, added, removed, transactions, author, data_change, added_ms, is_plain, at_ms
    )


def _whole(number: Any) -> int:
    return number if type(number) is int and abs(number) <= _INT64_MAX else 0


def _is_plain(line: "_AnyLine") -> bool:
    """Return whether a line is a file, a transaction or the commit's info, and no more."""
    file = line.add or line.remove
    if file is not None:
        return is_plain_path(file.path) and file.deletion_vector is None
    return line.txn is not None or line.commit_info is not None


def _file_of(add: "_Add") -> SegmentFile:
    path = unquote(add.path)
    partition = _partition_of(path, add.partition_values)
    name = object_keys.parse_segment(path)
    if name is None or name.partition != partition:
        return SegmentFile(path, partition, -1, -1, add.size, 0, 0, 0)
    facts = _read(_stats, (add.stats or "{}").encode())
    low, high = facts.min_values.get("timestamp"), facts.max_values.get("timestamp")
    return SegmentFile(
        path,
        partition,
        name.base_offset,
        name.end_offset,
        add.size,
        facts.num_records,
        _ms(low, -(2**63) // 1000),
        _ms(high, (2**63 - 1) // 1000),
    )


def _partition_of(path: str, values: dict[str, str | None] | None) -> int:
    """Return the partition under which a commit lists the file. If there is none, return -1."""
    text = (values or {}).get("partition")
    if text is None and values is None and path.startswith("partition="):
        text = path.removeprefix("partition=").partition("/")[0]
    return int(text) if text is not None and text.isascii() and text.isdigit() else -1


def _ms(text: Any, missing: int) -> int:
    """Parse a timestamp of `statistics`.

    If there is none, or its form differs, return `missing`.
    """
    try:
        return int(np.datetime64(str(text).removesuffix("Z"), "ms").astype(np.int64))
    except ValueError:
        return missing


def _lines_of(commit: bytes, kind: bytes) -> Iterator[bytes]:
    return (line for line in commit.splitlines() if line[:12].lstrip(b"{ ").startswith(kind))


def _read(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: int


class _TransactionLine(msgspec.Struct):
    txn: _Transaction


class _File(msgspec.Struct):
    path: str


class _RemoveLine(msgspec.Struct):
    remove: _File


class _AddLine(msgspec.Struct):
    add: _File


class _Add(msgspec.Struct, rename="camel"):
    path: str
    size: int = 0
    partition_values: dict[str, str | None] | None = None
    modification_time: int = 0
    data_change: bool = True
    stats: str | None = None
    deletion_vector: dict[str, Any] | None = None


class _Remove(msgspec.Struct, rename="camel"):
    path: str
    data_change: bool = True
    partition_values: dict[str, str | None] | None = None
    deletion_vector: dict[str, Any] | None = None


class _Statistics(msgspec.Struct, rename="camel"):
    num_records: int = 0
    min_values: dict[str, Any] = {}
    max_values: dict[str, Any] = {}


class _AnyLine(msgspec.Struct, rename="camel"):
    add: _Add | None = None
    remove: _Remove | None = None
    txn: _Transaction | None = None
    commit_info: dict[str, Any] | None = None


_any_line = msgspec.json.Decoder(_AnyLine)
_stats = msgspec.json.Decoder(_Statistics)
_add_line = msgspec.json.Decoder(_AddLine)
_remove_line = msgspec.json.Decoder(_RemoveLine)
_txn_line = msgspec.json.Decoder(_TransactionLine)
