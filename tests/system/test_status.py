"""`tidelog status` on a real broker: it names injected faults, with exit status 1."""

import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.broker import Broker, json_of, until
from tests.system.several import QUICK, brokers

V3 = {"content-type": "application/json"}


def problems(broker: Broker) -> dict[str, str]:
    """The problems of the cluster, by name."""
    process = broker.cli("status", "--json", status=None)
    status = json_of(process)
    assert process.returncode == (0 if status["is_well"] else 1)
    return {problem["name"]: problem["what"] for problem in status["problems"]}


def produce_hour_old(broker: Broker, topic: str) -> None:
    """Produce a record whose timestamp is an hour ago."""
    cluster = httpx.get(f"{broker.base_url}/v3/clusters").json()["data"][0]["cluster_id"]
    hour_ago = time.gmtime(time.time() - 3600)
    record = {
        "value": {"type": "STRING", "data": "b"},
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", hour_ago),
    }
    url = f"{broker.base_url}/v3/clusters/{cluster}/topics/{topic}/records"
    httpx.post(url, json=record, headers=V3).raise_for_status()


def test_faults_are_named(tmp_path: Path) -> None:
    with Broker(tmp_path, retention_check_interval_ms=0) as broker:
        broker.create_topic("old")
        assert problems(broker) == {}

        # A group that has ended, and a record that is an hour old.
        broker.cli("produce", "old", stdin="a\n")
        broker.cli("consume", "old", "--group", "gone", "-n", "1")
        produce_hour_old(broker, "old")
        assert "group gone has no members" in problems(broker)["group-without-members"]
        assert "group-without-members" in broker.cli("status", status=1).stdout.decode()
        broker.cli("groups", "reset", "gone", "--to", "end")
        assert problems(broker) == {}

        # Sealing that fails: the folder of a topic's table is a file.
        (tmp_path / "store" / "topics").mkdir(exist_ok=True)
        listed = httpx.get(f"{broker.base_url}/tidelog/v1/topics/old").json()
        (tmp_path / "store" / "topics" / f"old-{listed['topic_id']}").write_text("no folder")
        broker.cli("topics", "alter", "old", "-c", "segment.ms=100")
        until(lambda: "seals-fail" in problems(broker))
        assert "old-0" in problems(broker)["seals-fail"]

        # Damage: a scrub finds an object of the WAL with a wrong byte.
        (tmp_path / "store" / "topics" / f"old-{listed['topic_id']}").unlink()
        until(lambda: "seals-fail" not in problems(broker))
        assert broker.stop() == 0
        entry = max((tmp_path / "store" / "wal").rglob("*"))
        body = bytearray(entry.read_bytes())
        body[-1] ^= 1
        entry.chmod(0o600)
        entry.write_bytes(body)
        scrubbed = broker.cli("scrub", "--store", broker.store, status=None)
        assert scrubbed.returncode == 1, scrubbed.stdout
        record_path = tmp_path / "store" / "maintenance" / "scrub.json"
        assert b'"damage":1' in record_path.read_bytes()
        body[-1] ^= 1
        entry.write_bytes(body)
        broker.start()
        assert "damage" in problems(broker)
        broker.cli("scrub", "--store", broker.store)
        broker.cli("maintain", "--store", broker.store, "--yes")
        assert problems(broker) == {}
        tasks = json_of(broker.cli("status", "--json"))["maintenance"]
        assert [task["is_ok"] for task in tasks] == [True] * 4


def test_a_broker_that_crashed_is_gone_and_its_past_stays(tmp_path: Path) -> None:
    with brokers(tmp_path, **QUICK) as (first, _, killed):
        first.create_topic("t")

        def overview() -> Any:
            return httpx.get(f"{first.base_url}/tidelog/v1/overview?history=true").json()

        def produced() -> float:
            return sum(value or 0.0 for value in overview()["history"]["series"]["records_in"])

        killed.cli("produce", "t", stdin="a\nb\nc\n")
        until(lambda: produced() > 0)
        assert (len(overview()["brokers"]), overview()["gone"]) == (3, [])
        old_count = produced()
        killed.kill()
        until(lambda: len(overview()["brokers"]) == 2)
        until(lambda: bool(overview()["gone"]))
        (gone_broker,) = overview()["gone"]
        assert gone_broker["name"] == "c"
        assert produced() == old_count
        text = first.cli("status", status=None).stdout.decode()
        assert "c is gone: its last answer was" in text
        killed.start()
        until(lambda: not overview()["gone"])
        assert produced() == old_count


def test_problems_are_folded_by_kind(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t")
        broker.cli("produce", "t", stdin="a\n")
        for number in range(5):
            broker.cli("consume", "t", "--group", f"g{number}", "-n", "1")
        produce_hour_old(broker, "t")
        lines = broker.cli("status", status=1).stdout.decode().splitlines()
        named = [line for line in lines if line.startswith("group-without-members: ")]
        assert len(named) == 3
        assert "    and 2 more of this kind (--json)" in lines
        assert lines[-1] == "NOT WELL: 5 problems"
