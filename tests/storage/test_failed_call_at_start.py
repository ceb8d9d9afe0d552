"""The store fails once while a broker starts. The broker tries that call again."""

import pytest

from tests.support.faults import Call, Fault, FaultyStore, Plan, Seeded
from tests.support.vloop import run
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.probe import probe

CREATES = 9
"""Conditional PUTs of a probe."""
SEEDS = 60


def nth(verb: str, number: int, fault: Fault) -> Plan:
    """A plan in which so many calls of a verb are served, and the next one fails."""
    seen = 0

    def plan(call: Call) -> Fault | None:
        nonlocal seen
        seen += call.verb == verb
        return fault if call.verb == verb and seen == number + 1 else None

    return plan


def probed(plan: Plan) -> None:
    async def main() -> None:
        store = FaultyStore(MemoryStore(), plan)
        await probe(store, SystemClock())
        assert [info.key async for info in store.inner.list("")] == []

    run(main)


def test_a_store_that_does_not_fail_is_fit() -> None:
    probed(lambda _: None)


ONCE = [
    ("create", 0, Fault.ABSENT),
    ("create", 0, Fault.STORED),
    ("create", CREATES - 1, Fault.ABSENT),
    ("get", 0, Fault.UNAVAILABLE),
    ("get_range", 0, Fault.UNAVAILABLE),
    ("list", 0, Fault.UNAVAILABLE),
    ("delete", 0, Fault.UNAVAILABLE),
]


@pytest.mark.parametrize(("verb", "number", "fault"), ONCE)
def test_a_call_that_fails_once_is_tried_again(verb: str, number: int, fault: Fault) -> None:
    probed(nth(verb, number, fault))


def test_a_put_that_is_refused_once_is_tried_again() -> None:
    probed(nth("create", 0, Fault.REFUSED))


def test_a_store_with_few_lost_answers_is_fit() -> None:
    failed = []
    for seed in range(SEEDS):
        drawn = Seeded(seed, 0.05, creates=(Fault.ABSENT, Fault.STORED))
        try:
            probed(lambda call, drawn=drawn: drawn(call) if call.verb == "create" else None)
        except Unavailable:
            failed.append(seed)
    assert failed == []
