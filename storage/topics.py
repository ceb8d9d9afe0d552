"""Topic configs: Kafka's names and meanings, our defaults, and the check of a value. Pure."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from storage import keys
from storage.errors import InvalidConfig, InvalidRequest

_FRACTION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,19})?")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
MS_PER_MINUTE = 60_000
MS_PER_DAY = 86_400_000


class ConfigKey(NamedTuple):
    """One config: its default as text, what it means, and how a value is checked."""

    default: str
    doc: str
    parse: Callable[[str], object]


def _integer(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text):  # int() takes spaces, underscores and other digits, too
            raise ValueError("must be a whole number")
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}")
        return value

    return parse


def _ratio(text: str) -> float:
    if not _FRACTION.fullmatch(text) or float(text) > 1:
        raise ValueError("must be 0 to 1")
    return float(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return parse


def _cleanup_policy(text: str) -> frozenset[str]:
    policies = frozenset(part.strip() for part in text.split(","))
    if not policies <= {"delete", "compact"}:
        raise ValueError("must be delete, compact, or both with a comma")
    return policies


CONFIGS: Mapping[str, ConfigKey] = {
    "cleanup.policy": ConfigKey(
        "delete", "what retention does: delete, compact or both", _cleanup_policy
    ),
    "compression.type": ConfigKey(
        "producer",
        "codec of Parquet segments; producer means zstd",
        _one_of("producer", "uncompressed", "zstd", "lz4", "snappy", "gzip"),
    ),
    "delete.retention.ms": ConfigKey(
        str(MS_PER_DAY), "how long a tombstone outlives compaction", _integer(0)
    ),
    "max.message.bytes": ConfigKey(
        "1048588", "largest key plus value of one record", _integer(1, 64 * 1024 * 1024)
    ),
    "message.timestamp.type": ConfigKey(
        "CreateTime", "whose clock stamps records", _one_of("CreateTime", "LogAppendTime")
    ),
    "min.cleanable.dirty.ratio": ConfigKey(
        "0.5", "part of the sealed bytes that is new when compaction is due", _ratio
    ),
    "min.compaction.lag.ms": ConfigKey(
        "0", "how long a record is safe from compaction", _integer(0)
    ),
    "retention.bytes": ConfigKey("-1", "bytes kept per partition, -1 for all", _integer(-1)),
    "retention.ms": ConfigKey(
        str(7 * MS_PER_DAY), "how long records are kept, -1 for ever", _integer(-1)
    ),
    "segment.bytes": ConfigKey(
        str(64 * 1024 * 1024),
        "bytes of a partition's tail that are sealed into its table",
        _integer(1024, 2**30),
    ),
    "segment.ms": ConfigKey(
        str(10 * MS_PER_MINUTE), "age of a partition's tail at which it is sealed", _integer(100)
    ),
    "target.segment.bytes": ConfigKey(
        str(512 * 1024 * 1024), "what small segments are merged up to", _integer(1024, 2**32)
    ),
}
"""Every config a topic takes. Defaults that differ from Kafka's: `segment.bytes` (1 GiB there) and
`segment.ms` (7 days there), because sealing is what makes records cheap to read."""


class TopicConfig(NamedTuple):
    """A topic's effective configs, parsed."""

    cleanup_policy: frozenset[str]
    compression_type: str
    delete_retention_ms: int
    max_message_bytes: int
    log_append_time: bool
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_ms: int
    target_segment_bytes: int


def check(name: str, value: str) -> None:
    """Raises InvalidConfig, naming the config, the value and what would be right."""
    known = CONFIGS.get(name)
    if known is None:
        raise InvalidConfig(f"unknown topic config {name!r}: known are {', '.join(CONFIGS)}")
    try:
        known.parse(value)
    except ValueError as error:
        raise InvalidConfig(f"invalid value {value!r} for topic config {name}: {error}") from error


def check_all(configs: Mapping[str, str]) -> InvalidConfig | None:
    """The first refusal of `check`."""
    try:
        for name, value in configs.items():
            check(name, value)
    except InvalidConfig as error:
        return error
    return None


def check_name(name: str) -> InvalidRequest | None:
    """Why a topic cannot be called so."""
    if keys.is_topic_name(name):
        return None
    return InvalidRequest(
        f"topic name {name!r} is illegal: 1 to 249 of a-z A-Z 0-9 . _ - and not . or .."
    )


def effective(configs: Mapping[str, str]) -> TopicConfig:
    """The configs with defaults filled in. A value that no longer parses counts as its default:
    `apply` must never fail on what an older or newer writer let pass."""

    def get(name: str) -> object:
        key = CONFIGS[name]
        try:
            return key.parse(configs.get(name, key.default))
        except ValueError:
            return key.parse(key.default)

    return TopicConfig(
        cleanup_policy=get("cleanup.policy"),  # type: ignore[arg-type]
        compression_type=get("compression.type"),  # type: ignore[arg-type]
        delete_retention_ms=get("delete.retention.ms"),  # type: ignore[arg-type]
        max_message_bytes=get("max.message.bytes"),  # type: ignore[arg-type]
        log_append_time=get("message.timestamp.type") == "LogAppendTime",
        min_cleanable_dirty_ratio=get("min.cleanable.dirty.ratio"),  # type: ignore[arg-type]
        min_compaction_lag_ms=get("min.compaction.lag.ms"),  # type: ignore[arg-type]
        retention_bytes=get("retention.bytes"),  # type: ignore[arg-type]
        retention_ms=get("retention.ms"),  # type: ignore[arg-type]
        segment_bytes=get("segment.bytes"),  # type: ignore[arg-type]
        segment_ms=get("segment.ms"),  # type: ignore[arg-type]
        target_segment_bytes=get("target.segment.bytes"),  # type: ignore[arg-type]
    )
