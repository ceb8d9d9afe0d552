"""A start waits for its store: each step is repeated within a budget, a refusal three times."""

import asyncio
import logging

import pytest

from tests.contract.test_probe import EndsRangesOneLate, NeverCreates, Overwrites
from tests.support.faults import Call, Fault, FaultyStore, Plan, Seeded
from tests.support.logs import MANUAL, append, closing, made, read_values, store_of, with_topic
from tests.support.vloop import run
from tidelog.storage.core.errors import Corrupt, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.core.log_settings import START_RETRY_S
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.probe import probe
from tidelog.storage.store.start_retry import (
    PAUSE_S,
    PAUSE_S_MAX,
    REFUSALS_MAX,
    StartRetry,
)

SEEDS = 40


class Step:
    """Raises these errors in turn, the last one always; None succeeds."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.at_s: list[float] = []

    async def __call__(self) -> str:
        self.at_s.append(asyncio.get_running_loop().time())
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error
        return "done"


def tried(step: Step, budget_s: float = START_RETRY_S) -> str:
    return run(lambda: StartRetry(SystemClock(), budget_s).until_done(step))


def test_a_step_is_repeated_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert tried(Step(*[Unavailable("dark")] * 7, None)) == "done"
    assert "dark; trying again for 60 s" in caplog.text


def test_a_store_that_stays_away_ends_the_start_when_the_budget_is_spent() -> None:
    step = Step(Unavailable("dark"))
    with pytest.raises(Unavailable, match="dark"):
        tried(step)
    assert START_RETRY_S <= step.at_s[-1] <= START_RETRY_S + PAUSE_S_MAX
    pauses = [b - a for a, b in zip(step.at_s, step.at_s[1:], strict=False)]
    assert max(pauses) <= PAUSE_S_MAX
    assert len(set(pauses[5:])) > len(pauses) // 2, "each pause is drawn"


def test_without_a_budget_a_store_is_asked_once() -> None:
    step = Step(Unavailable("dark"))
    with pytest.raises(Unavailable):
        tried(step, 0.0)
    assert len(step.at_s) == 1


@pytest.mark.parametrize("budget_s", [0.0, START_RETRY_S])
def test_a_refusal_that_repeats_is_definite_within_a_second(budget_s: float) -> None:
    step = Step(StoreRefused("AccessDenied"))
    with pytest.raises(StoreUnfit, match=r"^AccessDenied$"):
        tried(step, budget_s)
    assert len(step.at_s) == REFUSALS_MAX
    assert step.at_s[-1] <= PAUSE_S * (1 + 2)


@pytest.mark.parametrize("error", [StoreUnfit("no bucket"), Corrupt("cluster.json", "is damaged")])
def test_any_other_error_ends_the_start_at_once(error: Exception) -> None:
    step = Step(error)
    with pytest.raises(type(error)):
        tried(step)
    assert step.at_s == [0.0]


# -- the probe


CREATES = (Fault.ABSENT, Fault.STORED, Fault.LATE, Fault.OWN_412)


@pytest.mark.parametrize("rate", [0.05, 0.3])
async def test_a_probe_judges_a_store_that_loses_requests_and_answers_as_fit(rate: float) -> None:
    for seed in range(SEEDS):
        store = FaultyStore(MemoryStore(), Seeded(seed, rate, creates=CREATES))
        await probe(store, SystemClock())


@pytest.mark.parametrize("kind", [Overwrites, NeverCreates, EndsRangesOneLate])
async def test_probe_refuses_unfit_store_that_also_fails(kind: type[MemoryStore]) -> None:
    for seed in range(SEEDS):
        store = FaultyStore(kind(), Seeded(seed, 0.1, creates=CREATES))
        with pytest.raises(StoreUnfit):
            await probe(store, SystemClock())


# -- the whole start


def nth(number: int) -> Plan:
    """A plan in which one call fails: a create is refused, another call has no answer."""
    call_count = 0

    def plan(call: Call) -> Fault | None:
        nonlocal call_count
        call_count += 1
        if call_count != number:
            return None
        return Fault.REFUSED if call.verb == "create" else Fault.UNAVAILABLE

    return plan


@pytest.mark.parametrize("is_new", [True, False])
async def test_each_call_of_a_start_may_fail_once(inner: MemoryStore, is_new: bool) -> None:
    log = await with_topic(inner)
    await log._log.wal.checkpoint()
    await append(log, "a")
    await log.close()
    number = calls = 0
    while number <= calls:
        unopened = made(MemoryStore() if is_new else inner)
        store_of(unopened).plan = nth(number)
        async with closing(await unopened.open("c0ffee")) as log:
            assert len(await log.cluster.secret()) == 32
        calls = len(store_of(unopened).answered)
        number += 1
    assert calls >= 4


async def test_a_dark_store_does_not_stop_a_start_of_the_next_minute(inner: MemoryStore) -> None:
    log = await with_topic(inner)
    await append(log, "kept")
    await log.close()
    unopened = made(inner)
    loop = asyncio.get_running_loop()
    light_s = loop.time() + START_RETRY_S - 5.0

    def dark(call: Call) -> Fault | None:
        if loop.time() >= light_s:
            return None
        return Fault.ABSENT if call.verb == "create" else Fault.UNAVAILABLE

    store_of(unopened).plan = dark
    async with closing(await unopened.open("c0ffee")) as again:
        assert await read_values(again) == ["kept"]
    assert loop.time() < light_s + PAUSE_S_MAX + 1.0


async def test_a_start_without_retries_asks_once() -> None:
    unopened = made(MemoryStore(), MANUAL._replace(start_retry_s=0.0))
    store_of(unopened).plan = lambda _: Fault.UNAVAILABLE
    with pytest.raises(Unavailable):
        await unopened.open()
    assert asyncio.get_running_loop().time() < 1.0


# -- one failed call of a probe


PROBE_CREATES = 9
"""Conditional PUTs of a probe."""
LOSSY_SEEDS = 60


def nth_of(verb: str, number: int, fault: Fault) -> Plan:
    """A plan in which so many calls of a verb are served, and the next one fails."""
    call_count = 0

    def plan(call: Call) -> Fault | None:
        nonlocal call_count
        call_count += call.verb == verb
        return fault if call.verb == verb and call_count == number + 1 else None

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
    ("create", 0, Fault.REFUSED),
    ("create", PROBE_CREATES - 1, Fault.ABSENT),
    ("get", 0, Fault.UNAVAILABLE),
    ("get_range", 0, Fault.UNAVAILABLE),
    ("list", 0, Fault.UNAVAILABLE),
    ("delete", 0, Fault.UNAVAILABLE),
]


@pytest.mark.parametrize(("verb", "number", "fault"), ONCE)
def test_a_call_that_fails_once_is_tried_again(verb: str, number: int, fault: Fault) -> None:
    probed(nth_of(verb, number, fault))


def test_a_store_with_few_lost_answers_is_fit() -> None:
    failed = []
    for seed in range(LOSSY_SEEDS):
        drawn = Seeded(seed, 0.05, creates=(Fault.ABSENT, Fault.STORED))
        try:
            probed(lambda call, drawn=drawn: drawn(call) if call.verb == "create" else None)
        except Unavailable:
            failed.append(seed)
    assert failed == []
