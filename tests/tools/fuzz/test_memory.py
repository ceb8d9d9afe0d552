"""I10: what one body may make a broker take, however it is made (tests/tools/fuzz/bombs.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tools.fuzz.bombs import BODY_BYTES, BOMBS, MIB
from tidelog.service.formats.json_scan import FEW_OBJECTS

OBJECT_BYTES_MAX = 200
BATCHES = int(os.environ.get("TIDELOG_MUTATIONS", "20000"))
GROWTH_MIB_MAX = 64
ARROW_MIB_MAX = 4 * BODY_BYTES // MIB
MIB_MAX = 4 * BODY_BYTES // MIB + FEW_OBJECTS * OBJECT_BYTES_MAX // MIB


def test_no_body_takes_more_than_its_bound() -> None:
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-m", "tests.tools.fuzz.bombs"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    took = {bomb["name"]: bomb for bomb in map(json.loads, process.stdout.splitlines())}
    assert took.keys() == BOMBS.keys()
    for name, bomb in took.items():
        assert bomb["mib"] <= MIB_MAX, bomb
        if name.startswith("arrow"):
            assert bomb["mib"] <= ARROW_MIB_MAX, bomb
            assert bomb["said"].startswith(("RecordTooLarge", "UnpackedTooLarge")), bomb


def test_the_memory_of_changed_batches_is_given_back() -> None:
    """Also while the outcomes are kept. One batch in 200 unpacks to megabytes."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.tools.fuzz.batches_memory", str(BATCHES)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    early, late = map(int, process.stdout.split())
    assert late - early <= GROWTH_MIB_MAX
