"""Settings: every bad one is refused with one clear line."""

import pytest

from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import REMOVED, Settings, load
from tidelog.storage.core.log_settings import LogSettings, PaceSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.write.writer import WriterSettings


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    environment = {"TIDELOG_PORT": "1", "TIDELOG_HOST": "h", "HOME": "/", "PATH": "x"}
    settings = load({"port": "2"}, environment)
    assert (settings.port, settings.host, settings.fetch_bytes) == (2, "h", 1024 * 1024)


def test_variables_that_kubernetes_sets_for_service_are_left_alone() -> None:
    """In a pod beside a Service `tidelog` and a Service `tidelog-canary`."""
    url = "tcp://10.0.0.7:8082"
    environment = {
        "TIDELOG_SERVICE_HOST": "10.0.0.7",
        "TIDELOG_SERVICE_PORT": "8082",
        "TIDELOG_SERVICE_PORT_HTTP": "8082",
        "TIDELOG_PORT": url,
        "TIDELOG_PORT_8082_TCP": url,
        "TIDELOG_PORT_8082_TCP_PROTO": "tcp",
        "TIDELOG_PORT_8082_TCP_PORT": "8082",
        "TIDELOG_PORT_8082_TCP_ADDR": "10.0.0.7",
        "TIDELOG_CANARY_SERVICE_HOST": "10.0.0.8",
        "TIDELOG_CANARY_PORT": url,
    }
    assert load({}, environment) == Settings()
    assert load({}, environment | {"TIDELOG_KAFKA_PORT": "9092"}).kafka_port == 9092


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prot": "1"}, "unknown setting 'prot': is port meant?"),
        ({"no_such": "1"}, "unknown setting 'no_such': see the settings table"),
        ({"flush_interval_ms": "250y"}, "flush_interval_ms: '250y' is not a duration: give"),
        ({"flush_bytes": "8M"}, "flush_bytes: '8M' is not a size: give"),
        ({"port": "eighty"}, "port: 'eighty' is not a whole number"),
        ({"workers": "1_0"}, "workers: '1_0' is not a whole number"),
        ({"workers": " 2"}, "workers: ' 2' is not a whole number"),
        ({"port": "70000"}, "port: 70000 is above 65535"),
        ({"port": "-1"}, "port: -1 is below 0"),
        ({"seal_enabled": "perhaps"}, "seal_enabled: 'perhaps' is neither true nor false"),
        ({"kafka_advertised": "h:1"}, "kafka_advertised and kafka_node_id need kafka_port"),
        ({"kafka_port": "9092", "kafka_advertised": "0.0.0.0:9092"}, "cannot connect to 0.0.0.0"),
        ({"kafka_port": "9092", "kafka_advertised": "[::]:9092"}, "clients cannot connect to ::"),
        ({"kafka_port": "9092", "kafka_advertised": "host"}, "'host' is not HOST:PORT"),
        ({"kafka_port": "65535", "workers": "2"}, "ports 1 to 65533, with all workers"),
        ({"kafka_port": "8081", "workers": "2"}, "port 8082 is for HTTP and for Kafka clients"),
        ({"advertised_url": "https://[1.2.3.4]"}, "'https://[1.2.3.4]' is no URL"),
        ({"advertised_url": "https://h:99999"}, "'https://h:99999' is no URL"),
        ({"cors_origins": "https://[....]"}, "cors_origins: 'https://[....]'"),
        ({"zone": "eu 1"}, "zone: 'eu 1' has characters"),
        ({"tls_cert_file": "c"}, "tls_cert_file and tls_key_file: give both or neither"),
        ({"tls_key_file": "k"}, "tls_cert_file and tls_key_file: give both or neither"),
        ({"peer_tls": "true"}, "peer_tls needs tls_ca_file"),
        ({"tls_ca_file": "a"}, "need peer_tls: set peer_tls, or remove both"),
        ({"peer_tls": "1", "tls_ca_file": "a"}, "needs peer_tls_cert_file or tls_cert_file"),
        ({"peer_tls": "1", "peer_tls_cert_file": "c"}, "peer_tls_key_file: give both or neither"),
        ({"security": "rar"}, "security: 'rar' is none of off, keys"),
        ({"wal_codec": "lz4"}, "unknown setting 'wal_codec': the setting was removed, delete it"),
        ({"buffer_bytes": "8M"}, "buffer_bytes_max: '8M' is not a size: give"),
        ({"chunk_cache_bytes": "8M"}, "chunk_cache_bytes: '8M' is not a size: give"),
        ({"wal_retention_ms": "700000"}, "must be at least 4 times wal_view_age_max_ms"),
        ({"wal_view_age_max_ms": "59999"}, "wal_view_age_max_ms (59999) is below 60000: only a"),
        (
            {"wal_view_age_max_ms": "60000", "wal_retention_ms": "3599999"},
            "wal_retention_ms (3599999) is below 3600000: only a cluster for tests",
        ),
        (
            {"wal_view_age_max_ms": "1000", "wal_retention_ms": "3999", "test_bounds": "true"},
            "must be at least 4 times wal_view_age_max_ms",
        ),
        (
            {"test_bounds": "true", "store": "s3://b/p"},
            "test_bounds is for a folder or an endpoint on this machine",
        ),
        (
            {"test_bounds": "true", "store": "s3://b/p", "s3_endpoint": "https://s3.example:9000"},
            "test_bounds is for a folder or an endpoint on this machine",
        ),
        ({"flush_bytes": "100000000"}, "flush_bytes: 100000000 is above 67108864"),
        ({"request_bytes_max": "1000000000"}, "must not be over buffer_bytes_max"),
    ],
)
def test_bad_setting_is_named_with_its_value_and_what_is_right(
    flags: dict[str, str], words: str
) -> None:
    with pytest.raises(BadSettings) as caught:
        load(flags, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_variable_of_ours_is_refused() -> None:
    with pytest.raises(BadSettings, match="TIDELOG_PROT"):
        load({}, {"TIDELOG_PROT": "1"})


@pytest.mark.parametrize(
    "store_settings",
    [
        {"store": "./x"},
        {"store": "s3://b/p", "s3_endpoint": "http://127.0.0.1:9000"},
        {"store": "s3://b/p", "s3_endpoint": "http://localhost:9000"},
        {"store": "s3://b/p", "s3_endpoint": "http://[::1]:9000"},
    ],
)
def test_cluster_for_tests_may_have_short_bounds(store_settings: dict[str, str]) -> None:
    short = {"wal_view_age_max_ms": "100", "wal_retention_ms": "400", "test_bounds": "true"}
    assert load({**store_settings, **short}, {}).log_settings().wal.bounds == Bounds(100, 400)


def test_codec_follows_store() -> None:
    assert load({"store": "s3://b/p"}, {}).log_settings().writer.codec == "lz4"
    assert load({"store": "./x"}, {}).log_settings().writer.codec == ""


def test_only_a_store_whose_requests_cost_has_a_budget_of_commits() -> None:
    assert load({"store": "s3://b/p"}, {}).log_settings().pace == PaceSettings()
    given = {"commits_per_minute": "60", "commits_burst": "9", "flush_interval_ms": "250"}
    assert load({"store": "s3://b/p", **given}, {}).log_settings().pace == (60, 9, 250)
    assert load({"store": "./x", **given}, {}).log_settings().pace == (0, 9, 250)


def test_defaults_are_those_of_log() -> None:
    sized = ReaderSettings()
    assert Settings().log_settings() == LogSettings()._replace(
        writer=WriterSettings(codec="", answer_timeout_s=30.0),
        pace=PaceSettings(commits_per_minute=0),
    )
    assert Settings().log_settings().reader == sized
    none = load({"read_cache_bytes": "0"}, {}).log_settings().reader
    assert none[:3] == (0, 0, 0)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("buffer_bytes", "buffer_bytes_max", "268435457"),
        ("sealing", "seal_enabled", "false"),
        ("heartbeat_interval_ms", "broker_heartbeat_interval_ms", "777"),
        ("member_timeout_ms", "broker_timeout_ms", "77777"),
        ("handover_timeout_ms", "sequencer_timeout_ms", "777"),
        ("handover_bytes", "sequencer_upload_bytes", "777"),
    ],
)
def test_old_name_works_and_warns(old: str, new: str, text: str) -> None:
    right = load({new: text}, {})
    assert right != Settings()
    for flags, variables in (({old: text}, {}), ({}, {f"TIDELOG_{old.upper()}": text})):
        warned: list[str] = []
        assert load(flags, variables, warn=warned.append) == right
        assert warned == [f"setting {old} is now {new}: the next version refuses the old name"]
        with pytest.raises(BadSettings, match=f"{old} is the old name of {new}, and both"):
            load(flags | {new: text}, variables)


def test_three_old_caches_are_one() -> None:
    warned: list[str] = []
    settings = load(
        {"segment_cache_bytes": "1073741824"},
        {"TIDELOG_CHUNK_CACHE_BYTES": "0"},
        warn=warned.append,
    )
    assert settings.read_cache_bytes == 1073741824 + 32 * 1024 * 1024
    assert len(warned) == 2
    with pytest.raises(BadSettings, match="both are given"):
        load({"footer_cache_bytes": "1", "read_cache_bytes": "1"}, {})


def test_error_names_variable_that_gave_value() -> None:
    with pytest.raises(BadSettings, match=r"workers: 'two' .*\(variable TIDELOG_WORKERS\)$"):
        load({}, {"TIDELOG_WORKERS": "two"})
    with pytest.raises(BadSettings, match=r"port: 70000 .*\(variable TIDELOG_PORT\)$"):
        load({}, {"TIDELOG_PORT": "70000"})
    with pytest.raises(BadSettings, match=r"\(variable TIDELOG_BUFFER_BYTES\)$"):
        load({}, {"TIDELOG_BUFFER_BYTES": "x"})
    with pytest.raises(BadSettings, match=r"\(variable TIDELOG_FOOTER_CACHE_BYTES\)$"):
        load({}, {"TIDELOG_FOOTER_CACHE_BYTES": "x"})
    with pytest.raises(BadSettings, match=r"workers: 'two' is not a whole number$"):
        load({"workers": "two"}, {"TIDELOG_WORKERS": "1"})


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_setting_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(BadSettings, match="was removed"):
        load({}, {f"TIDELOG_{name.upper()}": "1"})
