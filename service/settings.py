"""Settings: values with a unit, a default and a reason. The only reader of the environment.

Each field is a flag of `tidelog serve` (`--flush-interval-ms`), a variable (`TIDELOG_FLUSH_INTERVAL_MS`)
and a row of the README's table. Flags win over variables, variables over defaults. Unknown keys,
values out of range and impossible relations stop the start with one line.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import LogError
from storage.s3_options import S3Options

if TYPE_CHECKING:
    # The CLI shows and parses settings: the log, and Arrow below it, are loaded by who runs one.
    from storage.log import LogSettings

PREFIX = "TIDELOG_"
SERVER_VARIABLE = "TIDELOG_URL"
KEY_VARIABLE = "TIDELOG_KEY"
CLIENT_VARIABLES = frozenset({SERVER_VARIABLE, KEY_VARIABLE})
"""Those that are the client's, not a broker's."""
MIB = 1024 * 1024
WAL_RETENTION_FACTOR_MIN = 4
ADMIN_KEY_CHARS_MIN = 22
"""128 random bits in base64."""


class BadSettings(LogError):
    """The settings cannot be used; the message says which and why."""


def _setting(
    default: Any,
    doc: str,
    *,
    low: int | None = None,
    high: int | None = None,
    words: str = "",
    is_secret: bool = False,
) -> Any:
    checks = {"doc": doc, "low": low, "high": high, "words": words.split(), "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=checks, repr=not is_secret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All of a broker's settings. Sizes are bytes, times ms, as the names say."""

    store: str = _setting(
        "file://./tidelog-data",
        "where the log lives: `file:///path`, `s3://bucket/prefix` or `memory://`",
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(
        8082, "port to listen on (Confluent's REST proxy uses the same)", low=0, high=65535
    )
    workers: int = _setting(
        1,
        "processes on this machine, each a broker of its own, that share the port",
        low=1,
        high=256,
    )
    peer_host: str = _setting("", "address to listen on for other brokers; empty: as `host`")
    peer_port: int = _setting(
        0, "port to listen on for other brokers; 0 takes any that is free", low=0, high=65535
    )
    peer_address: str = _setting(
        "", "URL under which other brokers reach this one; empty: host and port of the above"
    )
    broker_id: str = _setting("", "name of this broker in logs and entries; empty draws one")
    cluster_id: str = _setting(
        "", "the cluster that must live in the store; empty takes what is there, or founds one"
    )
    hot_dir: str = _setting(
        "",
        "local folder that makes acks=1 durable; empty: `.hot` in a file store, else `~/.local/state/tidelog/<store>`",
    )
    default_partitions: int = _setting(
        1, "partitions of a topic created without a number", low=1, high=10_000
    )
    auto_create_topics: bool = _setting(False, "whether a produce to an unknown topic creates it")
    flush_interval_ms: int = _setting(
        0,
        "least time between the starts of two flushes; 0 flushes whenever the PUT before has ended, 250 costs about $52 a month on S3 Standard",
        low=0,
        high=60_000,
    )
    flush_bytes: int = _setting(
        8 * MIB, "an open hot segment of this size does not wait for the interval", low=1024
    )
    flush_bytes_max: int = _setting(
        64 * MIB, "one WAL entry carries about this at most", low=1024, high=1024 * MIB
    )
    buffer_bytes: int = _setting(
        256 * MIB, "produced bytes that may wait for their commit; beyond it 429", low=1024
    )
    wal_codec: str = _setting(
        "auto",
        "packs chunks of 16 KiB and more in the WAL: auto is lz4 on S3 and none on a folder",
        words="auto none lz4 zstd",
    )
    request_bytes_max: int = _setting(
        64 * MIB, "largest request body; beyond it 413", low=1024, high=1024 * MIB
    )
    produce_timeout_ms: int = _setting(
        30_000, "a produce whose outcome is still unknown answers 504 after this", low=100
    )
    connections_max: int = _setting(
        10_000, "connections and requests at once; beyond it 503", low=1
    )
    fetch_bytes: int = _setting(1 * MIB, "max_bytes of a fetch that does not say", low=1)
    fetch_bytes_max: int = _setting(64 * MIB, "most that one fetch returns", low=1024)
    fetch_wait_ms_max: int = _setting(30_000, "longest long poll", low=0, high=600_000)
    consumer_instance_timeout_ms: int = _setting(
        300_000,
        "a consumer instance that says nothing for so long is gone, unless it was created with a `session.timeout.ms`",
        low=1,
        high=2**31 - 1,
    )
    fetch_bytes_in_flight: int = _setting(
        256 * MIB, "bytes of fetches being answered at once; beyond it 503", low=1024
    )
    tail_cache_bytes: int = _setting(256 * MIB, "memory for the newest records", low=0)
    chunk_cache_bytes: int = _setting(64 * MIB, "memory for WAL chunks read back", low=0)
    segment_cache_bytes: int = _setting(
        256 * MIB, "memory for row groups of Parquet segments", low=0
    )
    footer_cache_bytes: int = _setting(32 * MIB, "memory for footers of Parquet segments", low=0)
    cold_reads_max: int = _setting(8, "reads of segments under way at once", low=1, high=1024)
    sealing: bool = _setting(True, "whether this broker seals tails into tables")
    seal_check_interval_ms: int = _setting(1000, "how often tails are looked at", low=10)
    tail_runs_max: int = _setting(
        10_000, "a tail of more pieces is sealed whatever its size and age", low=10
    )
    wal_view_age_max_ms: int = _setting(
        600_000, "a view of the WAL that was not refreshed for so long is void", low=1000
    )
    wal_retention_ms: int = _setting(
        3_600_000,
        "how long WAL entries are kept at least; several times the view's age, or a sleeping broker could write into the past",
        low=4000,
    )
    retention_check_interval_ms: int = _setting(
        300_000,
        "how often this broker retains what is due, and at every 12th time collects; 0 leaves it to others",
        low=0,
    )
    compact_spark_bytes: int = _setting(
        16 * 1024 * MIB,
        "`tidelog compact` of more bytes runs on Spark, where that is installed, unless `--engine` says which: one process reads ~100 MB/s, so that this takes it minutes",
        low=0,
    )
    compact_memory_bytes: int = _setting(
        1024 * MIB,
        "memory for the keys that a compaction looks at together; more distinct keys take several passes. One output segment comes on top",
        low=4 * MIB,
    )
    checkpoint_entries: int = _setting(1000, "entries between two checkpoints", low=1)
    checkpoint_interval_ms: int = _setting(10_000, "least time between two checkpoints", low=0)
    poll_interval_ms: int = _setting(
        1000, "how often an idle broker looks for entries of others", low=10, high=60_000
    )
    heartbeat_interval_ms: int = _setting(
        5000, "how often a broker says that it lives: one PUT and one LIST", low=50, high=60_000
    )
    member_timeout_ms: int = _setting(
        15_000, "a broker that has not said so for so long counts as dead", low=100
    )
    handover_timeout_ms: int = _setting(
        1000, "a broker whose sequencer has not answered for so long commits by itself", low=10
    )
    handover_bytes: int = _setting(
        512 * 1024,
        "records of a larger flush are uploaded first, and the sequencer is handed their place",
        low=0,
        high=16 * MIB,
    )
    security: str = _setting(
        "off",
        "`keys`: every request needs a key, and ACLs say what it may do; off: whoever reaches the port may do everything",
        words="off keys",
    )
    admin_key: str = _setting(
        "",
        "secret of `User:admin`, who may do everything, or `@FILE` that has it; as a flag only the file",
        is_secret=True,
    )
    super_users: str = _setting(
        "", "principals that no ACL binds, with `;` between them: `User:alice;User:bob`"
    )
    s3_endpoint: str = _setting("", "URL of an S3 server that is not AWS")
    s3_region: str = _setting("", "region; empty takes the AWS chain's, else us-east-1")
    s3_path_style: str = _setting(
        "auto",
        "bucket in the path instead of the host name; auto: exactly where an endpoint is given",
        words="auto true false",
    )
    log_level: str = _setting("info", "least level of log lines", words="debug info warning error")
    traces: str = _setting(
        "none",
        "`otlp` sends OpenTelemetry traces (needs `tidelog[otel]`): where to and which say the usual OTEL_ variables",
        words="none otlp",
    )
    log_format: str = _setting(
        "human", "log lines for people, or one JSON event a line", words="human json"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if self.wal_retention_ms < WAL_RETENTION_FACTOR_MIN * self.wal_view_age_max_ms:
            raise BadSettings(
                f"wal_retention_ms ({self.wal_retention_ms}) must be at least "
                f"{WAL_RETENTION_FACTOR_MIN} times wal_view_age_max_ms ({self.wal_view_age_max_ms})"
            )
        if self.member_timeout_ms < 2 * self.heartbeat_interval_ms:
            raise BadSettings(
                f"member_timeout_ms ({self.member_timeout_ms}) must be at least twice "
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms})"
            )
        if self.workers > 1 and (self.peer_port or self.peer_address or self.broker_id):
            raise BadSettings(
                "workers are brokers of their own: with more than one of them, peer_port, "
                "peer_address and broker_id cannot be given"
            )
        if self.workers > 1 and self.store.startswith("memory:"):
            raise BadSettings("workers share a store: a log in memory is its process's own")
        if self.workers > 1 and self.port == 0:
            raise BadSettings("workers share one port: give it, not 0")
        if self.flush_bytes > self.flush_bytes_max:
            raise BadSettings(
                f"flush_bytes ({self.flush_bytes}) must not be over flush_bytes_max "
                f"({self.flush_bytes_max})"
            )
        if self.request_bytes_max > self.buffer_bytes:
            raise BadSettings(
                f"request_bytes_max ({self.request_bytes_max}) must not be over buffer_bytes "
                f"({self.buffer_bytes}): such a request could never be taken"
            )

        if self.security == "off" and (self.admin_key or self.super_users):
            raise BadSettings("admin_key and super_users need security=keys: it is off")
        if self.admin_key and len(self.admin_key) < ADMIN_KEY_CHARS_MIN:
            raise BadSettings(
                f"admin_key has {len(self.admin_key)} characters: draw {ADMIN_KEY_CHARS_MIN} or "
                "more at random (openssl rand -base64 32)"
            )
        for name in self.super_user_names:
            if not name.startswith("User:") or name in ("User:", "User:*"):
                raise BadSettings(f"super_users: {name!r} is not User: and a name")

    @property
    def super_user_names(self) -> list[str]:
        return [name.strip() for name in self.super_users.split(";") if name.strip()]

    @property
    def s3(self) -> S3Options:
        return S3Options(
            endpoint_url=self.s3_endpoint or None,
            region=self.s3_region or None,
            path_style=None if self.s3_path_style == "auto" else self.s3_path_style == "true",
        )

    def log_settings(self) -> "LogSettings":
        """The parts that the log itself needs."""
        from storage.log import LogSettings
        from storage.members import MembershipSettings
        from storage.reader import ReaderSettings
        from storage.sealer import SealerSettings
        from storage.sequencer import SequencerSettings
        from storage.wal import WalSettings
        from storage.writer import WriterSettings

        codec = self.wal_codec
        if codec == "auto":
            codec = "lz4" if self.store.startswith("s3://") else "none"
        return LogSettings(
            wal=WalSettings(
                view_age_max_s=self.wal_view_age_max_ms / 1000,
                checkpoint_entries=self.checkpoint_entries,
                checkpoint_interval_s=self.checkpoint_interval_ms / 1000,
            ),
            writer=WriterSettings(
                flush_bytes=self.flush_bytes,
                flush_bytes_max=self.flush_bytes_max,
                flush_interval_ms=self.flush_interval_ms,
                buffer_bytes_max=self.buffer_bytes,
                codec="" if codec == "none" else codec,
                answer_timeout_s=self.produce_timeout_ms / 1000,
            ),
            reader=ReaderSettings(
                chunk_cache_bytes=self.chunk_cache_bytes,
                segment_cache_bytes=self.segment_cache_bytes,
                footer_cache_bytes=self.footer_cache_bytes,
                cold_reads_max=self.cold_reads_max,
            ),
            sealer=SealerSettings(
                check_interval_s=self.seal_check_interval_ms / 1000,
                tail_runs_max=self.tail_runs_max,
            ),
            membership=MembershipSettings(
                heartbeat_interval_s=self.heartbeat_interval_ms / 1000,
                member_timeout_s=self.member_timeout_ms / 1000,
            ),
            sequencer=SequencerSettings(
                handover_timeout_s=self.handover_timeout_ms / 1000,
                handover_bytes_max=self.handover_bytes,
                upload_life_s=self.wal_retention_ms / 2000,
                entry_bytes_max=self.flush_bytes_max,
            ),
            tail_cache_bytes=self.tail_cache_bytes,
            poll_interval_s=self.poll_interval_ms / 1000,
            is_sealing=self.sealing,
        )


def load(flags: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags (text by field name) and the environment. Raises BadSettings."""
    known = {field.name: field for field in dataclasses.fields(Settings)}
    given: dict[str, str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(PREFIX) and name not in CLIENT_VARIABLES:
            key = name.removeprefix(PREFIX).lower()
            if key not in known:
                raise BadSettings(f"unknown variable {name}{_close_to(key, known)}")
            given[key] = text
    for key, text in flags.items():
        if key not in known:
            raise BadSettings(f"unknown setting {key!r}{_close_to(key, known)}")
        if known[key].metadata["is_secret"] and not text.startswith("@"):
            raise BadSettings(
                f"{key}: flags are seen by everybody on the machine: give @FILE, or the variable "
                f"{PREFIX}{key.upper()}"
            )
        given[key] = text
    parsed: dict[str, Any] = {key: _parse(known[key], text) for key, text in given.items()}
    return Settings(**parsed)


def state_home() -> Path:
    """Where a user's programs keep state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def set_worker_python(executable: str) -> None:
    """Spark's workers take any python3 of the PATH, which need not have tidelog, unless told."""
    os.environ.setdefault("PYSPARK_PYTHON", executable)


def is_submitted_to_spark() -> bool:
    """Whether this is the driver that `spark-submit` has started: it has said which master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def console_server() -> str:
    """The broker that the CLI talks to when not told."""
    return os.environ.get(SERVER_VARIABLE) or "http://127.0.0.1:8082"


def use_key_file(path: str) -> None:
    """From now on the CLI's key is in this file."""
    os.environ[KEY_VARIABLE] = f"@{path}"


def client_key() -> str | None:
    """The key that the CLI shows to the broker: the variable's, or in the file that it names as
    `@FILE`. Raises BadSettings."""
    text = os.environ.get(KEY_VARIABLE)
    return _secret("key", text) if text else None


def _close_to(key: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, known, 1)
    return f": is {close[0]} meant?" if close else ": see the settings table"


def _secret(name: str, text: str) -> str:
    """The secret itself, or what the file holds that `@FILE` names."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{name}: cannot read {text[1:]}: {error}") from None


def _parse(field: "dataclasses.Field[Any]", text: str) -> object:
    if field.metadata["is_secret"]:
        return _secret(field.name, text)
    if field.type is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise BadSettings(f"{field.name}: {text!r} is neither true nor false")
        return words[text.lower()]
    if field.type is int:
        try:
            return int(text)
        except ValueError:
            unit = next((f" of {name}" for name in ("ms", "bytes") if name in field.name), "")
            raise BadSettings(f"{field.name}: {text!r} is not a whole number{unit}") from None
    return text


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    low, high, words = (field.metadata[key] for key in ("low", "high", "words"))
    if low is not None and value < low:
        raise BadSettings(f"{field.name}: {value} is below {low}")
    if high is not None and value > high:
        raise BadSettings(f"{field.name}: {value} is above {high}")
    if words and value not in words:
        raise BadSettings(f"{field.name}: {value!r} is none of {', '.join(words)}")
