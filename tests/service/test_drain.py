"""The drain of a broker: its steps in order, its early end, and the second signal.

In virtual time.
"""

import asyncio
import logging
from collections.abc import Callable

import pytest

from tests.support.vloop import run
from tidelog.service.server.drain import LOOK_S, QUIET_S, Drain

DRAIN_S = 5.0


class Stage:
    """A broker and its listeners, as a drain uses them. `calls` has the calls, with their times."""

    def __init__(self, hand_over_s: float = 0.1, has_kafka: bool = False) -> None:
        self.calls: list[tuple[str, float]] = []
        self.connections = self.requests = 0
        self.is_drained = not has_kafka
        self.kafka = KafkaStage(self) if has_kafka else None
        self._hand_over_s = hand_over_s

    def note(self, what: str) -> None:
        self.calls.append((what, round(asyncio.get_running_loop().time(), 2)))

    @property
    def words(self) -> list[str]:
        return [what for what, _ in self.calls]

    @property
    def activity(self) -> tuple[int, int]:
        return self.connections, self.requests

    async def hand_over(self) -> None:
        self.note("hand over")
        await asyncio.sleep(self._hand_over_s)
        self.note("handed over")

    def drain(self) -> None:
        self.note("drain")

    def begin_drain(self) -> None:
        self.note("close each connection")

    def stop(self) -> None:
        self.note("stop")


class KafkaStage:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def is_drained(self) -> bool:
        return self._stage.is_drained

    def begin_drain(self) -> None:
        self._stage.note("send Kafka clients away")


def drained(
    stage: Stage,
    then: Callable[[Drain], None] = lambda _: None,
    drain_s: float = DRAIN_S,
    repeat_s: float = 0.0,
) -> float:
    """Drain, call `then` after a second, and return the time of the end."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        drain = Drain(stage, stage, stage.kafka, drain_s, loop.time, repeat_s)
        drain.on_signal()
        loop.call_later(1.0, then, drain)
        while "stop" not in stage.words:  # noqa: ASYNC110 - virtual time: polling is free
            await asyncio.sleep(LOOK_S / 2)
        end_s = loop.time()
        await drain.close()
        assert stage.words.count("stop") == 1
        return end_s

    return run(main)


def test_roles_are_handed_over_before_kafka_clients_are_sent_away() -> None:
    stage = Stage(has_kafka=True)
    stage.is_drained = True
    drained(stage)
    assert stage.words == [
        *("close each connection", "hand over", "handed over", "send Kafka clients away", "drain"),
        "stop",
    ]


def test_broker_with_clients_serves_them_for_whole_time() -> None:
    stage = Stage()
    stage.connections = 1
    assert drained(stage) == pytest.approx(DRAIN_S, abs=2 * LOOK_S)
    assert stage.calls[0][1] == 0.0, "each answer closes its connection from the signal on"


def test_log_says_how_long_broker_waits_for_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        drained(Stage())
    (line,) = caplog.messages
    assert line.startswith("stopping: clients have up to 5 s to disconnect; a second signal ")


def test_requests_on_new_connections_prolong_drain() -> None:
    stage = Stage()

    async def asking() -> None:
        for _ in range(20):
            await asyncio.sleep(QUIET_S / 2)
            stage.requests += 1

    async def main() -> float:
        loop = asyncio.get_running_loop()
        asking_task = asyncio.create_task(asking())
        drain = Drain(stage, stage, None, DRAIN_S, loop.time)
        drain.on_signal()
        await asking_task
        assert "stop" not in stage.words
        while "stop" not in stage.words:  # noqa: ASYNC110 - virtual time: polling is free
            await asyncio.sleep(LOOK_S)
        return loop.time()

    assert run(main) == pytest.approx(11 * QUIET_S, abs=3 * LOOK_S)


@pytest.mark.parametrize(
    ("connections", "then", "more", "end_s"),
    [
        (0, lambda _: None, {}, 0.1 + QUIET_S),
        (1, Drain.on_signal, {}, 1.0),
        (1, Drain.on_signal, {"repeat_s": 1.5}, DRAIN_S),
        (1, lambda _: None, {"drain_s": 0.0}, 0.1),
    ],
    ids=["no clients", "a second signal", "two signals of a worker", "no time"],
)
def test_drain_ends_in_time(
    connections: int, then: Callable[[Drain], None], more: dict[str, float], end_s: float
) -> None:
    stage = Stage()
    stage.connections = connections
    tolerance_s = (2 if connections else 3) * LOOK_S
    assert drained(stage, then, **more) == pytest.approx(end_s, abs=tolerance_s)
    assert "handed over" in stage.words


def test_kafka_clients_prolong_drain_until_they_have_left() -> None:
    stage = Stage(has_kafka=True)
    end_s = drained(stage, lambda _: setattr(stage, "is_drained", True))
    assert end_s == pytest.approx(1.0 + QUIET_S, abs=3 * LOOK_S)


def test_second_signal_ends_also_handover() -> None:
    stage = Stage(hand_over_s=4.0)
    assert drained(stage, Drain.on_signal) == pytest.approx(1.0, abs=2 * LOOK_S)
    assert "handed over" not in stage.words
