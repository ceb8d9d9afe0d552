"""Numbers beyond a double are found wherever JSON has numbers, and nowhere else."""

import random
import uuid
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.service.formats import json_numbers, json_scan
from tidelog.service.formats.json_numbers import (
    SMALL,
    NumberTooLarge,
    check_numbers,
)

NUMBERS = [
    *(b"1e999", b"-1e999999", b"1E+0400", b"1.8e308", b"1.7976931348623157e308", b"0e999"),
    *(b"9" * 5000, b"9" * 400, b"1" * 250 + b"e99", b"1" * 300 + b"e9", b"0." + b"1" * 5000),
    *(b"[1e400]", b'{"a":1e400}', b'"1e999 "', b'" 1e999 "', b'"%s"' % (b"9" * 500), b"1e-999"),
    *(b"1e308", b"12345678901234567890", b'"%s"' % str(uuid.UUID(int=0x3E812 << 100)).encode()),
]
BEFORE = [b"", b'{"x":"' + b"y1e2" * 1000 + b'"},', b'"' + b"3e8123e812" * 500 + b'",']


def is_refused(text: bytes) -> bool:
    try:
        check_numbers(text)
    except NumberTooLarge:
        return True
    return False


def is_read(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


@pytest.mark.parametrize("before", BEFORE, ids=["small", "large", "hexadecimal"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12].decode())
def test_exactly_what_orjson_refuses_is_refused(before: bytes, number: bytes) -> None:
    text = b"[" + before + number + b"]"
    assert is_refused(text) is not is_read(text)


@pytest.mark.parametrize("position", range(2040, 2060))
def test_number_is_found_at_each_length(position: int) -> None:
    for number in (b"1e999", b"9" * 310):
        start = b'["' + b"x" * (position - 10 - len(number)) + b'",'
        assert is_refused(start + number + b"]")


digits = st.text("0123456789", min_size=1, max_size=30)
exponents = st.sampled_from(["", "e99", "e100", "E308", "e+309", "e-400", "e+12", "e0310", "E+007"])
numbers = st.builds(
    lambda whole, part, exponent, times: f"{'1' * times}{int(whole)}.{part}{exponent}",
    digits,
    digits,
    exponents,
    st.sampled_from([0, 0, 0, 150, 250, 310]),
)
strings = st.one_of(
    numbers.map(lambda number: f'"{number}"'),
    numbers.map(lambda number: f'" {number} "'),
    st.uuids().map(lambda drawn: f'"{drawn}"'),
)
texts = st.lists(numbers | strings, max_size=12).map(lambda each: f"[{', '.join(each)}]".encode())


@examples(300)
@given(texts, st.booleans())
def test_any_text_is_refused_as_orjson_refuses_it(text: bytes, is_long: bool) -> None:
    if is_long:
        text = text[:-1] + b" " * SMALL + b"]"
    assert is_refused(text) is not is_read(text)


@examples(100)
@given(st.lists(texts, min_size=1, max_size=5))
def test_several_texts_are_checked_as_each_of_them(several: list[bytes]) -> None:
    try:
        check_numbers(b"\n".join(several))
    except NumberTooLarge:
        assert not all(map(is_read, several))
    else:
        assert all(map(is_read, several))


@pytest.mark.parametrize("kind", ["floats", "integers", "hexadecimal", "base64"])
def test_usual_values_need_no_parser(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_numbers, "_has_infinite")
    draws = random.Random(1)
    value: Any = {
        "floats": [draws.random() * 1e-5 for _ in range(10_000)],
        "integers": [draws.randrange(10**18) for _ in range(10_000)],
        "hexadecimal": [f"{draws.getrandbits(128):032x}" for _ in range(5_000)],
        "base64": ["".join(draws.choices("0123456789eEABab+/", k=64)) for _ in range(5_000)],
    }[kind]
    for count in (20, len(value)):
        check_numbers(orjson.dumps(value[:count]))


def _token(draw: random.Random) -> bytes:
    digits = draw.randrange(1, 330)
    tokens = (
        b"1e%d" % draw.randrange(290, 330),
        b"9" * digits,
        b"0." + b"0" * digits + b"1e%d" % draw.randrange(200, 700),
        b"1" * digits + b".5E+%d" % draw.randrange(90, 310),
        b"-1e-%d" % digits,
        b'"1e999, %d"' % digits,
        rb'"a\"1e999,\\"',
        b"%d" % digits,
    )
    return draw.choice(tokens)


@pytest.mark.parametrize("block", [64, json_scan.BLOCK])
def test_large_texts_are_judged_as_by_parser(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "BLOCK", block)
    draw, too_large = random.Random(1), 0
    for _ in range(5000):
        text = b"[" + b",".join(_token(draw) for _ in range(draw.randrange(1, 5))) + b"]"
        assert is_refused(text) == (not is_read(text))
        too_large += is_refused(text)
    assert 1000 < too_large < 4000
