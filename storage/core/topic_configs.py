"""Topic configs: names, meanings, defaults, validation of values; and the cluster's defaults.

Names and meanings are Kafka's, but `target.segment.bytes` is tidelog's own, as are the defaults.

The effective value of a topic's config is the value that the topic sets. If the topic sets none, it
is the cluster's default; if the cluster has none, it is the built-in default. Whether a value is
valid never depends on the other configs. So a new default of the cluster never makes the configs of
a topic invalid. Pure.
"""

import contextlib
import enum
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import InvalidConfig

_FRACTION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,19})?")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
VALUE_CHARS_MAX = 1000
MS_PER_MINUTE = 60_000
MS_PER_HOUR = 3_600_000
MS_PER_DAY = 86_400_000
PARTITIONS_MAX = 10_000
"""Bound of a topic's partitions (I10); ~200 bytes each, in memory and in each checkpoint."""


FLUSH_MS = "flush.ms"
FLUSH_MS_MAX = 10_000
"""No record waits longer for its commit by its topic's `flush.ms`."""
FLUSH_MS_NONE = 2**63 - 1
_NO_LIMIT = str(FLUSH_MS_NONE)


class ConfigKey(NamedTuple):
    """One config: its default as text, its description, and the parser that validates a value.

    `broker_name` is the name of the cluster's default, if there may be one. `level` is the first
    level of the format at which a topic may have the config. A cluster below that level may have
    older brokers, which do not know the config and would refuse the commit that sets it.
    """

    default: str
    doc: str
    parse: Callable[[str], object]
    broker_name: str = ""
    level: int = format_levels.FIRST


def _integer(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text):  # int() also accepts spaces, underscores, other digits
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
        raise ValueError("must be delete, compact, or both, separated by a comma")
    return policies


CONFIGS: Mapping[str, ConfigKey] = {
    "cleanup.policy": ConfigKey(
        "delete",
        "cleanup of records: delete, compact (newest per key) or both",
        _cleanup_policy,
        "log.cleanup.policy",
    ),
    "compression.type": ConfigKey(
        "producer",
        "codec of Parquet segments; producer means zstd",
        _one_of("producer", "uncompressed", "zstd", "lz4", "snappy", "gzip"),
        "compression.type",
    ),
    "delete.retention.ms": ConfigKey(
        str(MS_PER_DAY),
        "how long compaction keeps a tombstone, in ms",
        _integer(0),
        "log.cleaner.delete.retention.ms",
    ),
    FLUSH_MS: ConfigKey(
        _NO_LIMIT,
        "longest time in ms that a record waits for its commit, if the cluster's budget of commits "
        f"is used up or `Linger` is not given; above {FLUSH_MS_MAX} it is {FLUSH_MS_MAX}; the "
        "default leaves it to the budget",
        _integer(0),
        level=2,
    ),
    "max.message.bytes": ConfigKey(
        "1048588",
        "largest weight of a record: 24 + 8 per header + the bytes of key, value and headers",
        _integer(1, 64 * 1024 * 1024),
        "message.max.bytes",
    ),
    "message.timestamp.after.max.ms": ConfigKey(
        "3600000",
        "how far a record's timestamp may be ahead of the broker's time, in ms; the broker refuses "
        "a request with a later timestamp",
        _integer(0),
        "log.message.timestamp.after.max.ms",
        level=2,
    ),
    "message.timestamp.before.max.ms": ConfigKey(
        str(2**63 - 1),
        "how far a record's timestamp may be behind the broker's time, in ms; the broker refuses a "
        "request with an earlier timestamp",
        _integer(0),
        "log.message.timestamp.before.max.ms",
        level=2,
    ),
    "message.timestamp.type": ConfigKey(
        "CreateTime",
        "clock of record timestamps: the producer's (CreateTime) or the broker's (LogAppendTime)",
        _one_of("CreateTime", "LogAppendTime"),
        "log.message.timestamp.type",
    ),
    "min.cleanable.dirty.ratio": ConfigKey(
        "0.5",
        "compaction is due when this share of sealed bytes is not compacted yet",
        _ratio,
        "log.cleaner.min.cleanable.ratio",
    ),
    "min.compaction.lag.ms": ConfigKey(
        "0",
        "compaction keeps each record that is younger than this, in ms",
        _integer(0),
        "log.cleaner.min.compaction.lag.ms",
    ),
    "retention.bytes": ConfigKey(
        "-1", "bytes kept per partition, -1: no limit", _integer(-1), "log.retention.bytes"
    ),
    "retention.ms": ConfigKey(
        str(7 * MS_PER_DAY),
        "how long records are kept in ms, -1: no limit",
        _integer(-1),
        "log.retention.ms",
    ),
    "segment.bytes": ConfigKey(
        str(64 * 1024 * 1024),
        "size in bytes at which a partition's tail is sealed into the topic's table",
        _integer(1024, 2**30),
        "log.segment.bytes",
    ),
    "segment.ms": ConfigKey(
        str(10 * MS_PER_MINUTE),
        "age in ms at which a partition's tail is sealed; at the built-in default, a tail of less "
        "than 256 KiB waits for up to 6 hours",
        _integer(100),
        "log.roll.ms",
    ),
    "target.segment.bytes": ConfigKey(
        str(512 * 1024 * 1024),
        "bytes up to which segments are merged",
        _integer(1024, 2**32),
        "log.target.segment.bytes",
    ),
}
"""All configs with an effect. Two defaults differ from Kafka's, because sealed records are cheap to
read: `segment.bytes` (1 GiB in Kafka) and `segment.ms` (7 days in Kafka)."""


def _inert(
    default: str, why: str, low: int | None = None, words: tuple[str, ...] = ()
) -> ConfigKey:
    """Return a config that has no effect.

    With `words`, a value must be one of them. With `low`, it must be a whole number from `low` on.
    With neither, any text is valid. `words` does not contain a value that would request a function
    which brokers do not have.
    """
    parse: Callable[[str], object] = str if low is None else _integer(low)
    if words:
        parse = _one_of(*words)
    return ConfigKey(default, f"has no effect here: {why}", parse, level=2)


_BOOLEAN = ("true", "false")
_STORE = "the object store replicates"
_DURABLE = "a record is durable when it is acknowledged"
_FILES = "a segment is one Parquet file, without an index file"
_TIERED = "sealed records are in the object store"
_CLIENTS = "only Kafka's own protocol needs it"
_CODEC = "each codec has a fixed level; compression.type sets the codec"

MIN_INSYNC_REPLICAS = "min.insync.replicas"
WITHOUT_EFFECT: Mapping[str, ConfigKey] = {
    "compression.gzip.level": _inert("-1", _CODEC, low=-1),
    "compression.lz4.level": _inert("9", _CODEC, low=1),
    "compression.zstd.level": _inert("3", _CODEC, low=-(1 << 17)),
    "confluent.key.schema.validation": _inert("false", "there are no schemas", words=("false",)),
    "confluent.value.schema.validation": _inert("false", "there are no schemas", words=("false",)),
    "file.delete.delay.ms": _inert("60000", "the cluster's file_grace_ms decides", low=0),
    "flush.messages": _inert(_NO_LIMIT, _DURABLE, low=1),
    "follower.replication.throttled.replicas": _inert("", _STORE),
    "index.interval.bytes": _inert("4096", _FILES, low=0),
    "leader.replication.throttled.replicas": _inert("", _STORE),
    "local.retention.bytes": _inert("-2", _TIERED, low=-2),
    "local.retention.ms": _inert("-2", _TIERED, low=-2),
    "max.compaction.lag.ms": _inert(
        _NO_LIMIT, "min.cleanable.dirty.ratio decides when a compaction is due", low=1
    ),
    "message.downconversion.enable": _inert("true", _CLIENTS, words=_BOOLEAN),
    "message.format.version": _inert("3.0-IV1", _CLIENTS),
    "message.timestamp.difference.max.ms": _inert(
        _NO_LIMIT, "set message.timestamp.before.max.ms instead", words=(_NO_LIMIT,)
    ),
    MIN_INSYNC_REPLICAS: _inert("1", _STORE, low=1),
    "preallocate": _inert("false", _FILES, words=_BOOLEAN),
    "remote.log.copy.disable": _inert("false", _TIERED, words=_BOOLEAN),
    "remote.log.delete.on.disable": _inert("false", _TIERED, words=_BOOLEAN),
    "remote.storage.enable": _inert("false", _TIERED, words=_BOOLEAN),
    "segment.index.bytes": _inert("10485760", _FILES, low=4),
    "segment.jitter.ms": _inert("0", "tails are sealed by size and age", low=0),
    "unclean.leader.election.enable": _inert("false", _STORE, words=_BOOLEAN),
}
"""Configs that brokers accept, store and show, but that have no effect. Topic definitions that were
written for Kafka contain them."""
KNOWN: Mapping[str, ConfigKey] = {**CONFIGS, **WITHOUT_EFFECT}


BROKER_NAMES: Mapping[str, str] = {
    name: key.broker_name for name, key in CONFIGS.items() if key.broker_name
}
"""The names of the cluster's defaults, by topic config. They are Kafka's names for configs of
brokers, except `log.target.segment.bytes`. A cluster has no default of `flush.ms`: brokers of
earlier versions would refuse it, and Kafka's default of it means something else."""
AUTO_CREATE, NUM_PARTITIONS = "auto.create.topics.enable", "num.partitions"
DEFAULTS: Mapping[str, ConfigKey] = {
    AUTO_CREATE: ConfigKey(
        "false",
        "whether a produce request, or a request of a Kafka client for the metadata of a topic, "
        "creates a topic that does not exist",
        _one_of(*_BOOLEAN),
    ),
    NUM_PARTITIONS: ConfigKey(
        "1", "partitions of a new topic if the request gives no number", _integer(1, PARTITIONS_MAX)
    ),
    **{key.broker_name: key for key in CONFIGS.values() if key.broker_name},
}
"""Everything that can have a default of the cluster. The default of a ConfigKey is the built-in
one. For AUTO_CREATE and NUM_PARTITIONS, settings of the broker have precedence over the built-in
one."""


class ConfigSource(enum.IntEnum):
    """Where a value is set. Names and numbers are Kafka's."""

    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5


class ConfigValue(NamedTuple):
    """A value, its source, and the name of the config in this source."""

    name: str
    value: str
    source: ConfigSource


class TopicConfig(NamedTuple):
    """A topic's effective configs, parsed.

    A field has the name of its config, with underscores. Only `is_log_append_time` has another
    name: it is true if `message.timestamp.type` is LogAppendTime.
    """

    cleanup_policy: frozenset[str]
    compression_type: str
    delete_retention_ms: int
    flush_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    is_log_append_time: bool
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_ms: int
    target_segment_bytes: int

    @property
    def flush_class_ms(self) -> int | None:
        """The longest time for which a record waits for its commit; None: the budget decides."""
        return None if self.flush_ms == FLUSH_MS_NONE else min(self.flush_ms, FLUSH_MS_MAX)


def check(name: str, value: str, level: int = format_levels.NEWEST) -> None:
    """Raise InvalidConfig if a cluster at this level of the format cannot have the value.

    The config may be unknown, or of a later level, or the value not valid. The message names the
    config, the value and the allowed values.
    """
    key = KNOWN.get(name)
    if key is None:
        raise InvalidConfig(f"unknown topic config {name!r}: known are {', '.join(CONFIGS)}")
    if key.level > level:
        raise InvalidConfig(
            f"topic config {name} needs level {key.level} of the format, the cluster has level "
            f"{level}: run tidelog upgrade"
        )
    _check_value(f"topic config {name}", key, value)


def check_default(name: str, value: str) -> None:
    """Raise InvalidConfig if the cluster cannot have this default.

    A value longer than VALUE_CHARS_MAX is not valid.
    """
    key = DEFAULTS.get(name)
    if key is not None:
        _check_length(f"the default {name}", value)
        _check_value(f"the default {name}", key, value)
    elif name in BROKER_NAMES:
        raise InvalidConfig(f"unknown default {name!r}: use the name {BROKER_NAMES[name]}")
    elif name in WITHOUT_EFFECT:
        raise InvalidConfig(f"config {name} cannot have a default: it {WITHOUT_EFFECT[name].doc}")
    else:
        raise InvalidConfig(f"unknown default {name!r}: known are {', '.join(DEFAULTS)}")


def _check_value(title: str, key: ConfigKey, value: str) -> None:
    try:
        key.parse(value)
    except ValueError as error:
        raise InvalidConfig(f"invalid value {value!r} for {title}: {error}") from error


def _check_length(title: str, value: str) -> None:
    if len(value) > VALUE_CHARS_MAX:
        raise InvalidConfig(
            f"the value of {title} has {len(value)} characters, the limit is {VALUE_CHARS_MAX}"
        )


def canonical(name: str, value: str, level: int) -> str:
    """Return the text that the cluster state stores for a new value.

    The text is bounded, because each broker keeps it in memory and each checkpoint contains it.
    Raises InvalidConfig. (`apply` accepts each valid text, of any length, because version 0.1
    stored each valid text as it was.)
    """
    _check_length(f"topic config {name}", value)
    check(name, value, level)
    return _canonical(KNOWN[name], value)


def canonical_changes(changes: Mapping[str, str | None], level: int) -> dict[str, str | None]:
    """Return changes of a topic's configs with the texts of `canonical`.

    None stands for the default. Raises InvalidConfig.
    """
    return {
        name: None if value is None and name in KNOWN else canonical(name, value or "", level)
        for name, value in changes.items()
    }


def canonical_defaults(changes: Mapping[str, str | None], level: int) -> dict[str, str | None]:
    """Return changes of the cluster's defaults, with the texts that the cluster state stores.

    None removes a default. Raises InvalidConfig.
    """
    _check_defaults_level(level)
    texts: dict[str, str | None] = {}
    for name, value in changes.items():
        if value is not None or name not in DEFAULTS:
            check_default(name, value or "")
        texts[name] = None if value is None else _canonical(DEFAULTS[name], value)
    return texts


def in_words(changes: Mapping[str, str | None]) -> str:
    """Return changes as a log line has them: `a=1, b removed`."""
    return ", ".join(
        f"{name} removed" if value is None else f"{name}={value}" for name, value in changes.items()
    )


def without_effect(changes: Mapping[str, str | None]) -> list[str]:
    """Return a line for each new value that has no effect.

    For example: `min.insync.replicas has no effect here: the object store replicates`. A value that
    only names the default needs no line.
    """
    return [
        f"{name} {WITHOUT_EFFECT[name].doc}"
        for name, value in changes.items()
        if name in WITHOUT_EFFECT and value not in (None, WITHOUT_EFFECT[name].default)
    ]


def shown(configs: Mapping[str, str]) -> list[str]:
    """Return the names of the configs in the list of a topic that sets `configs`.

    These are all configs with an effect, and those without an effect that the topic sets.
    """
    return [*CONFIGS, *sorted(configs.keys() & WITHOUT_EFFECT.keys())]


def check_defaults(values: Mapping[str, str], level: int) -> InvalidConfig | None:
    """Return why a cluster at this level of the format cannot have these defaults, or None."""
    try:
        _check_defaults_level(level)
        for name, value in values.items():
            check_default(name, value)
    except InvalidConfig as error:
        return error
    return None


def _check_defaults_level(level: int) -> None:
    if level < format_levels.TOPIC_DEFAULTS:
        raise InvalidConfig(
            f"defaults of topics need level {format_levels.TOPIC_DEFAULTS} of the format, "
            f"the cluster has level {level}: run tidelog upgrade"
        )


def _canonical(key: ConfigKey, value: str) -> str:
    parsed = key.parse(value)
    if isinstance(parsed, frozenset):  # cleanup.policy, in the order of the request
        return ",".join(dict.fromkeys(part.strip() for part in value.split(",")))
    return str(parsed) if isinstance(parsed, int) else value


def check_all(configs: Mapping[str, str], level: int) -> InvalidConfig | None:
    """Return the first error of `check`. If all values are valid, return None."""
    try:
        for name, value in configs.items():
            check(name, value, level)
    except InvalidConfig as error:
        return error
    return None


class TopicDefaults:
    """The defaults that a cluster sets: an immutable value.

    The cluster state has one, and gives it to each topic. `values` are texts by the names in
    DEFAULTS.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)

    @cached_property
    def configs(self) -> dict[str, str]:
        """The defaults of topic configs, by the topic config's name."""
        names = BROKER_NAMES.items()
        return {name: self.values[key] for name, key in names if key in self.values}

    @cached_property
    def of_plain_topics(self) -> "TopicConfig":
        """The effective configs of a topic that sets no config. Most topics set none."""
        return _parsed({}, self.configs)

    def changed(self, changes: Mapping[str, str | None]) -> "TopicDefaults":
        """Return the defaults after these changes. None removes a default."""
        entries = (self.values | dict(changes)).items()
        return TopicDefaults({name: text for name, text in entries if text is not None})

    def partitions(self, fallback: int) -> int:
        """Return the number of partitions of a new topic whose request gives no number.

        `fallback` is the broker's setting.
        """
        return int(self.values.get(NUM_PARTITIONS, fallback))

    def is_auto_create(self, fallback: bool) -> bool:
        """Return whether requests for an unknown topic create it.

        `fallback` is the broker's setting.
        """
        return self.values.get(AUTO_CREATE, str(fallback).lower()) == "true"

    def values_of_topic(self, name: str, configs: Mapping[str, str]) -> list[ConfigValue]:
        """Return the values of a known config of a topic that sets `configs`.

        The effective value is the first, the built-in default the last.
        """
        key = BROKER_NAMES.get(name, name)
        values = [ConfigValue(key, KNOWN[name].default, ConfigSource.DEFAULT_CONFIG)]
        if name in self.configs:
            text = self.configs[name]
            values.insert(0, ConfigValue(key, text, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG))
        if name in configs:
            values.insert(0, ConfigValue(name, configs[name], ConfigSource.DYNAMIC_TOPIC_CONFIG))
        return values

    def values_of_default(self, name: str, settings: Mapping[str, str]) -> list[ConfigValue]:
        """Return the values of a known default: the effective value first, the built-in one last.

        `settings` has the values that the broker's settings give.
        """
        values = [ConfigValue(name, DEFAULTS[name].default, ConfigSource.DEFAULT_CONFIG)]
        if name in settings:
            values.insert(0, ConfigValue(name, settings[name], ConfigSource.STATIC_BROKER_CONFIG))
        if name in self.values:
            text = self.values[name]
            values.insert(0, ConfigValue(name, text, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG))
        return values


NO_DEFAULTS = TopicDefaults({})


def effective(configs: Mapping[str, str], defaults: TopicDefaults = NO_DEFAULTS) -> TopicConfig:
    """Parse the effective configs of a topic that sets `configs`.

    An invalid value does not count, because `apply` must not fail on a value that an older or newer
    writer accepted.
    """
    return _parsed(configs, defaults.configs) if configs else defaults.of_plain_topics


def _parsed(*configs: Mapping[str, str]) -> TopicConfig:
    """Parse the texts. The first of `configs` that has a valid value of a config has precedence."""

    def get(name: str) -> object:
        key = CONFIGS[name]
        for texts in configs:
            if name in texts:
                with contextlib.suppress(ValueError):
                    return key.parse(texts[name])
        return key.parse(key.default)

    values = {name.replace(".", "_"): get(name) for name in CONFIGS}
    is_log_append_time = values.pop("message_timestamp_type") == "LogAppendTime"
    return TopicConfig(is_log_append_time=is_log_append_time, **values)  # type: ignore[arg-type]
