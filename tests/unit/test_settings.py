"""Settings: every one documented, every bad one refused with one clear line."""

import dataclasses
import re
from pathlib import Path

import pytest

from service.settings import BadSettings, Settings, load

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_lists_exactly_the_settings_that_exist() -> None:
    table = README.read_text().partition("## Settings")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", table, re.MULTILINE))
    fields = dataclasses.fields(Settings)
    assert rows == {
        field.name: str(field.default).lower()
        if isinstance(field.default, bool)
        else str(field.default)
        for field in fields
    }
    for field in fields:
        assert field.metadata["doc"] in table, f"{field.name}: the README says something else"


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    environment = {"TIDELOG_PORT": "1", "TIDELOG_HOST": "h", "HOME": "/", "PATH": "x"}
    settings = load({"port": "2"}, environment)
    assert (settings.port, settings.host, settings.fetch_bytes) == (2, "h", 1024 * 1024)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prot": "1"}, "unknown setting 'prot': is port meant?"),
        ({"nonsense": "1"}, "unknown setting 'nonsense': see the settings table"),
        ({"flush_interval_ms": "250ms"}, "flush_interval_ms: '250ms' is not a whole number of ms"),
        ({"flush_bytes": "8M"}, "flush_bytes: '8M' is not a whole number of bytes"),
        ({"port": "eighty"}, "port: 'eighty' is not a whole number"),
        ({"port": "70000"}, "port: 70000 is above 65535"),
        ({"port": "-1"}, "port: -1 is below 0"),
        ({"sealing": "perhaps"}, "sealing: 'perhaps' is neither true nor false"),
        ({"wal_codec": "rar"}, "wal_codec: 'rar' is none of auto, none, lz4, zstd"),
        ({"wal_retention_ms": "700000"}, "must be at least 4 times wal_view_age_max_ms"),
        ({"flush_bytes": "100000000"}, "must not be over flush_bytes_max"),
        ({"request_bytes_max": "1000000000"}, "must not be over buffer_bytes"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_right(
    flags: dict[str, str], words: str
) -> None:
    with pytest.raises(BadSettings) as caught:
        load(flags, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_variable_of_ours_is_refused() -> None:
    with pytest.raises(BadSettings, match="TIDELOG_PROT"):
        load({}, {"TIDELOG_PROT": "1"})


def test_the_codec_follows_the_store() -> None:
    assert load({"store": "s3://b/p"}, {}).log_settings().writer.codec == "lz4"
    assert load({"store": "./x"}, {}).log_settings().writer.codec == ""
    assert load({"store": "./x", "wal_codec": "zstd"}, {}).log_settings().writer.codec == "zstd"
