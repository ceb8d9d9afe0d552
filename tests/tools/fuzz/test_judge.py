"""Each judgement of `make fuzz INPUTS=N` finds a service that deserves it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.fuzz import judge, kafka_frames_target, run
from tests.tools.fuzz.target import Target
from tidelog.service.kafka.metadata import KafkaMetadata

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "CRASHES", tmp_path)
    monkeypatch.setattr(run, "WARM_UP_MIN", 2)
    yield
    kafka_frames_target.close()


def tried(check: Callable[[bytes], None], inputs: int = 10) -> tuple[int, int]:
    return run.try_inputs(Target("t", lambda: [b"valid"], check), inputs, lambda: None)


def spin(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def on_a_loop(step: Callable[[], None]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(step)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_target_that_holds_has_no_finding(tmp_path: Path) -> None:
    assert tried(lambda _: on_a_loop(lambda: None)) == (0, 0)
    assert not [*tmp_path.iterdir()]


def test_a_slow_step_is_found_and_its_input_kept(tmp_path: Path) -> None:
    assert tried(lambda _: on_a_loop(lambda: spin(judge.STEP_CPU_S_MAX * 1.5)), 2) == (2, 0)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_leak_is_found() -> None:
    leaked: list[bytes] = []
    assert tried(lambda _: leaked.append(b"x" * (32 * MIB))) == (1, 0)


def test_a_slow_handler_of_a_kafka_api_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = KafkaMetadata.metadata

    async def slow(*arguments: object) -> object:
        spin(judge.STEP_CPU_S_MAX * 1.5)
        return await handler(*arguments)

    monkeypatch.setattr(KafkaMetadata, "metadata", slow)
    assert tried(sent("MetadataRequest"), 1) == (1, 0)


def test_a_bug_in_a_handler_of_a_kafka_api_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(KafkaMetadata, "metadata", broken)
    assert tried(sent("MetadataRequest"), 1) == (1, 0)


def test_a_kafka_request_that_gets_no_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> None:
        await asyncio.sleep(0.2)  # the test ends, so the request does

    monkeypatch.setattr(KafkaMetadata, "metadata", lost)
    monkeypatch.setattr(kafka_frames_target, "ANSWER_S", 0.05)
    assert tried(sent("MetadataRequest"), 1) == (1, 0)


def sent(name: str) -> Callable[[bytes], None]:
    """Return a check that sends this request whatever the input."""
    (frame,) = (
        framed
        for request, framed in kafka_frames_target.usual_frames()
        if type(request).__name__ == name
    )
    return lambda _: kafka_frames_target.check_frame(frame)
