"""Positions, times, durations and sizes: one grammar for all commands, settings and configs."""

import contextlib
import datetime as dt
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.service import quantities
from tidelog.service.cli import consume, groups, main, option_units, positions, replay
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.positions import END, Ago, Form, Last, PartitionOffsets, position, text_of
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import load

NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
OFFSETS = st.integers(0, positions.OFFSET_MAX)
EDGES = st.sampled_from(["beginning", "end"])
ZONES = st.timezones() | st.just(dt.UTC)
TIMES = st.datetimes(timezones=ZONES).map(lambda when: when.astimezone(dt.UTC))
PARTITIONS = st.dictionaries(st.integers(0, 99_999), OFFSETS | EDGES, min_size=1, max_size=4)
POSITIONS = (
    EDGES
    | OFFSETS
    | TIMES
    | OFFSETS.map(Last)
    | st.integers(0, 10**14).map(Ago)
    | PARTITIONS.map(lambda found: PartitionOffsets(tuple(found.items())))
)


# -- each text is the text of its value


@given(POSITIONS)
def test_position_is_read_as_it_is_printed(place: positions.Position) -> None:
    assert position(text_of(place)) == place


@given(st.integers(0, 10**15))
def test_quantity_is_read_as_it_is_printed(value: int) -> None:
    assert quantities.milliseconds(quantities.duration(value)) == value
    assert quantities.octets(quantities.size(value)) == value


def test_durations_for_people_are_short() -> None:
    seconds = (5, 90, 150, 3600, 5400, 90_000)
    assert [quantities.rounded(duration_s) for duration_s in seconds] == [
        *("5 s", "90 s", "2 min", "1 h", "1 h 30 min", "1 d 1 h")
    ]


@given(st.text(max_size=12))
def test_every_other_text_is_refused_by_one_line(text: str) -> None:
    refused = []
    with contextlib.suppress(BadUsage):
        assert position(text_of(position(text))) == position(text)
    for parse in (quantities.milliseconds, quantities.octets):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            refused.append(str(error))
    assert all(repr(text) in message for message in refused)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("beginning", "beginning", "the beginning"),
        ("17", 17, "offset 17"),
        ("-10", Last(10), "the last 10 of each partition"),
        ("-1h", Ago(3_600_000), "2026-11-22 11:00:00 UTC (1h before now)"),
        ("@-1h", Ago(3_600_000), "2026-11-22 11:00:00 UTC (1h before now)"),
        ("@2026-01-01", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "2026-01-01 00:00:00 UTC"),
        ("@2026-01-01T01+01:00", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "2026-01-01 00:00:00 UTC"),
        ("0:17", PartitionOffsets(((0, 17),)), "partition 0 at 17"),
        (
            "0:1,3:end",
            PartitionOffsets(((0, 1), (3, END))),
            "partition 0 at 1, partition 3 at its end",
        ),
    ],
)
def test_positions(text: str, place: positions.Position, words: str) -> None:
    assert position(text) == place
    assert positions.in_words(position(text), NOW) == words


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "+1", "1.5", "-", "@", "@-", "@-10", "-1y", "@noon", "0:", ":1", "0:x", "-1:0"),
        *("0:1,", "0:1,0:2", "1 h", "٣", "9223372036854775808", "@-1.5h"),
    ],
)  # fmt: skip
def test_texts_that_are_no_position(text: str) -> None:
    with pytest.raises(BadUsage):
        position(text)


def test_time_before_calendar_is_wrong_usage() -> None:
    with pytest.raises(BadUsage, match="before the year 1"):
        positions.at_time(position("-999999w"), NOW)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("retention.ms", "7d", "604800000"),
        ("retention.ms", "-1", "-1"),
        ("log.roll.ms", "90s", "90000"),
        ("segment.bytes", "1GiB", "1073741824"),
        ("retention.bytes", "10mb", "10000000"),
        ("index.interval.bytes", "4096", "4096"),
        ("cleanup.policy", "compact", "compact"),
        ("compression.type", "7d", "7d"),
    ],
)
def test_configs_with_units(name: str, text: str, value: str) -> None:
    assert option_units.configs_with_units({name: text}) == {name: value}


def test_configs_with_wrong_units() -> None:
    for name, text in (("retention.ms", "7y"), ("segment.bytes", "1h"), ("segment.ms", "1GiB")):
        with pytest.raises(BadUsage, match=text):
            option_units.configs_with_units({name: text})


def test_configs_are_repeated_in_words() -> None:
    assert (
        option_units.config_in_words("retention.ms", "604800000") == "retention.ms=604800000 (1w)"
    )
    assert option_units.config_in_words("retention.ms", "1001") == "retention.ms=1001"
    assert option_units.config_in_words("retention.ms", "-1") == "retention.ms=-1"
    assert option_units.config_in_words("retention.ms", "0") == "retention.ms=0"
    assert option_units.config_in_words("cleanup.policy", "7") == "cleanup.policy=7"


def test_settings_take_units() -> None:
    warnings: list[str] = []
    options = {"flush_interval_ms": "1s", "retention_check_interval_ms": "1h"}
    settings = load(
        {**options, "compact_spark_bytes": "1GiB"}, environment={}, warn=warnings.append
    )
    assert settings.flush_interval_ms == 1000
    assert settings.retention_check_interval_ms == 3_600_000
    assert settings.compact_spark_bytes == 2**30
    for name, text in (("flush_interval_ms", "1GB"), ("compact_spark_bytes", "1h"), ("port", "1h")):
        with pytest.raises(BadSettings, match=name):
            load({name: text}, environment={}, warn=warnings.append)


# -- all commands that take such values

TIMES_TAKEN = ("@2026-01-01", "@2026-01-01T00:00:00Z", "@-1h", "-90s", "-7d")
TAKEN: dict[str, tuple[tuple[Form, ...], tuple[str, ...]]] = {
    "consume --from": (consume.FROM, ("end", "17", "-10", "0:17,1:end", *TIMES_TAKEN)),
    "consume --until": (consume.UNTIL, ("beginning", "end", "17", *TIMES_TAKEN)),
    "groups reset": (groups.RESET_TO, ("beginning", "end", "17", *TIMES_TAKEN)),
    "replay": (replay.FORMS, ("beginning", "end", "0:17,1:end", *TIMES_TAKEN)),
}


@pytest.mark.parametrize("command", TAKEN)
def test_every_command_takes_its_forms(command: str) -> None:
    forms, texts = TAKEN[command]
    for text in texts:
        position(text, forms)
    others = {Form.OFFSET: "17", Form.LAST: "-10", Form.PARTITIONS: "0:17"}
    for form, text in others.items():
        if form not in forms:
            with pytest.raises(BadUsage, match="expected beginning, end"):
                position(text, forms)


@pytest.fixture
def tidelog(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., tuple[int, str]]:
    """Run a command line in this process. Return its status and stderr."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tidelog", *words])
        status = main.main()
        return status, capsysbinary.readouterr().err.decode()

    return run


DURATIONS = [
    *(("bounds", "--file-grace-ms"), ("bounds", "--wal-retention-ms")),
    *(("bounds", "--view-age-ms"), ("collect", "--file-grace-ms"), ("scrub", "--file-grace-ms")),
    ("maintain", "--file-grace-ms"),
]


@pytest.mark.parametrize(("command", "option"), DURATIONS)
def test_durations_of_options(
    tidelog: Callable[..., tuple[int, str]], tmp_path: object, command: str, option: str
) -> None:
    there = ("--store", f"{tmp_path}/none")
    for text in ("7d", "90s", "3600000"):
        status, said = tidelog(command, option, text, *there)
        assert status == 3, said
    status, said = tidelog(command, option, "7y", *there)
    assert status == 2
    assert "'7y' is not a duration" in said


def test_sizes_of_options(tidelog: Callable[..., tuple[int, str]], tmp_path: object) -> None:
    there = ("--store", f"{tmp_path}/none", f"{tmp_path}/to")
    assert tidelog("backup", "--max-bytes-per-s", "50MB", *there)[0] == 3
    for text in ("50m", "0", "-1"):
        assert tidelog("backup", "--max-bytes-per-s", text, *there)[0] == 2


@pytest.mark.parametrize("text", ["-2h", "@-2h", "2026-01-01", "@2026-01-01T00:00Z"])
def test_times_of_restore(
    tidelog: Callable[..., tuple[int, str]], tmp_path: object, text: str
) -> None:
    words = ("restore", f"{tmp_path}/none", "--store", f"{tmp_path}/new", "--at")
    assert tidelog(*words, text)[0] == 3
    assert "is not a time" in tidelog(*words, "noon")[1]
