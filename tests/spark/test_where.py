"""`where` of `read_topic`: a text gives the records that it says, and opens what overlaps."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.spark.conftest import History, records_of, without_headers
from tests.support.broker_log import TIME_MS, Record
from tidelog.storage.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

FILTERS = 20


class Condition(NamedTuple):
    """A text of SQL, and what it means."""

    text: str
    holds: Callable[[Record], bool]


def comparison(draws: random.Random) -> Condition:
    """One comparison of a column on which files are chosen, or of another."""
    sign = draws.choice(["<", "<=", "=", ">=", ">", "!="])
    means: Callable[[int, int], bool] = {
        "<": int.__lt__,
        "<=": int.__le__,
        "=": int.__eq__,
        ">=": int.__ge__,
        ">": int.__gt__,
        "!=": int.__ne__,
    }[sign]
    number = draws.choice([0, 50, 99, 100, 101, 199, 200, 250, 299, 300])
    match draws.randrange(7):
        case 0:
            part = draws.randrange(4)
            return Condition(f"partition {sign} {part}", lambda r: means(r.partition, part))
        case 1:
            return Condition(f"OFFSET {sign} {number}", lambda r: means(r.offset, number))
        case 2:
            us = (TIME_MS + number) * 1000 + draws.choice([0, 500])
            text = f"timestamp {sign} timestamp_micros({us})"
            return Condition(text, lambda r: means(r.timestamp_us, us))
        case 3:
            among = [draws.randrange(300) for _ in range(3)]
            words = ", ".join(map(str, among))
            return Condition(f"offset in ({words})", lambda r: r.offset in among)
        case 4:
            low = number - 30
            text = f"offset between {low} and {number}"
            return Condition(text, lambda r: low <= r.offset <= number)
        case 5:
            return Condition(
                f"key = 'key-{number % 10}'", lambda r: r.key == b"key-%d" % (number % 10)
            )
        case _:
            rest = number % 3
            return Condition(f"offset % 3 = {rest}", lambda r: r.offset % 3 == rest)


def drawn(draws: random.Random, depth: int) -> Condition:
    if depth == 0 or draws.random() < 0.2:
        return comparison(draws)
    left, right = drawn(draws, depth - 1), drawn(draws, depth - 1)
    if draws.random() < 0.5:
        return Condition(
            f"({left.text} and {right.text})", lambda r: left.holds(r) and right.holds(r)
        )
    return Condition(f"({left.text} or {right.text})", lambda r: left.holds(r) or right.holds(r))


def read(spark: "SparkSession", history: History, where: str, **options: str) -> "DataFrame":
    from tidelog.storage.spark.topic_frame import read_topic

    return read_topic(spark, history.url, "events", where=where, **options)


def offsets(frame: "DataFrame") -> list[tuple[int, int]]:
    return sorted(
        (row.partition, row.offset) for row in frame.select("partition", "offset").collect()
    )


def test_any_filter_read_twice_gives_the_records_that_it_says(
    spark: "SparkSession", history: History
) -> None:
    draws = random.Random(37)
    counts = []
    for _ in range(FILTERS):
        condition = drawn(draws, draws.randrange(3))
        expected = [(r.partition, r.offset) for r in history.of("events") if condition.holds(r)]
        frame = read(spark, history, condition.text)
        assert offsets(frame) == expected, condition.text
        assert offsets(frame) == expected, condition.text
        counts.append(len(expected))
    assert len(set(counts)) > FILTERS // 2, "the filters are too much alike"


def test_only_files_that_overlap_are_named(spark: "SparkSession", history: History) -> None:
    """Partition 0 has two files of 100 records, 1 has one of 100, 2 has one of 1."""

    def count(where: str) -> int:
        return len(read(spark, history, where).inputFiles())

    every = count("length(value) >= 0")
    assert every == 4
    assert count("partition = 0") == 2
    assert count("partition = 0 and offset >= 100") == 1
    assert count("offset between 90 and 99 and partition in (0, 1)") == 2
    assert count("(partition = 0 and offset < 50) or (partition = 1 and offset = 50)") == 2
    when = f"timestamp_millis({TIME_MS + 150})"
    assert count(f"timestamp >= {when} and partition < 2") == 1
    assert count(f"timestamp = {when}") == 1
    assert count("offset >= 200") == 0, "these are in the tail"
    assert count("partition = 1 or offset % 2 = 0") == every


def test_where_meets_the_other_options(spark: "SparkSession", history: History) -> None:
    options = {"endingOffsets": '{"events":{"0":150,"1":150,"2":1}}', "includeHeaders": "true"}
    rows = read(spark, history, "offset >= 140 and partition = 0", **options)
    assert records_of(rows) == [
        r for r in history.of("events") if r.partition == 0 and 140 <= r.offset < 150
    ]
    tail = read(spark, history, "offset >= 295")
    assert records_of(tail) == without_headers([r for r in history.of("events") if r.offset >= 295])


@pytest.mark.parametrize("where", ["offset >>> ", "delay > 10", "offset"])
def test_a_wrong_text_is_named_in_one_line(
    spark: "SparkSession", history: History, where: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^where: '.*': \S") as error:
        read(spark, history, where)
    assert "\n" not in str(error.value)
