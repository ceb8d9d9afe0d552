"""An Arrow body of 392 bytes ended a broker.

A null slot of a view column may hold any sixteen bytes. Arrow does not validate them, and its cast
reads them: a negative length there is a segmentation fault. The bodies are decoded in a child
process, so that a crash is a failed assertion here.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.service.conftest import arrow

ROOT = Path(__file__).parents[2]
ROWS = 2
DATA = b"a value of more than twelve bytes"
VALUES = pa.array([b"v"] * ROWS)

SLOTS = {
    "length -1": struct.pack("<iiii", -1, 0, 0, 0),
    "length of the least integer": struct.pack("<iiii", -(2**31), 0, 0, 0),
    "length beyond the buffer": struct.pack("<iiii", len(DATA), 0, 0, 1),
    "length of the greatest integer": struct.pack("<iiii", 2**31 - 1, 0, 0, 0),
    "a buffer that is not there": struct.pack("<iiii", 13, 0, 1, 0),
    "a negative buffer": struct.pack("<iiii", 13, 0, -1, 0),
    "a negative start": struct.pack("<iiii", 13, 0, 0, -1),
}
"""Views behind a null. None of them lies in the one buffer of data that the column has."""

HARMLESS = {
    "zeros": bytes(16),
    "short": struct.pack("<i12s", 12, b"left behind"),
    "long": struct.pack("<iiii", 13, 0, 0, len(DATA) - 13),
}

CHILD = """
import json, sys
from tidelog.service.formats.arrow import decode_arrow
from tidelog.storage.core.errors import InvalidRequest
for line in sys.stdin:
    name, body = json.loads(line)
    try:
        said = decode_arrow(bytes.fromhex(body), 1, bytes_max=1 << 20).rows.to_pylist()
    except InvalidRequest as error:
        said = f"{error.status} {error}"
    print(json.dumps([name, str(said)]), flush=True)
"""
"""Decode each body and print its result, before the next body is tried."""


def views(kind: pa.DataType, slot: bytes) -> Any:
    """A value, and a null with these sixteen bytes behind it."""
    slots = struct.pack("<i12s", 1, b"a") + slot
    buffers = [pa.py_buffer(b"\x01".ljust(64, b"\0")), pa.py_buffer(slots), pa.py_buffer(DATA)]
    return pa.Array.from_buffers(kind, ROWS, buffers)


def headers(column: Any) -> Any:
    pairs = pa.StructArray.from_arrays([pa.array(["k"] * ROWS), column], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array([0, ROWS, ROWS], pa.int32()), pairs)


def headers_behind_a_null(column: Any) -> Any:
    """The list of the headers is null itself, and its elements are there all the same."""
    pairs = pa.StructArray.from_arrays([pa.array(["k"] * ROWS), column], ["key", "value"])
    nothing = pa.array([False, True])
    return pa.ListArray.from_arrays(pa.array([0, 0, ROWS], pa.int32()), pairs, mask=nothing)


def words(column: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int8()), column)


WAYS: dict[str, Callable[[Any], bytes]] = {
    "value": lambda column: arrow(value=column),
    "key": lambda column: arrow(value=VALUES, key=column),
    "value of a header": lambda column: arrow(value=VALUES, headers=headers(column)),
    "header behind a null": lambda column: arrow(
        value=VALUES, headers=headers_behind_a_null(column)
    ),
    "words of a dictionary": lambda column: arrow(value=words(column)),
    "words of a header's dictionary": lambda column: arrow(
        value=VALUES, headers=headers(words(column))
    ),
}


def outcomes(bodies: dict[str, bytes]) -> dict[str, str]:
    """By name, the result of each body in a child process. A crash ends the list."""
    lines = "".join(json.dumps([name, body.hex()]) + "\n" for name, body in bodies.items())
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(
        command, input=lines, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    results = dict(json.loads(line) for line in child.stdout.splitlines())
    assert child.returncode == 0, f"exit {child.returncode} after {list(results)}: {child.stderr}"
    return results


@pytest.mark.parametrize("kind", [pa.binary_view(), pa.string_view()], ids=str)
def test_no_view_behind_null_ends_process(kind: pa.DataType) -> None:
    bodies = {
        f"{way}, {slot}": make(views(kind, content))
        for way, make in WAYS.items()
        for slot, content in SLOTS.items()
    }
    results = outcomes(bodies)
    assert results.keys() == bodies.keys()
    assert {said[:3] for said in results.values()} == {"422"}, results


@pytest.mark.parametrize("kind", [pa.binary_view(), pa.string_view()], ids=str)
def test_views_that_lie_in_column_are_taken_and_hidden(kind: pa.DataType) -> None:
    bodies = {name: arrow(value=views(kind, slot)) for name, slot in HARMLESS.items()}
    for said in outcomes(bodies).values():
        assert "'value': b'a'" in said
        assert "'value': None" in said


def test_column_that_is_ignored_is_of_known_type_too() -> None:
    kinds = {
        "views": views(pa.binary_view(), SLOTS["length -1"]),
        "text": pa.array(["0", "1"]),
        "lists of views": pa.array([[1], None], pa.list_view(pa.int32())),
        "a map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
    }
    bodies = {name: arrow(value=VALUES, offset=column) for name, column in kinds.items()}
    results = outcomes(bodies)
    assert results.keys() == bodies.keys()
    assert all(said.startswith("422 column 'offset' is ") for said in results.values()), results
