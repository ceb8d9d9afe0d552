"""A change of configs has a size. A flush never makes an entry that is too large to read, and
the state keeps no more of a value than it says."""

import asyncio

import pytest

from tests.support.logs import append, kill, opened, read_values
from tidelog.storage.core.errors import InvalidConfig, LogError
from tidelog.storage.store.memory import MemoryStore

HEADER_BYTES_MAX = 64 * 1024
"""Of an entry here, instead of 64 MiB: all sizes of these tests are a thousandth."""
TOPICS = 17


def policy_of(size: int) -> dict[str, str | None]:
    """A valid value of so many bytes, which says no more than `delete`."""
    return {"cleanup.policy": "delete" + ",delete" * (size // len(",delete"))}


async def test_large_changes_of_configs_in_one_flush_do_not_end_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidelog.storage.codec.entry.HEADER_BYTES_MAX", HEADER_BYTES_MAX)

    log = await opened(MemoryStore())
    watch = asyncio.create_task(log.run_until_failed())
    names = [f"t{number}" for number in range(TOPICS)]
    try:
        for name in names:
            await log.create_topic(name, 1, {})
        policy = policy_of(4 * 1024)
        work = [log.alter_topic(name, policy) for name in names]
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        assert not watch.done(), "a task of the broker has ended"
        assert all(outcome is None or isinstance(outcome, InvalidConfig) for outcome in outcomes), (
            outcomes
        )
        await append(log, "after", topic="t0")
        assert await read_values(log, topic="t0") == ["after"]
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await kill(log)


@pytest.mark.parametrize("way", ["create", "alter"])
async def test_the_state_keeps_no_more_of_a_config_than_it_says(way: str) -> None:
    log = await opened(MemoryStore())
    try:
        policy = policy_of(100_000)
        try:
            if way == "create":
                await log.create_topic("t", 1, dict(policy))
            else:
                await log.create_topic("t", 1, {})
                await log.alter_topic("t", policy)
        except LogError:
            pass  # to refuse it is as good
        assert len(log.state.encode()) < 1000
    finally:
        await kill(log)
