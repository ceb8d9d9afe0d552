"""The event ids of a topic's followers: each vector that is sent is parsed, and no other text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.service.formats import events
from tidelog.storage.core.model import OFFSET_MAX

OFFSETS = st.lists(st.integers(0, OFFSET_MAX), min_size=1, max_size=events.VECTOR_PARTITIONS_MAX)


def parsed(event_id: bytes) -> dict[int, int] | None:
    return events.parse_vector(event_id.decode("latin-1"))


@given(offsets=OFFSETS)
def test_vector_that_is_sent_is_parsed(offsets: Sequence[int]) -> None:
    assert parsed(events.vector(offsets)) == dict(enumerate(offsets))


def test_longest_vector_is_parsed() -> None:
    offsets = [OFFSET_MAX] * events.VECTOR_PARTITIONS_MAX
    assert parsed(events.vector(offsets)) == dict(enumerate(offsets))


@given(offsets=OFFSETS, data=st.data())
def test_vector_of_each_event_is_position_after_it(offsets: list[int], data: st.DataObject) -> None:
    partition = data.draw(st.integers(0, len(offsets) - 1))
    numbers = data.draw(st.lists(st.integers(0, OFFSET_MAX - 1), min_size=1, max_size=5))
    body = b"".join(b'id: %d\ndata: {"offset":%d}\n\n' % (n, n) for n in numbers)
    sent = b"".join(events.with_vectors(body, events.pairs(offsets), partition)).split(b"\n\n")
    assert sent.pop() == b""
    for number, event in zip(numbers, sent, strict=True):
        event_id, _, record = event.partition(b"\n")
        assert record == b'data: {"offset":%d}' % number
        after = [*offsets[:partition], number + 1, *offsets[partition + 1 :]]
        assert event_id == b"id: " + events.vector(after)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "0", "0:", ":0", "0:1,", "0:1,0:1", "0:-2", "0:+1", "0: 1", "0:1 ", "0:1\n"),
        *("1000:1", "0:\u0661"),
        f"0:{OFFSET_MAX}",
        "0:1" + "," * events.VECTOR_CHARS_MAX,
        ",".join(f"{number}:{10**18}" for number in range(300)),
    ],
)
def test_another_text_is_no_vector(text: str) -> None:
    assert events.parse_vector(text) is None
