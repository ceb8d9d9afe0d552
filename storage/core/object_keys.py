"""The keys of a cluster's objects in the store, built and parsed (FORMAT.md section 2).

Other modules build and parse only keys inside a topic's table.
"""

import re
from typing import NamedTuple

CLUSTER = "cluster.json"
WAL = "wal/"
CHECKPOINTS = "checkpoints/"
DATA = "data/"
TOPICS = "topics/"
SECRET = "secret.json"
BROKERS = "brokers/"
PROBE = "probe/"
MAINTENANCE = "maintenance/"
ICEBERG = "iceberg/"
"""Below a topic's prefix."""

_FOLDERS = re.compile(r"(?:^|/)(wal|checkpoints|data|brokers|probe|maintenance)(?:/|$)")
_SEGMENT = re.compile(r"partition=(\d+)/(\d{20})-(\d{20})-([0-9a-f]+)\.parquet")
_LOG_FILE = re.compile(r"/_delta_log/(\d{20})\.(json|checkpoint\.parquet)$")
_DATA = re.compile(r"data/([0-9a-z]{2})/\1[0-9a-z]*-(\d{1,16})")


class SegmentName(NamedTuple):
    """The parts of a segment's path."""

    partition: int
    base_offset: int
    end_offset: int
    unique: str


def wal(seq: int) -> str:
    return f"{WAL}{seq:020d}"


def checkpoint(seq: int) -> str:
    return f"{CHECKPOINTS}{seq:020d}"


def seq_of(key: str) -> int | None:
    """Return the number in the key of a WAL entry or checkpoint. For any other key, return None."""
    tail = key.rpartition("/")[2]
    return int(tail) if len(tail) == 20 and tail.isascii() and tail.isdigit() else None


def data(unique: str, not_after_ms: int) -> str:
    """Return the key of the object for a large draft's chunks.

    The key has one of 256 prefixes, because S3 limits the requests to each prefix. Once the elapsed
    time is past `not_after_ms`, no entry may name the object for the first time.
    """
    return f"{DATA}{unique[:2]}/{unique}-{not_after_ms}"


def data_not_after_ms(key: str) -> int | None:
    """Return `not_after_ms` of a key that `data` built. For any other key, return None."""
    match = _DATA.fullmatch(key)
    return None if match is None else int(match[2])


def is_tail_object(key: str) -> bool:
    """Return whether the key is that of a WAL entry or of an upload."""
    return key == wal(seq_of(key) or 0) or data_not_after_ms(key) is not None


def topic(name: str, topic_id: str) -> str:
    """Return the root of a topic's table, without a slash at the end."""
    return f"{TOPICS}{name}-{topic_id}"


def segment(partition: int, base_offset: int, end_offset: int, unique: str) -> str:
    """Return a segment's path below its topic's prefix."""
    return f"partition={partition}/{base_offset:020d}-{end_offset:020d}-{unique}.parquet"


def parse_segment(path: str) -> SegmentName | None:
    match = _SEGMENT.fullmatch(path)
    if match is None:
        return None
    return SegmentName(int(match[1]), int(match[2]), int(match[3]), match[4])


def log_version(key: str, kind: str = "") -> int | None:
    """Return the version of a file of a table's log.

    If the object is not such a file, or if its kind is not the given `kind` (`json` for a commit,
    or `checkpoint.parquet`), return None.
    """
    match = _LOG_FILE.search(key)
    return int(match[1]) if match is not None and kind in ("", match[2]) else None


def kind(key: str) -> str:
    """Return the kind of an object, by its key or by a prefix of keys, for the count of requests.

    The key may begin with the prefix of the cluster's store.
    """
    if "_delta_log" in key:
        return "table log"
    if f"/{ICEBERG}" in key:
        return "iceberg"
    if key.endswith(".parquet") or "/partition=" in key:
        return "segment"
    match = _FOLDERS.search(key)
    if match is not None:
        return match[1]
    return "cluster" if key.endswith((CLUSTER, SECRET)) else "other"


def broker(broker_id: str) -> str:
    return f"{BROKERS}{broker_id}.json"


def maintenance(kind: str) -> str:
    """Return the key of the result of the last maintenance of this kind."""
    return f"{MAINTENANCE}{kind}.json"
