"""Large JSON texts in blocks: what is in a string, and how many objects a text has."""

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tidelog.service.formats import json_in, json_numbers, json_scan
from tidelog.service.formats.json_in import check_utf8
from tidelog.service.formats.json_numbers import check_numbers
from tidelog.service.formats.json_scan import FEW_BYTES, FEW_OBJECTS, block_of, excess_objects

MIB = 1 << 20
STRINGS = ('"', "\\", '\\"', '"\\', "{}[],", "a", "1e999", "", "\\\\\\", "é")


def nested(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(4 if depth else 2)
    if kind == 0:
        return draw.choice([1, -2.5e7, True, False, None, 1e100])
    if kind == 1:
        return "".join(draw.choices(STRINGS, k=draw.randrange(8)))
    items = [nested(draw, depth - 1) for _ in range(draw.randrange(5))]
    return items if kind == 2 else {f"{n}{draw.choice(STRINGS)}": v for n, v in enumerate(items)}


def objects_at(value: Any, depth: int) -> int:
    """Count the objects as a parser sees them."""
    if not isinstance(value, dict | list):
        return 0
    if depth == 0:
        return int(isinstance(value, dict))
    items = value.values() if isinstance(value, dict) else value
    return sum(objects_at(item, depth - 1) for item in items)


@pytest.mark.parametrize("block", [3, 7, 64, json_scan.BLOCK])
def test_objects_are_counted_as_by_parser(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "BLOCK", block)
    monkeypatch.setattr(json_scan, "FEW_OBJECTS", 0)
    monkeypatch.setattr(json_scan, "FEW_BYTES", 0)
    draw = random.Random(block)
    for _ in range(300):
        value = nested(draw, 5)
        for depth in range(5):
            assert excess_objects(orjson.dumps(value), depth, 0) == objects_at(value, depth)


def test_few_objects_are_not_counted() -> None:
    filled = b'["' + b" " * FEW_BYTES + b'"'
    records = filled + b",{}" * FEW_OBJECTS
    assert excess_objects(records + b"]", 1, 10) == 0
    assert excess_objects(records + b",{}]", 1, 10) == FEW_OBJECTS + 1
    assert excess_objects(records + b',[{}],"{"]', 1, FEW_OBJECTS) == 0
    assert excess_objects(b"[%b{}]" % (b"{}," * FEW_OBJECTS), 1, 10) == 0


@pytest.mark.parametrize("block", [2, 3, 5, 64])
def test_block_has_bytes_outside_of_strings(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "BLOCK", block)
    draw = random.Random(block)
    for _ in range(300):
        strings = ["".join(draw.choices(STRINGS, k=draw.randrange(8))) for _ in range(3)]
        text = b"1,%b, 2 ,%b,3,%b" % tuple(map(orjson.dumps, strings))
        position, is_inside, outside = 0, False, b""
        while position < len(text):
            piece, end, is_inside = block_of(text, position, is_inside)
            assert position < end <= position + block
            position, outside = end, outside + piece.tobytes()
        assert not is_inside
        assert outside.replace(b"\0", b"") == b'1,", 2 ,",3,"'


RUNS = {
    "backslashes": b'["1e999%b"]' % (b"\\" * (8 * MIB)),
    "backslashes and a number": b'["%b",1e308]' % (b"\\" * (8 * MIB)),
    "digits": b"[1e308,0.%b]" % (b"7" * (8 * MIB)),
    "zeros": b"[1e308,0.%b1]" % (b"0" * (8 * MIB)),
    "digits of an exponent": b"[1e308,1e%b1]" % (b"0" * (8 * MIB)),
    "exponents in a string": b'["%b"]' % (b"1e00" * (2 * MIB)),
    "large numbers": b"[%b]" % b",".join([b"1e100"] * (8 * MIB // 6)),
    "long numbers": b"[%b]" % b",".join([b"1" * 305] * (8 * MIB // 306)),
    "quotes": b"[1e308,%b]" % b",".join([b'""'] * (8 * MIB // 3)),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_text_needs_step_of_more_than_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step searches one block.

    Arrow parses a long number at once, but without the interpreter's lock. No step makes an object
    for a place in the text.
    """
    sizes: list[int] = []
    searched = json_numbers._may_block_overflow

    def counted(text: bytes) -> bool:
        sizes.append(len(text))
        return searched(text)

    monkeypatch.setattr(json_numbers, "_may_block_overflow", counted)
    parsed: list[int] = []
    has_infinite = json_numbers._has_infinite

    def counted_numbers(text: Any, edges: Any) -> bool:
        parsed.append(len(edges))
        return has_infinite(text, edges)

    monkeypatch.setattr(json_numbers, "_has_infinite", counted_numbers)
    tracemalloc.start()
    try:
        check_numbers(RUNS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(sizes) <= json_numbers.BLOCK + json_numbers.OVERLAP
    assert max(parsed, default=0) <= json_scan.BLOCK
    assert peak < 12 * MIB


def test_long_number_is_judged_across_blocks() -> None:
    zeros = b"0" * (2 * json_scan.BLOCK)
    for number, is_large in (
        (b"0." + zeros + b"1e%d" % (len(zeros) + 308), False),
        (b"0." + zeros + b"1e%d" % (len(zeros) + 310), True),
        (b"1" + zeros + b"e-%d" % len(zeros), False),
        (b"1" + zeros, True),
        (b"1e" + zeros + b"308", False),
        (b"1e" + zeros + b"309", True),
        (b"0e" + b"9" * len(zeros), False),
    ):
        for text in (number, b'{"a":[1e100,"\\"",' + number + b"]}"):
            if is_large:
                with pytest.raises(json_numbers.NumberTooLarge):
                    check_numbers(text)
            else:
                check_numbers(text)


def why_not_utf8(decode: Callable[[bytes], object], text: bytes) -> str:
    try:
        decode(text)
    except UnicodeDecodeError as error:
        return str(error)
    return ""


def test_utf8_is_checked_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_in, "UTF8_BYTES", 5)
    draw = random.Random(1)
    pieces = [char.encode() for char in "aé€😀"] + [b"\xff", b"\x80", b"\xed\xa0\x80"]
    for _ in range(2000):
        weights = [9, 9, 9, 9, *[draw.random() < 0.2] * 3]
        text = b"".join(draw.choices(pieces, weights, k=12))
        assert why_not_utf8(check_utf8, text) == why_not_utf8(bytes.decode, text)
