"""Numbers beyond a double are found wherever JSON has numbers, and nowhere else."""

import uuid

import orjson
import pytest

from tidelog.service.formats.json_numbers import NumberTooLarge, check_numbers

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


@pytest.mark.parametrize("before", BEFORE, ids=["small", "large", "hexadecimal"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12].decode())
def test_exactly_what_orjson_refuses_is_refused(before: bytes, number: bytes) -> None:
    text = b"[" + before + number + b"]"
    try:
        orjson.loads(text)
        is_read = True
    except orjson.JSONDecodeError:
        is_read = False
    assert is_refused(text) is not is_read


@pytest.mark.parametrize("at", range(2040, 2060))
def test_a_number_is_found_at_each_length(at: int) -> None:
    for number in (b"1e999", b"9" * 310):
        start = b'["' + b"x" * (at - 10 - len(number)) + b'",'
        assert is_refused(start + number + b"]")
