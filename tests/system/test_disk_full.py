"""Disks that fill up: a definite no meanwhile, nothing half, and work afterwards (I6).

A small tmpfs is the disk, so root is needed.
"""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.broker import Broker
from tests.support.history import Request, Written, violations
from tests.system.checks import Starting, check_chain, hot_files, new_topic, table_of, the_log
from tests.system.client import Client, wait_until

PARTITIONS = 2
DISK_BYTES = 4 * 2**20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a small tmpfs"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of DISK_BYTES."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={DISK_BYTES},mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tidelog-test", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(disk: Path, room: int = 0) -> Iterator[None]:
    """No more than `room` bytes are left; what a file under way gives back is taken, too."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        rounds_without_room = 0
        while rounds_without_room < 5:
            rounds_without_room = 0 if _fill(file) else rounds_without_room + 1
            time.sleep(0.1)
        file.truncate(file.tell() - room)
    try:
        yield
    finally:
        ballast.unlink()


def _fill(file: io.FileIO) -> int:
    start = file.tell()
    for size in (2**16, 2**12, 1):
        try:
            while file.write(bytes(size)):
                pass
        except OSError:
            continue
    return file.tell() - start


class Producer:
    """Sends one request after the other, and records the answers."""

    def __init__(self, client: Client, topic: str, **configs: object) -> None:
        client.create_topic(topic, PARTITIONS, **configs)
        self.client = client
        self.requests: list[Request] = []
        self._topic = topic

    def send(self, acks: str = "all", size: int = 3000) -> int:
        name = b'"%d/%s"' % (len(self.requests), b"x" * size)
        records = [Written(name[:-1] + b'%d"' % number, None, number) for number in range(2)]
        self.requests.append(Request(records, is_keyed=False, is_acked_in_turn=acks == "all"))
        return self.client.send(self._topic, self.requests[-1], acks=acks)


def test_i6_a_full_store_refuses_and_goes_on_when_there_is_room(disk: Path, tmp_path: Path) -> None:
    topic = new_topic()
    folder = disk / "store"
    often = {
        "wal": {"checkpoint_entries": 2, "checkpoint_interval_s": 0.0},
        "sealer": {"check_interval_s": 0.02},
    }
    with (
        Broker(tmp_path, str(folder), hot_dir=tmp_path / "hot", tuning=often) as broker,
        Client(broker.base_url) as client,
    ):
        producer = Producer(client, topic, segment_bytes=20_000)
        assert [producer.send() for _ in range(20)] == [200] * 20
        # A seal that fails deletes its segments, and the disk would have room again.
        unsealed = f'tidelog_unsealed_bytes{{topic="{topic}"}}'
        # Each partition is due from 20,000 bytes on, and keeps less than that.
        wait_until(lambda: client.metrics()[unsealed] < PARTITIONS * 20_000, "sealing")
        with full(disk):
            assert [producer.send() for _ in range(5)] == [503] * 5
            # Locally durable on another disk: kept, and committed when the store has room.
            assert producer.send(acks="1") == 200
            answer = client.call("POST", f"/topics/{topic}", b'{"records":[{"value":"eA=="}]}')
            assert answer.status == 503
            assert "ENOSPC" in answer.json()["message"]
            not_ready = client.call("GET", "/ready")
            assert not_ready.status == 503, "it accepts no writes"
            assert "ENOSPC" in not_ready.json()["message"]
            assert len(client.read(topic, 0)) == 20, "it can be read"
        wait_until(lambda: len(client.read(topic, 0)) == 21, "the commit of what the hot log kept")
        wait_until(lambda: client.call("GET", "/ready").status == 200, "writes that succeed")
        assert [producer.send() for _ in range(20)] == [200] * 20
        assert violations(producer.requests, the_log(broker, topic, PARTITIONS)) == []
        wait_until(lambda: client.metrics()[unsealed] < PARTITIONS * 20_000, "sealing")
        broker.restart()
        assert violations(producer.requests, the_log(broker, topic, PARTITIONS)) == []
    check_chain(folder)


def test_i6_a_full_hot_dir_refuses_acks_1_alone(disk: Path, tmp_path: Path) -> None:
    topic = new_topic()
    with Broker(tmp_path, hot_dir=disk / "hot") as broker, Client(broker.base_url) as client:
        producer = Producer(client, topic)
        with full(disk):  # before it has a file there
            assert [producer.send(acks="1") for _ in range(3)] == [503] * 3
            assert producer.send() == 200
        assert [producer.send(acks="1") for _ in range(3)] == [200] * 3
        with full(disk):
            assert [producer.send(acks="1", size=9000) for _ in range(5)] == [503] * 5
            assert [producer.send() for _ in range(5)] == [200] * 5
        assert [producer.send(acks="1") for _ in range(3)] == [200] * 3
        assert producer.send() == 200
        broker.restart()
        assert violations(producer.requests, the_log(broker, topic, PARTITIONS)) == []
        wait_until(lambda: not list((disk / "hot").glob("*.hot")), "the end of the recovery")
        assert broker.stop() == 0
    assert list((disk / "hot").iterdir()) == []


def test_what_was_acked_locally_waits_for_a_store_with_room(disk: Path, tmp_path: Path) -> None:
    """There is room for the probe of a starting broker, and none for what the hot log holds."""
    topic, hot = new_topic(), tmp_path / "hot"
    patient = {"hot_dir": hot, "flush_interval_ms": 60_000, "produce_timeout_ms": 120_000}
    with Broker(tmp_path, str(disk / "store"), **patient) as broker:
        with Client(broker.base_url) as client:
            producer = Producer(client, topic)
            sizes = [DISK_BYTES // 16] * 4
            assert [producer.send(acks="1", size=size) for size in sizes] == [200] * 4
        broker.kill()
        impatient = {"hot_dir": hot, "produce_timeout_ms": 100}
        starting = Starting(tmp_path / "starting", broker.store, **impatient)
        with full(disk, room=2**17), starting:
            wait_until(lambda: starting.log().count("requests failed") > 10, "patience")
            assert hot_files(hot)
        broker.start()
        wait_until(lambda: not hot_files(hot), "the commit of what was set aside")
        assert violations(producer.requests, the_log(broker, topic, PARTITIONS)) == []
        assert not hot_files(hot)


def test_sealing_into_a_full_store_leaves_nothing_behind(disk: Path, tmp_path: Path) -> None:
    """There is room for the segment of one partition, and not for that of the other, too."""
    topic, folder = new_topic(), disk / "store"
    with Broker(tmp_path, str(folder)) as broker, Client(broker.base_url) as client:
        producer = Producer(client, topic, compression_type="uncompressed")
        assert [producer.send(size=100_000) for _ in range(5)] == [200] * 5
        seal = f"/admin/topics/{topic}/seal"
        with full(disk, room=700_000):
            assert [client.call("POST", seal).status for _ in range(3)] == [503] * 3
            # The background sealer tries, too: its file may be there for a moment.
            wait_until(lambda: not list(folder.rglob("*.parquet")), "the removal of the segments")
            assert client.read_all(topic, PARTITIONS) == the_log(broker, topic, PARTITIONS)
        assert client.call("POST", seal).status == 200
        log = the_log(broker, topic, PARTITIONS)
        assert violations(producer.requests, log) == []
        assert table_of(folder, PARTITIONS) == log
