"""Searches for text, newest first, against the records as they were produced."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.broker_log import TIME_MS, BrokerLog
from tests.support.properties import examples
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read import search as searches
from tidelog.storage.read.log_snapshot import TopicSnapshot
from tidelog.storage.read.offline_log import open_snapshot
from tidelog.storage.read.search import Needle, Search
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.blocking_store import OpenedStore

RECORDS = 400


def value_of(partition: int, number: int) -> bytes | None:
    if number % 7 == 0:
        return None
    return b"needle %d-%d" % (partition, number) if number % 50 == 3 else b"hay %d" % number


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`t`: two partitions with a record a millisecond; the last 100 of each are a tail."""
    root = tmp_path_factory.mktemp("searched")
    with BrokerLog(root) as broker:
        broker.create("t", 2)
        for first in range(0, RECORDS, 100):
            numbers = range(first, first + 100)
            keys = [b"key-%d" % n if n % 2 else None for n in numbers]
            headers = [
                [("trace", b"id-%d" % n), ("none", None)] if n % 3 else None for n in numbers
            ]
            parts = {part: [value_of(part, n) for n in numbers] for part in (0, 1)}
            broker.append("t", parts, keys=keys, headers=headers)
            if first < RECORDS - 100:
                broker.seal("t")
    return root


@pytest.fixture(scope="module")
def opened_store(root: Path) -> Iterator[OpenedStore]:
    with OpenedStore(str(root)) as opened_store:
        yield opened_store


@pytest.fixture(scope="module")
def topic(opened_store: OpenedStore) -> TopicSnapshot:
    snapshot = opened_store.run(open_snapshot(opened_store.store, SystemClock(), ["t"]))
    return snapshot.topics["t"]


def found(opened_store: OpenedStore, topic: TopicSnapshot, search: Search) -> list[tuple[int, int]]:
    return [(match.partition, match.offset) for match in search.run(opened_store, topic)]


NEEDLES = [n for n in reversed(range(RECORDS)) if n % 50 == 3 and n % 7]


def test_records_are_found_newest_first(opened_store: OpenedStore, topic: TopicSnapshot) -> None:
    pairs = found(opened_store, topic, Search(Needle("needle"), 1000))
    assert [offset for _, offset in pairs] == [n for n in NEEDLES for _ in (0, 1)]
    assert sorted(pairs) == sorted((part, n) for n in NEEDLES for part in (0, 1))


def test_a_search_is_bounded(opened_store: OpenedStore, topic: TopicSnapshot) -> None:
    assert found(opened_store, topic, Search(Needle("needle 1"), 2)) == [
        (1, n) for n in NEEDLES[:2]
    ]
    since = Search(Needle("needle"), 9, since_ms=TIME_MS + NEEDLES[0], partitions=[0])
    assert found(opened_store, topic, since) == [(0, NEEDLES[0])]


def test_the_newest_are_found_without_a_read_of_the_rest(
    opened_store: OpenedStore, topic: TopicSnapshot
) -> None:
    rows: list[int] = []
    search = Search(Needle("key-399"), 2)
    assert len(list(search.run(opened_store, topic, rows.append))) == 2
    assert sum(rows) < RECORDS


@pytest.mark.parametrize(
    ("needle", "offsets"),
    [
        (Needle("key-1", parts=("key",)), [1, *range(11, 20, 2), *range(101, 200, 2)]),
        (Needle("^key-1$", is_regex=True), [1]),
        (Needle("key-1", parts=("value",)), []),
        (Needle("id-2", parts=("headers",)), [n for n in range(RECORDS) if f"id-{n}"[3] == "2"]),
        (Needle("none", parts=("headers",)), [*range(RECORDS)]),
        (Needle(r"id-(7|8)$", is_regex=True, parts=("headers",)), [7, 8]),
    ],
)
def test_each_part_of_a_record_is_searched(
    opened_store: OpenedStore, topic: TopicSnapshot, needle: Needle, offsets: list[int]
) -> None:
    pairs = found(opened_store, topic, Search(needle, 1000, partitions=[0]))
    if needle.parts == ("headers",):
        offsets = [n for n in offsets if n % 3]
    assert sorted(offset for _, offset in pairs) == offsets


def test_a_wrong_pattern_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pattern '\\('"):
        Needle("(", is_regex=True).check()


TEXTS = st.lists(st.one_of(st.none(), st.text("ab", max_size=6)), max_size=12)


@examples(200)
@given(items=TEXTS, text=st.text("ab", min_size=1, max_size=3), cut=st.integers(0, 3))
def test_the_search_in_a_column_equals_that_in_each_item(
    items: list[str | None], text: str, cut: int
) -> None:
    column = pa.array([item and item.encode() for item in items], pa.binary()).slice(cut)
    expected = [item is not None and text in item for item in items[cut:]]
    assert searches._with_text(column, text.encode()).tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_order_holds_for_times_that_jump(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed)
    with BrokerLog(tmp_path) as broker:
        broker.create("t", 2)
        for _ in range(4):
            for part in (0, 1):
                broker._stamps["t", part] = TIME_MS + numbers.randrange(1000)
                broker.append("t", {part: [b"x"] * 30})
            if numbers.random() < 0.6:
                broker.seal("t")
        records = broker.records("t")
    with OpenedStore(str(tmp_path)) as opened_store:
        snapshot = opened_store.run(open_snapshot(opened_store.store, SystemClock(), ["t"]))
        matches = list(Search(Needle("x"), 50).run(opened_store, snapshot.topics["t"]))
    stamps = sorted((record.timestamp_us for record in records), reverse=True)
    assert [match.timestamp_us for match in matches] == stamps[:50]
