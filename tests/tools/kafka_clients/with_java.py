"""Kafka's own clients and tools, in Java: `org.apache.kafka:kafka-tools` from Maven."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.kafka_clients.conftest import Cluster
from tidelog.storage.codec.batch_header import TRANSACTIONS_NOT_SERVED

VERSIONS = ("4.3.1", "3.9.2")
RECORDS = 2000
TOOL_S = 300
ASSIGNORS = ("Range", "RoundRobin", "Sticky", "CooperativeSticky")
REFUSALS = Path(__file__).with_name("java") / "Refusals.java"
TOPICS = "org.apache.kafka.tools.TopicCommand"
REASSIGNMENTS = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
CONFIGS = "kafka.admin.ConfigCommand"
OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
CONSOLE_PRODUCER = {
    "4.3.1": "org.apache.kafka.tools.ConsoleProducer",
    "3.9.2": "kafka.tools.ConsoleProducer",
}
CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
VERIFIABLE_PRODUCER = "org.apache.kafka.tools.VerifiableProducer"
VERIFIABLE_CONSUMER = "org.apache.kafka.tools.VerifiableConsumer"
PRODUCER_PERFORMANCE = "org.apache.kafka.tools.ProducerPerformance"
CONSUMER_PERFORMANCE = "org.apache.kafka.tools.ConsumerPerformance"


class Java:
    """Kafka's tools of one version, at one cluster."""

    def __init__(self, version: str, jars: str, cluster: Cluster, folder: Path) -> None:
        self.version = version
        self.address = cluster.address
        self.broker = cluster.broker
        self._command = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", jars]
        self._folder = folder

    def named(self, name: str) -> str:
        return f"{name}-{self.version}"

    def command(self, tool: str, *arguments: str) -> list[str]:
        return [*self._command, tool, *arguments]

    def run(self, tool: str, *arguments: str, stdin: str = "", status: int = 0) -> str:
        """Run a tool with this cluster's address; return its output, and errors if it fails."""
        process = subprocess.run(
            self.command(tool, "--bootstrap-server", self.address, *arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TOOL_S,
            check=False,
        )
        assert process.returncode == status, (tool, process.stdout[-2000:], process.stderr[-2000:])
        return process.stdout + process.stderr if status else process.stdout

    def file(self, **properties: object) -> str:
        """A properties file; dots are underscores in the names."""
        path = self._folder / "client.properties"
        lines = [f"{name.replace('_', '.')}={value}" for name, value in properties.items()]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def produce(self, topic: str, *properties: str, records: int = RECORDS) -> None:
        arguments = ["--topic", topic, "--num-records", str(records), "--record-size", "100"]
        arguments += ["--throughput", "-1", "--producer-props"]
        arguments += [f"bootstrap.servers={self.address}", *properties]
        command = self.command(PRODUCER_PERFORMANCE, *arguments)
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_S, check=False
        )
        assert process.returncode == 0, process.stderr[-2000:]
        assert f"{records} records sent" in process.stdout, process.stdout[-2000:]
        assert "Exception" not in process.stdout + process.stderr, process.stderr[-2000:]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def java(version: str, jars: Callable[..., str], cluster: Cluster, tmp_path: Path) -> Java:
    packages = [f"org.apache.kafka:{name}:{version}" for name in ("kafka_2.13", "kafka-tools")]
    return Java(version, jars(f"kafka-{version}", *packages), cluster, tmp_path)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_performance_tools(java: Java, codec: str) -> None:
    topic = java.named(f"perf-{codec}")
    java.broker.create_topic(topic, 3)
    java.produce(topic, "acks=all", "enable.idempotence=true", f"compression.type={codec}")
    offsets = java.run(OFFSETS, "--topic", topic).split()
    assert sum(int(line.rpartition(":")[2]) for line in offsets) == RECORDS
    arguments = ["--topic", topic, "--messages", str(RECORDS), "--timeout", "60000"]
    output = java.run(CONSUMER_PERFORMANCE, *arguments, "--hide-header")
    assert f" {RECORDS}," in output, output


def test_a_producer_without_idempotence_and_without_acks(java: Java) -> None:
    topic = java.named("plain")
    java.broker.create_topic(topic)
    java.produce(topic, "acks=1", "enable.idempotence=false", "batch.size=0", records=200)
    assert java.broker.high_watermark(topic) == 200
    java.produce(topic, "acks=0", "enable.idempotence=false", records=200)


def test_topics(java: Java) -> None:
    topic = java.named("admin")
    named = ["--topic", topic]
    output = java.run(TOPICS, "--create", *named, "--partitions", "3", "--replication-factor", "1")
    assert f"Created topic {topic}." in output
    output = java.run(TOPICS, "--create", *named, status=1)
    assert "already exists" in output
    assert topic in java.run(TOPICS, "--list").split()
    output = java.run(TOPICS, "--describe", *named)
    assert "PartitionCount: 3" in output, output
    assert len(re.findall(r"Partition: \d", output)) == 3, output
    java.run(TOPICS, "--alter", *named, "--partitions", "5")
    assert "PartitionCount: 5" in java.run(TOPICS, "--describe", *named)
    java.run(TOPICS, "--alter", *named, "--partitions", "2", status=1)
    java.run(TOPICS, "--delete", *named)
    assert topic not in java.run(TOPICS, "--list").split()
    assert "does not exist" in java.run(TOPICS, "--describe", *named, status=1)


def test_replicas(java: Java, tmp_path: Path) -> None:
    topic = java.named("replicas")
    java.broker.create_topic(topic)
    assert topic in java.run(TOPICS, "--describe", "--at-min-isr-partitions")
    assert topic not in java.run(TOPICS, "--describe", "--under-min-isr-partitions")
    described = java.run(TOPICS, "--describe", "--topic", topic)
    (leader,) = re.findall(r"Leader: (\d+)", described)
    assignment = {"topic": topic, "partition": 0, "replicas": [int(leader)]}
    path = tmp_path / "assignment.json"
    path.write_text(json.dumps({"version": 1, "partitions": [assignment]}))
    named = ["--reassignment-json-file", str(path)]
    output = java.run(REASSIGNMENTS, *named, "--verify")
    assert f"Reassignment of partition {topic}-0 is completed." in output, output
    assert "Clearing topic-level throttles" in java.run(REASSIGNMENTS, *named, "--cancel")


def test_configs(java: Java) -> None:
    topic = java.named("configs")
    java.broker.create_topic(topic)
    entity = ["--entity-type", "topics", "--entity-name", topic]
    java.run(CONFIGS, "--alter", *entity, "--add-config", "retention.ms=3600000")
    output = java.run(CONFIGS, "--describe", *entity)
    assert "retention.ms=3600000" in output, output
    java.run(CONFIGS, "--alter", *entity, "--delete-config", "retention.ms")
    assert "retention.ms" not in java.run(CONFIGS, "--describe", *entity)
    assert "retention.ms" in java.run(CONFIGS, "--describe", *entity, "--all")
    output = java.run(CONFIGS, "--alter", *entity, "--add-config", "retention.ms=never", status=1)
    assert "retention.ms" in output
    brokers = ["--entity-type", "brokers", "--entity-default"]
    values = "log.retention.ms=7200000,log.cleanup.policy=[compact,delete]"
    java.run(CONFIGS, "--alter", *brokers, "--add-config", values)
    output = java.run(CONFIGS, "--describe", *brokers)
    assert "log.retention.ms=7200000" in output, output
    assert "DYNAMIC_DEFAULT_BROKER_CONFIG:log.retention.ms=7200000" in output, output
    output = java.run(CONFIGS, "--describe", *entity, "--all")
    assert "cleanup.policy=compact,delete" in output, output
    names = "log.retention.ms,log.cleanup.policy"
    java.run(CONFIGS, "--alter", *brokers, "--delete-config", names)
    assert "log.retention.ms" not in java.run(CONFIGS, "--describe", *brokers)


def test_console_tools(java: Java) -> None:
    topic = java.named("console")
    java.broker.create_topic(topic)
    lines = "".join(f"k{n}:line {n}\n" for n in range(100))
    producer = CONSOLE_PRODUCER[java.version]
    keyed = ["--property", "parse.key=true", "--property", "key.separator=:"]
    java.run(producer, "--topic", topic, *keyed, stdin=lines)
    output = java.run(
        CONSOLE_CONSUMER,
        *("--topic", topic, "--from-beginning", "--max-messages", "100"),
        *("--property", "print.key=true", "--property", "key.separator=:"),
    )
    assert lines in output
    assert [record["value"] for record in java.broker.records(topic, "--max", "100")] == [
        f"line {n}" for n in range(100)
    ]


@pytest.mark.parametrize("assignor", ASSIGNORS)
def test_verifiable_group(java: Java, assignor: str) -> None:
    """Two members read everything, while one of them leaves in the middle."""
    topic = java.named(f"group-{assignor}")
    java.broker.create_topic(topic, 4)
    arguments = ["--topic", topic, "--max-messages", str(RECORDS), "--throughput", "-1"]
    output = java.run(VERIFIABLE_PRODUCER, *arguments)
    assert f'"acked":{RECORDS}' in output, output[-1000:]
    command = java.command(
        VERIFIABLE_CONSUMER,
        *("--bootstrap-server", java.address, "--topic", topic, "--group-id", topic),
        *("--assignment-strategy", f"org.apache.kafka.clients.consumer.{assignor}Assignor"),
        *("--reset-policy", "earliest"),
    )
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert other.stdout is not None
        assigned = next(line for line in other.stdout if "partitions_assigned" in line)
        assert assigned.count('"partition"') == 4, assigned
        count = 0
        while count < RECORDS:
            line = next(line for line in other.stdout if "records_consumed" in line)
            count += json.loads(line)["count"]
        last = next(line for line in other.stdout if "offsets_committed" in line)
        assert '"success":true' in last, last
        static = [*command, "--group-instance-id", "second"]
        member = subprocess.Popen(
            static, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert member.stdout is not None
            event = next(
                line
                for line in member.stdout
                if "partitions_assigned" in line and '"partition"' in line
            )
            assert event.count('"partition"') in {1, 2}, event
        finally:
            member.terminate()
            member.communicate(timeout=TOOL_S)
    finally:
        other.terminate()
        other.communicate(timeout=TOOL_S)
    # The static member did not leave: it is in the group until its session ends.
    state = java.run(GROUPS, "--describe", "--group", topic)
    rows = [line.split() for line in state.splitlines() if line.startswith(topic)]
    assert {row[5] for row in rows} == {"0"}, state
    assert sum(int(row[3]) for row in rows) == RECORDS, state


def test_groups(java: Java) -> None:
    topic, group = java.named("offsets"), java.named("reset")
    java.broker.create_topic(topic, 2)
    java.produce(topic)
    named = ["--group", group]
    read = ["--topic", topic, "--from-beginning", "--max-messages", str(RECORDS), *named]
    java.run(CONSOLE_CONSUMER, *read)
    assert group in java.run(GROUPS, "--list").split()
    assert "Empty" in java.run(GROUPS, "--describe", *named, "--state")
    java.run(GROUPS, "--describe", *named, "--members")
    reset = ["--reset-offsets", "--execute", *named, "--topic", topic]
    java.run(GROUPS, *reset, "--to-earliest")
    output = java.run(GROUPS, "--describe", *named)
    lags = [int(line.split()[5]) for line in output.splitlines() if line.startswith(group)]
    assert sum(lags) == RECORDS, output
    java.run(GROUPS, *reset, "--to-latest")
    java.run(GROUPS, *reset, "--shift-by", "-1")
    java.run(GROUPS, *reset, "--to-datetime", "2020-01-01T00:00:00.000")
    java.run(GROUPS, "--delete-offsets", *named, "--topic", topic)
    java.run(GROUPS, "--delete", *named)
    assert group not in java.run(GROUPS, "--list").split()


@pytest.mark.parametrize(
    ("client", "refusal"),
    [("consumer", "et group.protocol=classic"), ("producer", TRANSACTIONS_NOT_SERVED)],
)
def test_a_client_shows_what_is_not_served(java: Java, client: str, refusal: str) -> None:
    command = java.command(str(REFUSALS), java.address, client)
    process = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    assert refusal in process.stdout, (process.stdout, process.stderr[-2000:])
