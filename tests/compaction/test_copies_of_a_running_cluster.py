"""Copies of a running cluster, folder after folder. None may hide what was acknowledged."""

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.support.broker_log import BrokerLog
from tests.support.foreign_engines import caring
from tidelog.compaction.garbage import Grace
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.storage.core.errors import Corrupt

ORDERS = (
    ("wal", "topics", "checkpoints", "cluster.json"),
    ("cluster.json", "wal", "checkpoints", "topics"),
    ("cluster.json", "topics", "checkpoints", "wal"),
)
orders = pytest.mark.parametrize("order", ORDERS)


def copied(root: Path, order: tuple[str, ...]) -> Path:
    """A copy of one folder after the other; between two of them records are written and sealed."""
    original, copy = root / "original", root / "copy"
    broker = BrokerLog(original)
    broker.create("t", 2)
    copy.mkdir()
    for number, name in enumerate(order):
        for partition in range(2):
            broker.append("t", {partition: [b"%s %d" % (name.encode(), number)] * 3})
        broker.seal("t")
        source = original / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
        elif source.exists():
            shutil.copy(source, copy)
    broker.close()
    return copy


def scrubbed(root: Path) -> ScrubReport:
    return caring(root, lambda cluster: scrub(cluster, None, Grace()))


@orders
def test_a_scrub_names_the_copy(tmp_path: Path, order: tuple[str, ...]) -> None:
    copy = copied(tmp_path, order)
    report = scrubbed(copy)
    assert not report.is_whole
    assert any("topics/t-" in str(finding) for finding in report.findings)


@orders
def test_the_copy_never_gives_an_offset_another_record(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    copy = copied(tmp_path, order)
    broker = BrokerLog(copy)
    try:
        end = broker.log.state.partition("t", 0).high_watermark
        start = broker.log.state.partition("t", 0).sealed_end
        for number in range(12):
            broker.append("t", {0: [b"new %d" % number]})
            with contextlib.suppress(Corrupt):
                broker.seal("t")
        values = _tail(broker, start)
        expected = [b"new %d" % number for number in range(12)]
        assert values[end - start :] == expected
    finally:
        broker.close()
    assert not scrubbed(copy).is_whole


def _tail(broker: BrokerLog, start: int) -> list[bytes]:
    values: list[bytes] = []
    while True:
        fetched = broker._runner.run(broker.log.fetch("t", 0, start, bytes_max=1 << 20))
        if not fetched.pieces:
            return values
        for piece in fetched.pieces:
            values += piece.batch.column("value").to_pylist()
        start = fetched.next_offset
