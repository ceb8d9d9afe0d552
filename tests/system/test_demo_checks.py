"""The demo's checks: right data passes, every kind of wrong data fails the check that is for it."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from deploy.demo import checks as demo_checks
from deploy.demo import demo
from deploy.demo.checks import Carrier, CheckResult, Place, ReadRecord
from deploy.demo.flights import Event

PARTITIONS = 2
KEYS = ("N1", "N2", "N3", None)


def events(count: int = 40) -> list[Event]:
    return [
        Event(seq, KEYS[seq % len(KEYS)], 1000 + seq // 2, b'{"seq":%d}' % seq)
        for seq in range(count)
    ]


def read_back(sent: Sequence[Event]) -> list[ReadRecord]:
    """Return the records of a correct log: N1 and N3 in partition 0, the rest in 1."""
    records = []
    for partition in range(PARTITIONS):
        partition_events = [
            event for event in sent if (event.key in {"N1", "N3"}) == (partition == 0)
        ]
        records += [
            ReadRecord(event.seq, partition, offset, event.key, event.timestamp_ms, event.value)
            for offset, event in enumerate(partition_events)
        ]
    return records


def acks_of(records: Sequence[ReadRecord]) -> dict[int, Place]:
    return {record.seq: Place(record.partition, record.offset) for record in records}


def ends_of(records: Sequence[ReadRecord]) -> dict[int, int]:
    return {n: sum(record.partition == n for record in records) for n in range(PARTITIONS)}


def failed(records: Sequence[ReadRecord]) -> set[str]:
    """Names of the checks that `records` fail, if the right records were sent and acknowledged."""
    sent = events()
    right = read_back(sent)
    checks = [
        demo_checks.check_count("record count", len(sent), len(records)),
        demo_checks.check_dense(records, ends_of(right)),
        demo_checks.check_once(sent, records),
        demo_checks.check_acked(acks_of(right), records),
        demo_checks.check_values(sent, records),
        demo_checks.check_key_order(sent, records),
    ]
    return {check.name for check in checks if not check.is_ok}


COUNT = "record count"
DENSE = "offsets dense from 0 to the end"
ONCE = "no duplicate"
ACKED = "acked records at their offsets"
VALUES = "keys, values, timestamps unchanged"
ORDER = "per-key order, one partition a key"


def test_what_a_log_gives_that_keeps_its_word_passes() -> None:
    assert failed(read_back(events())) == set()


@pytest.mark.parametrize("index", [0, 7, 19, 20, 39])
def test_a_lost_record_is_found(index: int) -> None:
    records = read_back(events())
    del records[index]
    failed_checks = failed(records)
    assert {COUNT, DENSE, ONCE, ACKED, VALUES} <= failed_checks
    lost_key = read_back(events())[index].key
    assert (ORDER in failed_checks) == (lost_key is not None)


def test_a_lost_record_is_found_where_the_offsets_close_the_gap() -> None:
    records = [record for record in read_back(events()) if record.seq != 8]
    closed = [
        record._replace(offset=record.offset - 1)
        if record.partition == 0 and record.offset > 4
        else record
        for record in records
    ]
    assert {COUNT, DENSE, ONCE, ACKED, VALUES, ORDER} == failed(closed)


def test_a_doubled_record_is_found() -> None:
    records = read_back(events())
    end = ends_of(records)[1]
    assert {COUNT, DENSE, ONCE, ORDER} == failed([*records, records[-2]._replace(offset=end)])


def test_one_record_doubled_over_another_is_found_though_the_count_is_right() -> None:
    records = read_back(events())
    records[3] = records[2]._replace(offset=3)
    assert {ONCE, ACKED, ORDER} <= failed(records)


def test_swapped_order_within_a_key_is_found() -> None:
    records = read_back(events())
    first, second = [i for i, record in enumerate(records) if record.key == "N2"][3:5]
    a, b = records[first], records[second]
    records[first] = b._replace(offset=a.offset)
    records[second] = a._replace(offset=b.offset)
    assert {ACKED, ORDER} == failed(records)


def test_swapped_order_of_records_without_a_key_is_no_broken_promise() -> None:
    sent = events()
    records = read_back(sent)
    first, second = [i for i, record in enumerate(records) if record.key is None][3:5]
    a, b = records[first], records[second]
    records[first] = b._replace(offset=a.offset)
    records[second] = a._replace(offset=b.offset)
    assert demo_checks.check_key_order(sent, records).is_ok


def test_a_key_in_two_partitions_is_found() -> None:
    sent = events()
    records = read_back(sent)
    moved = next(i for i, record in enumerate(records) if record.key == "N3")
    # Before all others of its key, and in its own order: only the partition is wrong.
    records[moved] = records[moved]._replace(partition=-1, offset=0)
    check = demo_checks.check_key_order(sent, records)
    assert not check.is_ok
    assert "N3" in check.seen


@pytest.mark.parametrize(
    "change", [{"value": b'{"seq":5} '}, {"key": "N9"}, {"key": None}, {"timestamp_ms": 1}]
)
def test_a_changed_record_is_found(change: dict[str, object]) -> None:
    records = read_back(events())
    index = next(i for i, record in enumerate(records) if record.seq == 5)
    records[index] = records[index]._replace(**change)  # type: ignore[arg-type]
    assert VALUES in failed(records)


def test_an_offset_beyond_the_end_is_found() -> None:
    records = read_back(events())
    records[-1] = records[-1]._replace(offset=records[-1].offset + 1)
    assert DENSE in failed(records)


def test_an_unexpected_partition_is_found() -> None:
    records = read_back(events())
    assert not demo_checks.check_dense(
        [*records, records[0]._replace(partition=7)], ends_of(records)
    ).is_ok


# -- tiers


@pytest.mark.parametrize(
    ("sealed", "is_ok"),
    [
        ({0: 5, 1: 5}, True),
        ({0: 0, 1: 5}, False),  # nothing sealed
        ({0: 5, 1: 10}, False),  # nothing hot
        ({1: 5}, False),
    ],
)
def test_tiers(sealed: dict[int, int], is_ok: bool) -> None:
    assert demo_checks.check_tiers(sealed, {0: 10, 1: 10}).is_ok == is_ok


# -- carriers

ROWS = [
    {"carrier": "UA", "dep_delay": "10"},
    {"carrier": "UA", "dep_delay": "-5"},
    {"carrier": "UA", "dep_delay": "NA"},
    {"carrier": "AA", "dep_delay": "3"},
    {"carrier": "OO", "dep_delay": "NA"},
]
CARRIERS = {"UA": Carrier(3, 2.5), "AA": Carrier(1, 3.0), "OO": Carrier(1, None)}


def test_carriers_of_the_file_count_all_and_average_those_that_left() -> None:
    assert demo_checks.carriers(ROWS) == CARRIERS


def carrier_checks(records: dict[str, Carrier]) -> tuple[CheckResult, CheckResult]:
    return (
        demo_checks.check_carrier_counts(CARRIERS, records),
        demo_checks.check_carrier_means(CARRIERS, records),
    )


def test_the_same_carriers_pass() -> None:
    counts, means = carrier_checks(dict(CARRIERS))
    assert counts.is_ok
    assert means.is_ok


def test_the_last_digit_of_a_mean_does_not_matter() -> None:
    _, means = carrier_checks(CARRIERS | {"UA": Carrier(3, 2.5 * (1 + 1e-12))})
    assert means.is_ok


@pytest.mark.parametrize("wrong", [2.5001, -2.5, 0.0, None])
def test_a_wrong_mean_fails(wrong: float | None) -> None:
    counts, means = carrier_checks(CARRIERS | {"UA": Carrier(3, wrong)})
    assert counts.is_ok
    assert not means.is_ok
    assert "UA 2.500000" in means.expected
    assert "UA" in means.seen


def test_a_mean_where_there_is_none_fails() -> None:
    assert not carrier_checks(CARRIERS | {"OO": Carrier(1, 0.0)})[1].is_ok


def test_a_wrong_count_fails() -> None:
    counts, means = carrier_checks(CARRIERS | {"AA": Carrier(2, 3.0)})
    assert not counts.is_ok
    assert means.is_ok
    assert "AA 2" in counts.seen


@pytest.mark.parametrize(
    "records", [{}, {"UA": Carrier(3, 2.5)}, CARRIERS | {"ZZ": Carrier(1, 1.0)}]
)
def test_missing_and_foreign_carriers_fail(records: dict[str, Carrier]) -> None:
    counts, means = carrier_checks(records)
    assert not counts.is_ok
    assert not means.is_ok


def test_a_check_shows_what_was_expected_and_what_was_seen() -> None:
    check = demo_checks.check_count("record count", 336_776, 336_775)
    assert check == CheckResult("record count", "336,776", "336,775", is_ok=False)


# -- the verdict


@pytest.mark.parametrize(("broken", "status"), [(0, 0), (1, 1), (3, 1)])
def test_any_failed_check_makes_the_exit_status_one(broken: int, status: int) -> None:
    checks = [
        demo_checks.check_count(f"check {number}", 1, 1 + (number < broken)) for number in range(3)
    ]
    told = io.StringIO()
    assert demo.report(Console(file=told, width=100), checks, seconds=12.3) == status
    assert told.getvalue().count("FAILED") == broken
    assert all(check.name in told.getvalue() for check in checks)


def test_too_few_records_for_two_tiers_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--records", "10"])
    assert ended.value.code == 2
    assert "--records" in capsys.readouterr().err
