"""Every target of tests/tools/fuzz on mutations of valid bytes, and on all that ever broke one."""

import logging
import random
import time
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.tools.fuzz import http_target, kafka_frames_target
from tests.tools.fuzz.mutations import mutated
from tests.tools.fuzz.run import CRASHES, STEERING, target_of
from tests.tools.fuzz.targets import TARGETS

INPUT_CPU_S_MAX = 5.0
"""CPU time for one input, a hundred times what the slowest takes. A wait without an end fails by
pytest's timeout."""
KEPT = sorted(path for path in CRASHES.iterdir() if path.suffix != ".md")


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    http_target.close()
    kafka_frames_target.close()


@cache
def _seeds(name: str) -> list[bytes]:
    return TARGETS[name].seeds()


def test_make_fuzz_can_run_each_target() -> None:
    assert {target.check.__module__ for target in TARGETS.values()} == set(STEERING)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bytes_hold(name: str) -> None:
    assert _seeds(name)
    for seed in _seeds(name):
        TARGETS[name].check(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_valid_is_refused_or_holds(name: str) -> None:
    target = TARGETS[name]

    @examples(target.examples)
    @given(st.integers(0, 2**64 - 1))
    def check(seed: int) -> None:
        data = mutated(_seeds(name), random.Random(seed))
        started = time.process_time()
        try:
            target.check(data)
        except BaseException as error:
            error.add_note(f"target {name}, input {data!r}")
            raise
        assert time.process_time() - started < INPUT_CPU_S_MAX, data

    check()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_what_once_broke_it_holds(path) -> None:
    target_of(path).check(path.read_bytes())
