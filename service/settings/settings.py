"""Settings of a broker and of the command line. No other module reads the environment.

Each field of `Settings` is a flag of `tidelog serve` (`--flush-interval-ms`), a variable
(`TIDELOG_FLUSH_INTERVAL_MS`) and a row of SETTINGS.md. A flag overrides a variable, a variable
overrides the default. Names, values or combinations that are not valid raise BadSettings.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tidelog.service.secret_files import secret_of
from tidelog.service.settings import kafka, trust
from tidelog.service.settings.fields import BOOLEANS, BadSettings, check, setting, whole_number
from tidelog.storage.core.bounds import LEAST, MOST, RETENTION_FACTOR_MIN, Bounds
from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.core.topic_configs import of_settings
from tidelog.storage.store.open import check_endpoint, check_url
from tidelog.storage.store.s3_options import S3Options

if TYPE_CHECKING:  # a command that only parses settings must not load the log and Arrow
    from tidelog.storage.log import LogSettings

PREFIX = "TIDELOG_"
SERVER_VARIABLE = "TIDELOG_URL"
KEY_VARIABLE = "TIDELOG_KEY"
CA_VARIABLE = "TIDELOG_CA_FILE"
CLIENT_VARIABLES = frozenset({SERVER_VARIABLE, KEY_VARIABLE, CA_VARIABLE})
"""Variables of the client commands; a broker ignores them."""
MIB = 1024 * 1024
READ_CACHE_PARTS = 11
ADMIN_KEY_CHARS_MIN = 22
"""The length of 128 random bits in base64."""

RENAMED = {
    "buffer_bytes": "buffer_bytes_max",
    "sealing": "seal_enabled",
    "heartbeat_interval_ms": "broker_heartbeat_interval_ms",
    "member_timeout_ms": "broker_timeout_ms",
    "handover_timeout_ms": "sequencer_timeout_ms",
    "handover_bytes": "sequencer_upload_bytes",
    "chunk_cache_bytes": "read_cache_bytes",
    "segment_cache_bytes": "read_cache_bytes",
    "footer_cache_bytes": "read_cache_bytes",
}
"""The new name of a setting, by its old name. An old name still works, with a warning."""
_CACHES = {
    "chunk_cache_bytes": 64 * MIB,
    "segment_cache_bytes": 256 * MIB,
    "footer_cache_bytes": 32 * MIB,
}
"""Old settings with their defaults. `read_cache_bytes` is the sum of the three."""
REMOVED = frozenset(
    {
        "wal_codec",
        "seal_check_interval_ms",
        "tail_runs_max",
        "checkpoint_entries",
        "checkpoint_interval_ms",
        "flush_bytes_max",
        "connections_max",
        "cold_reads_max",
        "fetch_wait_ms_max",
    }
)
"""Settings of earlier versions that are constants now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a broker. Names of sizes and times contain the unit: bytes or ms."""

    store: str = setting(
        "./tidelog-data",
        "location of the log: a folder (`./path` or `file:///path`), `s3://bucket/prefix` or `memory://`",
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(
        8082,
        "port to listen on; the default is the port of Confluent's REST proxy",
        low=0,
        high=65535,
    )
    workers: int = setting(
        1, "broker processes on this machine that share the port", low=1, high=256
    )
    peer_host: str = setting(
        "", "address to listen on for other brokers; if empty, the value of `host`"
    )
    peer_port: int = setting(
        0, "port to listen on for other brokers; 0 for any free port", low=0, high=65535
    )
    peer_address: str = setting(
        "",
        "URL at which other brokers reach this broker; if empty, the broker builds it from `peer_host` and `peer_port`",
    )
    kafka_port: int = kafka.KAFKA_PORT
    kafka_host: str = kafka.KAFKA_HOST
    kafka_advertised: str = kafka.KAFKA_ADVERTISED
    kafka_node_id: int = kafka.KAFKA_NODE_ID
    kafka_group_delay_ms: int = kafka.KAFKA_GROUP_DELAY_MS
    zone: str = kafka.ZONE
    broker_id: str = setting(
        "", "name of this broker in log lines and WAL entries; if empty, a random name"
    )
    cluster_id: str = setting(
        "",
        "id that the cluster in the store must have; if empty, any id. If the store has no cluster, the broker creates one with this id, or with a random id",
    )
    hot_dir: str = setting(
        "",
        "local folder of the hot log, which makes acks=1 durable. If it is empty, a store in a folder has the hot log in its folder `.hot`, and a store in S3 has it in `~/.local/state/tidelog/<hash of the store's URL>`; `memory://` has none",
    )
    default_partitions: int = kafka.DEFAULT_PARTITIONS
    auto_create_topics: bool = kafka.AUTO_CREATE_TOPICS
    flush_interval_ms: int = setting(
        0,
        "minimum time between the starts of two flushes. With 0, a flush starts when the PUT of the previous flush ends. With 250, the PUTs of a broker under load cost about $52 a month on S3 Standard",
        low=0,
        high=60_000,
    )
    flush_bytes: int = setting(
        8 * MIB,
        "size at which a broker flushes an open hot segment before `flush_interval_ms` ends",
        low=1024,
        high=64 * MIB,
    )
    buffer_bytes_max: int = setting(
        256 * MIB,
        "maximum bytes of records that wait for their commit; above this number the broker answers 429",
        low=1024,
    )
    request_bytes_max: int = setting(
        64 * MIB,
        "maximum size of a request body; the broker answers a larger one with 413",
        low=1024,
        high=1024 * MIB,
    )
    produce_timeout_ms: int = setting(
        30_000,
        "time after which the broker answers a produce request that has no outcome: with 503 if the request still waits for its flush (nothing is written), else with 504",
        low=100,
    )
    drain_ms: int = setting(
        5000,
        "time for which a broker serves all requests after SIGTERM or SIGINT, before it closes its "
        "port. In this time `/ready` answers 503 and each answer ends its connection, so that "
        "balancers and clients go to other brokers. Without connections, the time ends early; a "
        "second signal ends it",
        low=0,
        high=600_000,
    )
    fetch_bytes: int = setting(1 * MIB, "`max_bytes` of a fetch that sets no `max_bytes`", low=1)
    fetch_bytes_max: int = setting(
        64 * MIB,
        "maximum bytes of the records that one fetch returns, and of its answer if the records have more than 1 MiB",
        low=1024,
    )
    consumer_instance_timeout_ms: int = setting(
        300_000,
        "session timeout of a consumer instance that is created without a `session.timeout.ms`",
        low=1,
        high=2**31 - 1,
    )
    fetch_bytes_in_flight: int = setting(
        256 * MIB,
        "maximum bytes of all fetch responses in flight together; above this number the broker answers a fetch with 503",
        low=1024,
    )
    tail_cache_bytes: int = setting(
        256 * MIB, "memory for the newest records, which are in the tail", low=0
    )
    read_cache_bytes: int = setting(
        352 * MIB,
        "memory for data that was read from the store: row groups of Parquet segments (8/11), WAL chunks (2/11), footers (1/11)",
        low=0,
    )
    seal_enabled: bool = setting(True, "whether this broker seals tails into tables")
    wal_view_age_max_ms: int = setting(
        600_000,
        "for a cluster that this broker creates: time after which a view of the WAL expires if it is not refreshed; at least 60000",
        low=1,
    )
    wal_retention_ms: int = setting(
        3_600_000,
        "for a cluster that this broker creates: minimum time that WAL entries are kept; at least 3600000 and at least 4 times `wal_view_age_max_ms`, because with a shorter time a suspended broker could commit from an expired view",
        low=4,
    )
    file_grace_ms: int = setting(
        86_400_000,
        "for a cluster that this broker creates: time between the commit that removes a file from its table and the deletion of the file; must be longer than any read; at least 3600000",
        low=0,
        high=MOST.file_grace_ms,
    )
    test_bounds: bool = setting(
        False,
        "for tests: allow smaller values of `wal_view_age_max_ms`, `wal_retention_ms` and `file_grace_ms`; with S3, only if the endpoint is on this machine",
    )
    retention_check_interval_ms: int = setting(
        300_000,
        "mean pause between two retention rounds of this broker; each 12th round also collects garbage. With 0 there are no rounds",
        low=0,
    )
    compact_spark_bytes: int = setting(
        16 * 1024 * MIB,
        "if the segments to compact have more bytes than this, `tidelog compact` without `--engine` uses Spark, if Spark is installed; one process compacts about 100 MB/s, that is, the default size in three minutes",
        low=0,
    )
    compact_memory_bytes: int = setting(
        1024 * MIB,
        "memory for the keys of one pass of a compaction; if the distinct keys need more, the compaction makes several passes. A pass also needs memory for one output segment",
        low=4 * MIB,
    )
    poll_interval_ms: int = setting(
        1000, "time between two reads of the WAL by an idle broker", low=10, high=60_000
    )
    broker_heartbeat_interval_ms: int = setting(
        5000,
        "time between two heartbeats of a broker; each heartbeat is one PUT and one LIST",
        low=50,
        high=60_000,
    )
    broker_timeout_ms: int = setting(
        15_000, "a broker without a heartbeat for this time counts as failed", low=100
    )
    sequencer_timeout_ms: int = setting(
        1000, "a broker commits by itself if the sequencer does not answer within this time", low=10
    )
    sequencer_upload_bytes: int = setting(
        512 * 1024,
        "if a flush has more bytes of records than this, the broker uploads them and forwards only the keys of the objects to the sequencer",
        low=0,
        high=16 * MIB,
    )
    security: str = setting(
        "off",
        "`keys`: each request needs a key, and ACLs grant permissions; `off`: each client that reaches the port has all permissions",
        words="off keys",
    )
    admin_key: str = setting(
        "",
        "secret of `User:admin`, which has all permissions, or `@FILE` for a file with the secret; the flag accepts only `@FILE`",
        is_secret=True,
    )
    super_users: str = setting(
        "", "principals with all permissions, separated by `;`: `User:alice;User:bob`"
    )
    allowed_hosts: str = trust.ALLOWED_HOSTS
    security_off_with_keys: bool = trust.SECURITY_OFF_WITH_KEYS
    audit_log: str = trust.AUDIT_LOG
    oidc_issuer: str = trust.OIDC_ISSUER
    oidc_audience: str = trust.OIDC_AUDIENCE
    oidc_jwks_url: str = trust.OIDC_JWKS_URL
    oidc_principal_claim: str = trust.OIDC_PRINCIPAL_CLAIM
    oidc_principal_prefix: str = trust.OIDC_PRINCIPAL_PREFIX
    tls_cert_file: str = trust.TLS_CERT_FILE
    tls_key_file: str = trust.TLS_KEY_FILE
    peer_tls: bool = trust.PEER_TLS
    tls_ca_file: str = trust.TLS_CA_FILE
    peer_tls_cert_file: str = trust.PEER_TLS_CERT_FILE
    peer_tls_key_file: str = trust.PEER_TLS_KEY_FILE
    cors_origins: str = trust.CORS_ORIGINS
    advertised_url: str = trust.ADVERTISED_URL
    s3_endpoint: str = setting("", "URL of an S3 server other than AWS")
    s3_region: str = setting(
        "", "region; if empty, the region of the AWS configuration chain, else us-east-1"
    )
    s3_path_style: str = setting(
        "auto",
        "whether the bucket is in the path of a URL instead of the host name; `auto` means `true` if `s3_endpoint` is set, else `false`",
        words="auto true false",
    )
    log_level: str = setting("info", "minimum level of log lines", words="debug info warning error")
    traces: str = setting(
        "none",
        "`otlp` sends OpenTelemetry traces (needs `tidelog[otel]`); the standard OTEL_ variables set endpoint and sampling",
        words="none otlp",
    )
    log_format: str = setting(
        "human", "`human`: text lines; `json`: one JSON event a line", words="human json"
    )

    # Fixed limits, not settings: a test overrides them in a subclass.
    connections_max: ClassVar[int] = 10_000
    """Maximum number of open connections. For a further connection, the server closes an unproved
    or an idle one (service.http.admission). If it may close none, it answers 503, except for
    health."""
    fetch_wait_ms_max: ClassVar[int] = 30_000
    """Maximum time of a long poll."""
    start_retry_s: ClassVar[float] = 60.0
    """How long a starting broker repeats a failed step (storage.store.start_retry has the reason)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        try:
            check_url(self.store)
            if self.s3_endpoint:
                check_endpoint(self.s3_endpoint)
        except StoreUnfit as error:
            raise BadSettings(str(error)) from None
        if self.wal_retention_ms < RETENTION_FACTOR_MIN * self.wal_view_age_max_ms:
            raise BadSettings(
                f"wal_retention_ms ({self.wal_retention_ms}) must be at least "
                f"{RETENTION_FACTOR_MIN} times wal_view_age_max_ms ({self.wal_view_age_max_ms})"
            )
        least_ms = (LEAST.view_age_ms, LEAST.wal_retention_ms, LEAST.file_grace_ms)
        names = ("wal_view_age_max_ms", "wal_retention_ms", "file_grace_ms")
        for name, least in zip(names, least_ms, strict=True):
            if getattr(self, name) < least and not self.test_bounds:
                raise BadSettings(
                    f"{name} ({getattr(self, name)}) is below {least}: only a cluster for tests "
                    "may have a smaller value (test_bounds)"
                )
        if self.test_bounds and self.store.startswith("s3://") and not self.s3.is_local:
            raise BadSettings("test_bounds is for a folder or an endpoint on this machine")
        if self.broker_timeout_ms < 2 * self.broker_heartbeat_interval_ms:
            raise BadSettings(
                f"broker_timeout_ms ({self.broker_timeout_ms}) must be at least twice "
                f"broker_heartbeat_interval_ms ({self.broker_heartbeat_interval_ms})"
            )
        if self.workers > 1 and (self.peer_port or self.peer_address or self.broker_id):
            raise BadSettings("workers above 1: remove peer_port, peer_address and broker_id")
        if self.workers > 1 and self.store.startswith("memory:"):
            raise BadSettings("workers above 1 cannot share memory://, which is in one process")
        if self.workers > 1 and self.port == 0:
            raise BadSettings("workers above 1 share one port: set a port above 0")
        if self.request_bytes_max > self.buffer_bytes_max:
            raise BadSettings(
                f"request_bytes_max ({self.request_bytes_max}) must not be over buffer_bytes_max "
                f"({self.buffer_bytes_max}), because a larger request would never be accepted"
            )
        if self.security == "off" and (self.admin_key or self.super_users):
            raise BadSettings("admin_key and super_users need security=keys, but security is off")
        if self.admin_key and len(self.admin_key) < ADMIN_KEY_CHARS_MIN:
            raise BadSettings(
                f"admin_key has {len(self.admin_key)} characters: use {ADMIN_KEY_CHARS_MIN} or "
                "more random characters (openssl rand -base64 32)"
            )
        if why := trust.why_not(self) or kafka.why_not(self):
            raise BadSettings(why)
        for name in self.super_user_names:
            if not name.startswith("User:") or name in ("User:", "User:*"):
                raise BadSettings(f"super_users: {name!r} does not have the form User:NAME")

    @property
    def super_user_names(self) -> list[str]:
        return [name.strip() for name in self.super_users.split(";") if name.strip()]

    @property
    def cors_origin_names(self) -> list[str]:
        return [name.strip() for name in self.cors_origins.split(";") if name.strip()]

    @property
    def topic_defaults(self) -> dict[str, str]:
        """Defaults of topics that these settings give, by Kafka's names for configs of brokers."""
        return of_settings(self.default_partitions, is_auto_create=self.auto_create_topics)

    @property
    def s3(self) -> S3Options:
        return S3Options(
            endpoint_url=self.s3_endpoint or None,
            region=self.s3_region or None,
            path_style=None if self.s3_path_style == "auto" else self.s3_path_style == "true",
        )

    def log_settings(self) -> "LogSettings":
        from tidelog.storage.broker import (
            LogSettings,
            MembershipSettings,
            ReaderSettings,
            SequencerSettings,
            WalSettings,
            WriterSettings,
        )

        bounds = Bounds(self.wal_view_age_max_ms, self.wal_retention_ms, self.file_grace_ms)
        part = self.read_cache_bytes // READ_CACHE_PARTS
        return LogSettings(
            wal=WalSettings(bounds),
            writer=WriterSettings(
                flush_bytes=self.flush_bytes,
                flush_interval_ms=self.flush_interval_ms,
                buffer_bytes_max=self.buffer_bytes_max,
                codec="lz4" if self.store.startswith("s3://") else "",
                answer_timeout_s=self.produce_timeout_ms / 1000,
            ),
            reader=ReaderSettings(
                segment_cache_bytes=8 * part, chunk_cache_bytes=2 * part, footer_cache_bytes=part
            ),
            membership=MembershipSettings(
                heartbeat_interval_s=self.broker_heartbeat_interval_ms / 1000,
                member_timeout_s=self.broker_timeout_ms / 1000,
            ),
            sequencer=SequencerSettings(
                handover_timeout_s=self.sequencer_timeout_ms / 1000,
                handover_bytes_max=self.sequencer_upload_bytes,
            ),
            tail_cache_bytes=self.tail_cache_bytes,
            poll_interval_s=self.poll_interval_ms / 1000,
            is_sealing=self.seal_enabled,
            start_retry_s=self.start_retry_s,
            group_delay_s=self.kafka_group_delay_ms / 1000,
        )


def load(
    flags: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    *,
    warn: Callable[[str], object] = lambda _: None,
) -> Settings:
    """Return the settings from the flags (text by field name) and the environment. Raises BadSettings.

    Calls `warn` with one line for each setting that is given by its old name.
    """
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    texts: dict[str, str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(PREFIX) and name not in CLIENT_VARIABLES:
            key = name.removeprefix(PREFIX).lower()
            if key not in fields and key not in RENAMED:
                raise BadSettings(f"unknown variable {name}{_hint(key, fields)}")
            texts[key] = text
    for key, text in flags.items():
        if key not in fields and key not in RENAMED:
            raise BadSettings(f"unknown setting {key!r}{_hint(key, fields)}")
        if key in fields and fields[key].metadata["is_secret"] and not text.startswith("@"):
            raise BadSettings(
                f"{key}: flags are visible to all users of the machine: use @FILE or the variable "
                f"{PREFIX}{key.upper()}"
            )
        texts[key] = text
    _rename(texts, warn)
    parsed: dict[str, Any] = {key: _parse(fields[key], text) for key, text in texts.items()}
    return Settings(**parsed)


def _rename(texts: dict[str, str], warn: Callable[[str], object]) -> None:
    """Replace each old name by its new name. Raises BadSettings if both names are given."""
    old_names = [name for name in RENAMED if name in texts]
    for old in old_names:
        new = RENAMED[old]
        if new in texts:
            raise BadSettings(f"{old} is the old name of {new}, and both are given: remove {old}")
        merged = " (the sum of three caches)" if old in _CACHES else ""
        warn(f"setting {old} is now {new}{merged}: the next version refuses the old name")
    caches = {name: whole_number(name, texts.pop(name)) for name in old_names if name in _CACHES}
    if caches:
        texts["read_cache_bytes"] = str(sum((_CACHES | caches).values()))
    for old in old_names:
        if old not in _CACHES:
            texts[RENAMED[old]] = texts.pop(old)


def state_home() -> Path:
    """Return the folder in which this user's programs keep state (XDG_STATE_HOME)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def set_worker_python(executable: str) -> None:
    """Set the Python of Spark's workers, unless the environment sets it. By default the workers run
    the first python3 in the PATH, which may not have tidelog."""
    os.environ.setdefault("PYSPARK_PYTHON", executable)


def is_submitted_to_spark() -> bool:
    """Whether `spark-submit` started this process and has set the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def console_server() -> str:
    return os.environ.get(SERVER_VARIABLE) or "http://127.0.0.1:8082"


def client_ca_file() -> str | None:
    return os.environ.get(CA_VARIABLE) or None


def client_key(key_file: str | None = None) -> str | None:
    """Return the key that the CLI sends to a broker. It is in `key_file`, or without a `key_file` in
    TIDELOG_KEY, whose value is the key or `@FILE`. Raises BadSettings."""
    text = os.environ.get(KEY_VARIABLE) if key_file is None else f"@{key_file}"
    key = _secret("key", text) if text else None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise BadSettings(
            "key: has a character that no key has: a line break, or one that is not ASCII"
        )
    return key


def _hint(key: str, fields: Mapping[str, object]) -> str:
    if key in REMOVED:
        return ": the setting was removed, delete it"
    close = difflib.get_close_matches(key, fields, 1)
    return f": is {close[0]} meant?" if close else ": see the settings table (tidelog serve --help)"


def _secret(name: str, text: str) -> str:
    try:
        return secret_of(text)
    except ValueError as error:
        raise BadSettings(f"{name}: {error}") from None


def _parse(field: "dataclasses.Field[Any]", text: str) -> object:
    if field.metadata["is_secret"]:
        return _secret(field.name, text)
    if field.type is bool:
        if text.lower() not in BOOLEANS:
            raise BadSettings(f"{field.name}: {text!r} is neither true nor false")
        return BOOLEANS[text.lower()]
    return whole_number(field.name, text) if field.type is int else text
