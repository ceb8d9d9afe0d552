"""Settings of a broker and of the command line. No other module reads the environment.

`Settings` is all sections in one; a part of the service takes the section that it needs. Each field
is a flag of `tidelog serve` (`--flush-interval-ms`), a variable (`TIDELOG_FLUSH_INTERVAL_MS`) and a
row of SETTINGS.md. A flag overrides a variable, a variable overrides the default. Names, values or
combinations that are not valid raise BadSettings.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from tidelog.service.client.servers import DEFAULT
from tidelog.service.secret_files import secret_of
from tidelog.service.settings.cluster import ClusterSettings
from tidelog.service.settings.fields import BOOLEANS, LOG, BadSettings, whole_number
from tidelog.service.settings.kafka import KafkaSettings
from tidelog.service.settings.maintenance import MaintenanceSettings
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.settings.security import SecuritySettings
from tidelog.service.settings.store import StoreSettings
from tidelog.service.settings.telemetry import TelemetrySettings
from tidelog.storage.core.log_settings import (
    IcebergSettings,
    LogSettings,
    PaceSettings,
    ReaderSettings,
)

PREFIX = "TIDELOG_"
SERVER_VARIABLE = "TIDELOG_URL"
KEY_VARIABLE = "TIDELOG_KEY"
CA_VARIABLE = "TIDELOG_CA_FILE"
CLIENT_VARIABLES = frozenset({SERVER_VARIABLE, KEY_VARIABLE, CA_VARIABLE})
"""Variables of the client commands; a broker ignores them."""
_SERVICE_VARIABLE = re.compile(r"(\w+_)?(service_(host|port\w*)|port_\d+_(tcp|udp|sctp)\w*)")
_CACHES = {
    name: LOG.reader._asdict()[name]
    for name in ("chunk_cache_bytes", "segment_cache_bytes", "footer_cache_bytes")
}
"""Old settings with their defaults. `read_cache_bytes` has the sum of the three."""

RENAMED = {
    "buffer_bytes": "buffer_bytes_max",
    "sealing": "seal_enabled",
    "heartbeat_interval_ms": "broker_heartbeat_interval_ms",
    "member_timeout_ms": "broker_timeout_ms",
    "handover_timeout_ms": "sequencer_timeout_ms",
    "handover_bytes": "sequencer_upload_bytes",
    **dict.fromkeys(_CACHES, "read_cache_bytes"),
}
"""The new name of a setting, by its old name. An old name still works, with a warning."""
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


# The fields have the order of the bases from the last to the first.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(
    TelemetrySettings,
    SecuritySettings,
    ClusterSettings,
    MaintenanceSettings,
    RequestSettings,
    KafkaSettings,
    StoreSettings,
):
    """All sections. Names of sizes and times contain the unit: bytes or ms."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.workers > 1 and self.is_in_memory:
            yield "workers above 1 cannot share memory://, which is in one process"

    def log_settings(self) -> LogSettings:
        # Each cache has the part of `read_cache_bytes` that it has of the default.
        unit = math.gcd(*LOG.reader)
        unit_bytes = self.read_cache_bytes // (sum(LOG.reader) // unit)
        return LOG._replace(
            wal=LOG.wal._replace(bounds=self.bounds),
            writer=LOG.writer._replace(
                flush_bytes=self.flush_bytes,
                buffer_bytes_max=self.buffer_bytes_max,
                codec=LOG.writer.codec if self.store.startswith("s3://") else "",
                answer_timeout_s=self.produce_timeout_ms / 1000,
            ),
            pace=PaceSettings(
                # Requests to a folder or to memory cost nothing.
                self.commits_per_minute if self.store.startswith("s3://") else 0,
                self.commits_burst,
                self.flush_interval_ms,
            ),
            reader=ReaderSettings(*(size // unit * unit_bytes for size in LOG.reader)),
            membership=LOG.membership._replace(
                heartbeat_interval_s=self.broker_heartbeat_interval_ms / 1000,
                member_timeout_s=self.broker_timeout_ms / 1000,
            ),
            sequencer=LOG.sequencer._replace(
                handover_timeout_s=self.sequencer_timeout_ms / 1000,
                handover_bytes_max=self.sequencer_upload_bytes,
            ),
            iceberg=IcebergSettings(
                self.iceberg_refresh_ms / 1000, self.iceberg_freshness == "acked"
            ),
            tail_cache_bytes=self.tail_cache_bytes,
            poll_interval_s=self.poll_interval_ms / 1000,
            read_freshness_s=self.read_freshness_ms / 1000,
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
    variables = _of_environment(os.environ if environment is None else environment, fields)
    _check_flags(flags, fields)
    texts = {**variables, **flags}
    try:
        _rename(texts, warn)
        parsed: dict[str, Any] = {key: _parse(fields[key], text) for key, text in texts.items()}
        return Settings(**parsed)
    except BadSettings as error:
        variable = _variable_of(str(error).partition(":")[0], variables.keys() - flags.keys())
        raise BadSettings(f"{error}{variable}") from None


def _variable_of(name: str, variables: Set[str]) -> str:
    """Return the addition to an error about a setting that a variable gives, else "".

    The variable may have an old name of the setting.
    """
    names = [name, *(old for old, new in RENAMED.items() if new == name)]
    named = [f"{PREFIX}{key.upper()}" for key in names if key in variables]
    return f" (variable {', '.join(named)})" if named else ""


def _of_environment(environment: Mapping[str, str], fields: Mapping[str, object]) -> dict[str, str]:
    """Return the settings of the environment by field name, or by old name. Raises BadSettings."""
    texts: dict[str, str] = {}
    for name, text in environment.items():
        if name.startswith(PREFIX) and name not in CLIENT_VARIABLES:
            key = name.removeprefix(PREFIX).lower()
            if _is_of_kubernetes(key, text):
                continue
            if key not in fields and key not in RENAMED:
                raise BadSettings(f"unknown variable {name}{_hint(key, fields)}")
            texts[key] = text
    return texts


def _check_flags(flags: Mapping[str, str], fields: "Mapping[str, dataclasses.Field[Any]]") -> None:
    """Raises BadSettings for an unknown flag, and for a secret in the open."""
    for key, text in flags.items():
        if key not in fields and key not in RENAMED:
            raise BadSettings(f"unknown setting {key!r}{_hint(key, fields)}")
        if key in fields and fields[key].metadata["is_secret"] and not text.startswith("@"):
            raise BadSettings(
                f"{key}: flags are visible to all users of the machine: use @FILE or the variable "
                f"{PREFIX}{key.upper()}"
            )


def _is_of_kubernetes(key: str, text: str) -> bool:
    """Whether Kubernetes has set the variable, for a Service named `tidelog...`.

    It does so in the pods of a namespace for each Service.
    """
    is_url = key.endswith("port") and "://" in text
    return is_url or _SERVICE_VARIABLE.fullmatch(key) is not None


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
    """Set the Python of Spark's workers, unless the environment sets it.

    By default the workers run the first python3 in the PATH, which may not have tidelog.
    """
    os.environ.setdefault("PYSPARK_PYTHON", executable)


def is_submitted_to_spark() -> bool:
    """Whether `spark-submit` started this process and has set the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def console_server() -> str:
    return os.environ.get(SERVER_VARIABLE) or DEFAULT


def client_ca_file() -> str | None:
    return os.environ.get(CA_VARIABLE) or None


def client_key(key_file: str | None = None) -> str | None:
    """Return the key that the CLI sends to a broker.

    It is in `key_file`, or without a `key_file` in TIDELOG_KEY, whose value is the key or `@FILE`.
    Raises BadSettings.
    """
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
