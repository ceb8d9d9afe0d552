"""`tidelog produce --state` in this process: faults of the network, and memory."""

import json
import os
from pathlib import Path

import pytest

from tests.service.client.faults import (
    BUSY,
    FAILED,
    GONE,
    INVALID,
    LOST,
    PAGE,
    PROXY_BUSY,
    REFUSED,
    Choice,
    FaultyTransport,
    script,
)
from tests.service.conftest import Broker, ends
from tidelog.service.cli.errors import BadUsage, CommandError
from tidelog.service.cli.input_lines import LineInput, LineSource, ProduceOptions, text_parser
from tidelog.service.cli.resumable_produce import CHECKED_BYTES, ResumableProducer
from tidelog.service.client.connection import Connection


class Input:
    """A file of lines, and the runs of the command on it."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self.file = folder / "lines"
        self.state = folder / "state"

    async def produce(self, choose: Choice | None = None, retry_s: float = 30.0) -> None:
        """Run the command on the file. Raises CommandError."""
        descriptor = os.open(self.file, os.O_RDONLY)
        await self.produce_from(descriptor, choose, retry_s)

    async def produce_from(
        self, descriptor: int, choose: Choice | None = None, retry_s: float = 30.0
    ) -> None:
        """Run the command on an open file, and close it. Raises CommandError."""
        transport = FaultyTransport(self.broker.app, *([choose] if choose else []))
        options = ProduceOptions(state=self.state, retry_s=retry_s)
        try:
            lines = LineInput("t", LineSource(descriptor, None), options, text_parser(None))
            async with Connection("a:1", transport=transport) as client:
                await ResumableProducer(client, lines).run()
        finally:
            os.close(descriptor)

    def is_pending(self) -> bool:
        """Whether the state says that the outcome of a batch is unknown."""
        return json.loads(self.state.read_text())["pending"] is not None


@pytest.fixture
def lines(broker: Broker, topic: str, tmp_path: Path) -> Input:
    lines_input = Input(broker, tmp_path)
    lines_input.file.write_text("a\nb\n")
    return lines_input


async def test_page_of_proxy_leaves_batch_pending(lines: Input) -> None:
    with pytest.raises(CommandError, match="not a tidelog broker"):
        await lines.produce(script(PAGE, of="/topics/t"))
    assert lines.is_pending()
    with lines.file.open("a") as file:
        file.write("c\n")
    await lines.produce()
    assert sum(ends(lines.broker.log)) == 3


@pytest.mark.parametrize(
    ("faults", "is_pending"),
    [
        ((LOST, GONE), True),
        ((GONE,), False),
        ((BUSY,) * 99, False),
        ((REFUSED,) * 99, False),
        ((BUSY, PROXY_BUSY, *[REFUSED] * 99), True),
        ((FAILED,), True),
    ],
)
async def test_refused_batch_is_pending_if_its_outcome_is_unknown(
    lines: Input, faults: tuple[str, ...], *, is_pending: bool
) -> None:
    with pytest.raises(CommandError):
        await lines.produce(script(*faults, of="/topics/t"), retry_s=1.0)
    assert lines.is_pending() == is_pending
    await lines.produce()
    assert sum(ends(lines.broker.log)) == 2


async def test_batch_of_earlier_run_stays_pending_if_topic_is_refused(lines: Input) -> None:
    with pytest.raises(CommandError):
        await lines.produce(script(*[LOST] * 50, of="/topics/t"), retry_s=0.0)
    with pytest.raises(CommandError):
        await lines.produce(script(GONE, of="/topics/t"))
    assert lines.is_pending()


async def test_user_who_follows_advice_goes_on(lines: Input) -> None:
    await lines.produce()
    lines.file.write_text("a\nb\nc\nd\n")
    with pytest.raises(CommandError):
        await lines.produce(script(*[LOST] * 50, of="/topics/t"), retry_s=0.0)
    with pytest.raises(CommandError, match="lines 3 to 4 are in t, and its repetition was refused"):
        await lines.produce(script(INVALID, of="/topics/t"))
    state = json.loads(lines.state.read_text())
    state |= {"lines": state["pending"]["lines"], "bytes": state["pending"]["bytes"]}
    lines.state.write_text(json.dumps(state | {"pending": None}))
    lines.file.write_text("a\nb\nc\nd\ne\n")
    await lines.produce()
    assert sum(ends(lines.broker.log)) == 5


async def test_file_of_old_version_is_read(lines: Input) -> None:
    await lines.produce()
    state = json.loads(lines.state.read_text())
    del state["checked"], state["checked_bytes"]
    lines.state.write_text(json.dumps(state))
    with lines.file.open("a") as file:
        file.write("c\n")
    await lines.produce()
    assert sum(ends(lines.broker.log)) == 3


def test_format_of_values_is_of_ndjson() -> None:
    with pytest.raises(BadUsage, match="--embedded needs --format ndjson"):
        ProduceOptions(embedded="binary").parser()


async def test_resumption_in_pipe_keeps_little_of_skipped_input(
    lines: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.file.write_bytes(b"x" * 999 + b"\n" + b"y" * 1999 + b"\n" + b"z\n" * 2000)
    await lines.produce()
    kept: list[int] = []
    read_exactly = ResumableProducer._read_exactly

    async def counted(self: ResumableProducer, count: int) -> bytes:
        octets = await read_exactly(self, count)
        kept.append(len(octets))
        return octets

    monkeypatch.setattr(ResumableProducer, "_read_exactly", counted)
    monkeypatch.setattr("tidelog.service.cli.resumable_produce.INPUT_READ_BYTES", 500)
    monkeypatch.setattr("tidelog.service.cli.input_lines.INPUT_READ_BYTES", 500)
    reader, writer = os.pipe()
    os.write(writer, lines.file.read_bytes())
    os.close(writer)
    await lines.produce_from(reader)
    assert len(kept) > 5
    assert max(kept) <= CHECKED_BYTES + 500
    assert sum(ends(lines.broker.log)) == 2002
