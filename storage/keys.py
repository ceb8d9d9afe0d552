"""Every object key of a cluster is built and parsed here (DESIGN 10, FORMAT.md section 2)."""

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

_SEGMENT = re.compile(r"partition=(\d+)/(\d{20})-(\d{20})-([0-9a-f]+)\.parquet")
_DATA = re.compile(r"data/([0-9a-z]{2})/\1[0-9a-z]*-(\d{1,16})")
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class SegmentName(NamedTuple):
    """What a segment's path says."""

    partition: int
    base_offset: int
    end_offset: int
    unique: str


def is_topic_name(name: str) -> bool:
    """Kafka's rule: 1 to 249 of `[a-zA-Z0-9._-]`, and neither `.` nor `..`."""
    return _NAME.fullmatch(name) is not None and name not in {".", ".."}


def wal(seq: int) -> str:
    return f"{WAL}{seq:020d}"


def checkpoint(seq: int) -> str:
    return f"{CHECKPOINTS}{seq:020d}"


def seq_of(key: str) -> int | None:
    """The number of a WAL entry or checkpoint; None for anything else below those prefixes."""
    tail = key.rpartition("/")[2]
    return int(tail) if len(tail) == 20 and tail.isascii() and tail.isdigit() else None


def data(unique: str, not_after_ms: int) -> str:
    """A large flush; fanned out over 256 prefixes because S3 scales request rates by prefix.

    No entry names it for the first time once the time of the cluster is past `not_after_ms`.
    """
    return f"{DATA}{unique[:2]}/{unique}-{not_after_ms}"


def data_not_after_ms(key: str) -> int | None:
    """Until when entries may begin to name it; None when it is no key of `data`."""
    match = _DATA.fullmatch(key)
    return None if match is None else int(match[2])


def topic(name: str, topic_id: str) -> str:
    """The root of a topic's table, without a slash at the end."""
    return f"{TOPICS}{name}-{topic_id}"


def segment(partition: int, base_offset: int, end_offset: int, unique: str) -> str:
    """A segment's path below its topic's prefix."""
    return f"partition={partition}/{base_offset:020d}-{end_offset:020d}-{unique}.parquet"


def parse_segment(path: str) -> SegmentName | None:
    match = _SEGMENT.fullmatch(path)
    if match is None:
        return None
    return SegmentName(int(match[1]), int(match[2]), int(match[3]), match[4])


def broker(broker_id: str) -> str:
    return f"{BROKERS}{broker_id}.json"
