"""Unchanged Kafka clients at `tidelog serve --kafka-port`: kafka-python, aiokafka, librdkafka."""

import asyncio
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka as librdkafka
import kafka as kafka_python
import psutil
import pytest
from confluent_kafka.admin import AdminClient

from tests.service.kafka.definitions import Interpreter, load
from tests.service.kafka.every_message import every_message
from tests.service.kafka.wire import framed
from tests.support.broker import Broker, tidelog
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.system.client import wait_until
from tests.system.several import QUICK, metrics
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest
from tidelog.service.kafka.messages.header import FIRST_FLEXIBLE
from tidelog.storage.codec.batch_header import TRANSACTIONS_NOT_SERVED

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = 200
ERRORS = librdkafka.KafkaException, kafka_python.errors.KafkaError, aiokafka.errors.KafkaError
QUIET: dict[str, Any] = {"log_level": 0, "logger": logging.getLogger("rdkafka")}


class Cluster:
    """A broker with a listener for Kafka clients."""

    def __init__(self, broker: Broker, port: int) -> None:
        self.broker = broker
        self.address = f"127.0.0.1:{port}"
        self.port = port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port = free_port()
    with Broker(tmp_path_factory.mktemp("kafka"), kafka_port=port) as broker:
        yield Cluster(broker, port)


def _values(number: int = RECORDS) -> list[bytes]:
    return [b"value %d " % n + b"x" * 50 for n in range(number)]


def _produce(address: str, topic: str, values: list[bytes], **options: Any) -> list[int]:
    """Produce by librdkafka; return the offsets."""
    config = {"bootstrap.servers": address, "linger.ms": 20, **options, **QUIET}
    offsets: list[int] = []
    errors: list[object] = []

    def delivered(error: object, message: Any) -> None:
        errors.append(error) if error is not None else offsets.append(message.offset())

    producer = librdkafka.Producer(config)
    for value in values:
        producer.produce(topic, value, key=b"k", on_delivery=delivered)
    assert producer.flush(30) == 0
    assert not errors
    return offsets


def _consume(address: str, topic: str, count: int, first: int = 0, **options: Any) -> list[Any]:
    """Read by librdkafka, without a group."""
    config = {"bootstrap.servers": address, "group.id": "none", **options, **QUIET}
    consumer = librdkafka.Consumer(config)
    consumer.assign([librdkafka.TopicPartition(topic, 0, first)])
    messages: list[Any] = []
    deadline = time.monotonic() + 30
    while len(messages) < count and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            messages.append(message)
    consumer.close()
    return messages


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("is_idempotent", [False, True], ids=["plain", "idempotent"])
def test_librdkafka_reads_what_it_wrote(cluster: Cluster, codec: str, is_idempotent: bool) -> None:
    topic = f"rd-{codec}-{is_idempotent}"
    cluster.broker.create_topic(topic)
    config = {"compression.type": codec, "enable.idempotence": is_idempotent}
    assert _produce(cluster.address, topic, _values(), **config) == [*range(RECORDS)]
    messages = _consume(cluster.address, topic, RECORDS)
    assert [message.value() for message in messages] == _values()
    assert [message.offset() for message in messages] == [*range(RECORDS)]
    last_messages = _consume(cluster.address, topic, 5, first=RECORDS - 5)
    assert [message.value() for message in last_messages] == _values()[-5:]


@pytest.mark.parametrize("codec", [None, "gzip"])
def test_kafka_python(cluster: Cluster, codec: str | None) -> None:
    topic = f"kp-{codec}"
    cluster.broker.create_topic(topic, 2)
    producer = kafka_python.KafkaProducer(bootstrap_servers=cluster.address, compression_type=codec)
    sent = [producer.send(topic, value, partition=0) for value in _values()]
    assert [future.get(30).offset for future in sent] == [*range(RECORDS)]
    producer.close()
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=cluster.address, consumer_timeout_ms=10_000
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning()
    values = [next(consumer).value for _ in range(RECORDS)]
    assert values == _values()
    assert consumer.end_offsets([partition]) == {partition: RECORDS}
    assert consumer.beginning_offsets([partition]) == {partition: 0}
    by_time = consumer.offsets_for_times({partition: 1})
    assert by_time[partition].offset == 0
    consumer.close()


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
def test_aiokafka(cluster: Cluster, codec: str | None) -> None:
    topic = f"aio-{codec}"
    cluster.broker.create_topic(topic)

    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=cluster.address,
            compression_type=codec,
            enable_idempotence=codec == "lz4",
        )
        await producer.start()
        futures = [await producer.send(topic, value) for value in _values()]
        assert [(await future).offset for future in futures] == [*range(RECORDS)]
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            topic, bootstrap_servers=cluster.address, auto_offset_reset="earliest"
        )
        await consumer.start()
        values = [(await consumer.getone()).value for _ in range(RECORDS)]
        await consumer.stop()
        assert values == _values()

    asyncio.run(run())


def test_a_consumer_at_the_end_gets_what_is_written_next(cluster: Cluster) -> None:
    cluster.broker.create_topic("tail")
    _produce(cluster.address, "tail", [b"old"])
    messages: list[Any] = []
    reader = threading.Thread(
        target=lambda: messages.extend(_consume(cluster.address, "tail", 1, librdkafka.OFFSET_END))
    )
    reader.start()
    while reader.is_alive():
        _produce(cluster.address, "tail", [b"new"])
    assert [message.value() for message in messages] == [b"new"]


def test_records_of_kafka_and_of_http_are_the_same(cluster: Cluster) -> None:
    cluster.broker.create_topic("mixed")
    _produce(cluster.address, "mixed", [b"by kafka"], **{"compression.type": "zstd"})
    cluster.broker.cli("produce", "mixed", stdin="by http\n")
    assert [record["value"] for record in cluster.broker.records("mixed")] == [
        "by kafka",
        "by http",
    ]
    assert [message.value() for message in _consume(cluster.address, "mixed", 2)] == [
        b"by kafka",
        b"by http",
    ]


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python", "aiokafka"])
def test_consumer_that_catches_up_gets_each_record_once(cluster: Cluster, client: str) -> None:
    """One answer has sealed records of the table, and batches that the broker has in memory."""
    topic = f"once-{client}"
    cluster.broker.create_topic(topic)
    batches = {"linger.ms": 200, "batch.num.messages": 5000}
    _produce(cluster.address, topic, [b"value"] * 30_000, **batches)
    cluster.broker.cli("seal", topic)
    cluster.broker.restart()  # the sealed records are not in memory
    _produce(cluster.address, topic, [b"value"] * 20_000, **batches)
    assert _offsets(cluster, client, topic, 50_000) == [*range(50_000)]


def test_idempotent_producer_goes_on_when_its_topic_is_created_again(cluster: Cluster) -> None:
    topic, config = "again", {"bootstrap.servers": cluster.address, "enable.idempotence": True}
    producer = librdkafka.Producer({**config, **QUIET, "topic.metadata.refresh.interval.ms": 500})

    def send(number: int) -> int:
        answers: list[Any] = []
        value = b"%d" % number
        producer.produce(topic, value, partition=0, on_delivery=lambda *it: answers.append(it))
        assert producer.flush(60) == 0
        ((error, message),) = answers
        assert error is None, error
        return int(message.offset())

    cluster.broker.create_topic(topic)
    assert [send(number) for number in range(3)] == [0, 1, 2]
    cluster.broker.cli("topics", "delete", topic, "--yes")
    cluster.broker.create_topic(topic)
    assert [send(number) for number in range(5)] == [*range(5)]
    records = _consume(cluster.address, topic, 5)
    assert [record.value() for record in records] == [b"%d" % number for number in range(5)]


def _offsets(cluster: Cluster, client: str, topic: str, count: int) -> list[int]:
    """Return the offsets of the records that a client gets, from the first to the last one."""
    if client == "librdkafka":
        return [message.offset() for message in _consume(cluster.address, topic, count)]
    if client == "kafka-python":
        options: dict[str, Any] = {"auto_offset_reset": "earliest", "consumer_timeout_ms": 30_000}
        consumer = kafka_python.KafkaConsumer(bootstrap_servers=cluster.address, **options)
        consumer.assign([kafka_python.TopicPartition(topic, 0)])
        offsets = [record.offset for record in islice(consumer, count)]
        consumer.close()
        return offsets

    async def consume() -> list[int]:
        async with aiokafka.AIOKafkaConsumer(bootstrap_servers=cluster.address) as consumer:
            consumer.assign([aiokafka.TopicPartition(topic, 0)])
            await consumer.seek_to_beginning()
            return [(await consumer.getone()).offset for _ in range(count)]

    return asyncio.run(consume())


def test_group_behind_a_gap_at_the_end_has_no_lag(tmp_path: Path) -> None:
    """The last records are lost. librdkafka stores its position behind them, and reads on."""
    port = free_port()
    with Broker(tmp_path, kafka_port=port) as broker:
        address = f"127.0.0.1:{port}"
        broker.create_topic("t")
        _produce(address, "t", _values(5))
        _produce(address, "t", [b"damaged"] * 3)
        assert broker.stop() == 0
        (entry,) = [
            path for path in (tmp_path / "store/wal").iterdir() if b"damaged" in path.read_bytes()
        ]
        entry.chmod(0o600)
        entry.write_bytes(entry.read_bytes().replace(b"damaged", b"DAMAGED"))
        tidelog("repair", "--store", broker.store, "--lost", "--yes")
        broker.start()
        config = {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest"}
        consumer = librdkafka.Consumer({**config, "enable.auto.commit": False, **QUIET})
        consumer.subscribe(["t"])
        offsets: list[int] = []

        def is_at_the_end() -> bool:
            message = consumer.poll(0.1)
            if message is not None:
                offsets.append(message.offset())
            assigned = consumer.assignment()
            return bool(assigned) and consumer.position(assigned)[0].offset == 8

        wait_until(is_at_the_end, "the position behind the gap")
        assert offsets == [*range(5)]
        (committed,) = consumer.commit(asynchronous=False)
        assert committed.offset == 8
        consumer.close()
        fetches = broker_fetches(broker)
        reader = kafka_python.KafkaConsumer(
            bootstrap_servers=address, auto_offset_reset="earliest", consumer_timeout_ms=1500
        )
        reader.assign([kafka_python.TopicPartition("t", 0)])
        assert [record.offset for record in reader] == [*range(5)]
        assert reader.position(kafka_python.TopicPartition("t", 0)) == 8
        reader.close()
        assert broker_fetches(broker) - fetches < 30


def broker_fetches(broker: Broker) -> float:
    """Return the number of the Fetch requests that the broker has answered."""
    return metrics(broker)['tidelog_kafka_request_seconds_count{api="Fetch"}']


def test_metadata_of_librdkafka(cluster: Cluster) -> None:
    cluster.broker.create_topic("shown", 3)
    admin = AdminClient({"bootstrap.servers": cluster.address, **QUIET})
    everything = admin.list_topics(timeout=20)
    assert len(everything.topics["shown"].partitions) == 3
    assert [(node.host, node.port) for node in everything.brokers.values()] == [
        ("127.0.0.1", cluster.port)
    ]
    unknown = admin.list_topics("no-such-topic", timeout=20).topics["no-such-topic"]
    assert unknown.error.code() == librdkafka.KafkaError.UNKNOWN_TOPIC_OR_PART
    described = admin.describe_cluster(request_timeout=20).result()
    assert len(described.nodes) == 1
    consumer = librdkafka.Consumer(
        {"bootstrap.servers": cluster.address, "group.id": "none", **QUIET}
    )
    assert consumer.get_watermark_offsets(librdkafka.TopicPartition("shown", 0)) == (0, 0)
    consumer.close()


def test_metadata_of_kafka_python(cluster: Cluster) -> None:
    cluster.broker.create_topic("listed", 2)
    admin = kafka_python.KafkaAdminClient(bootstrap_servers=cluster.address)
    assert "listed" in admin.list_topics()
    admin.close()


def _librdkafka_begins(address: str) -> None:
    producer = librdkafka.Producer(
        {"bootstrap.servers": address, "transactional.id": "of librdkafka", **QUIET}
    )
    producer.init_transactions(30)


def _kafka_python_begins(address: str) -> None:
    producer = kafka_python.KafkaProducer(
        bootstrap_servers=address, transactional_id="of kafka-python"
    )
    with closing(producer):
        producer.init_transactions()


def _aiokafka_begins(address: str) -> None:
    async def begin() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=address, transactional_id="of aiokafka"
        )
        try:
            async with asyncio.timeout(30):
                await producer.start()
        finally:
            await producer.stop()

    asyncio.run(begin())


@pytest.mark.parametrize(
    ("begin", "name", "refusal"),
    [
        (_librdkafka_begins, "of librdkafka", TRANSACTIONS_NOT_SERVED),
        (_kafka_python_begins, "of kafka-python", "UnsupportedVersion"),
        (_aiokafka_begins, "of aiokafka", "TransactionalIdAuthorizationFailed"),
    ],
)
def test_transactional_producers_end_at_once_and_the_broker_logs_their_ids(
    cluster: Cluster, begin: Callable[[str], None], name: str, refusal: str
) -> None:
    with pytest.raises(ERRORS, match=refusal):
        begin(cluster.address)
    assert f"{TRANSACTIONS_NOT_SERVED} '{name}'" in cluster.broker.log()


def test_keys_and_tls(tmp_path: Path) -> None:
    authority, port, secret = Authority(tmp_path / "ca"), free_port(), "k" * 30
    pair, key = authority.pair("clients"), tmp_path / "admin"
    key.touch(mode=0o600)
    key.write_text(secret)
    settings = {
        "tls_cert_file": pair.cert,
        "tls_key_file": pair.key,
        "security": "keys",
        "admin_key": f"@{key}",
    }
    with Broker(tmp_path, kafka_port=port, **settings) as broker:
        trusting = {"TIDELOG_KEY": secret, "TIDELOG_CA_FILE": str(authority.ca)}
        tidelog("topics", "create", "t", TIDELOG_URL=broker.base_url, **trusting)
        address = f"127.0.0.1:{port}"
        config = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "admin",
            "sasl.password": secret,
            "ssl.ca.location": str(authority.ca),
        }
        large = [bytes([n]) * 300_000 for n in range(20)]
        assert len(_produce(address, "t", large, **config)) == 20
        messages = _consume(address, "t", 20, **config)
        assert [message.value() for message in messages] == large
        errors: list[Any] = []
        wrong = librdkafka.Producer(
            {
                "bootstrap.servers": address,
                **config,
                **QUIET,
                "sasl.password": "x",
                "error_cb": errors.append,
            }
        )
        wait_until(lambda: bool(wrong.poll(0.1) or errors), "an error of the authentication")
        assert errors[0].code() == librdkafka.KafkaError._AUTHENTICATION
        with socket.create_connection(("127.0.0.1", port)) as plain:  # no TLS
            plain.sendall(framed(ApiVersionsRequest(), 0))
            plain.settimeout(20)
            with suppress(ConnectionError):
                assert plain.recv(1000)[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
        assert broker.stop() == 0


def test_workers_have_ports_and_node_ids_of_their_own(tmp_path: Path) -> None:
    port = free_port()
    with Broker(tmp_path, kafka_port=port, kafka_node_id=5, workers=2, **QUICK) as broker:
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", **QUIET})

        def brokers() -> dict[int, int]:
            nodes = admin.list_topics(timeout=20).brokers
            return {node.id: node.port for node in nodes.values()}

        wait_until(lambda: brokers() == {5: port + 1, 6: port + 2}, "both workers in the metadata")
        broker.create_topic("t", 4)
        offsets = _produce(f"127.0.0.1:{port}", "t", _values())
        assert len(offsets) == RECORDS


def test_a_broker_that_stops_loses_nothing(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    first = Broker(tmp_path / "1", f"file://{tmp_path}/s", kafka_port=ports[0], **QUICK)
    second = Broker(tmp_path / "2", f"file://{tmp_path}/s", kafka_port=ports[1], **QUICK)
    with first, second:
        first.create_topic("t", 4)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        errors, offsets = list[object](), list[tuple[int, int]]()

        def delivered(error: object, message: Any) -> None:
            if error is None:
                offsets.append((message.partition(), message.offset()))
            else:
                errors.append(error)

        producer = librdkafka.Producer(
            {"bootstrap.servers": addresses, "enable.idempotence": True, **QUIET}
        )
        for number in range(2000):
            producer.produce("t", b"%d" % number, on_delivery=delivered)
            producer.poll(0.001)
            if number == 700:
                assert first.stop() == 0
        assert producer.flush(60) == 0
        assert not errors
        assert len(offsets) == len(set(offsets)) == 2000
        records = second.records("t")
        assert sorted(int(record["value"]) for record in records) == [*range(2000)]


def _mutated(draw: random.Random, frames: list[bytes]) -> bytes:
    """A frame with some bytes changed, cut off, or repeated."""
    data = bytearray(draw.choice(frames))
    for _ in range(draw.randint(0, 4)):
        position = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[position] = draw.randrange(256)
            case 1:
                data[position : position + 1] = bytes(
                    draw.randrange(256) for _ in range(draw.randint(0, 5))
                )
            case 2:
                del data[position : position + draw.randint(1, 8)]
            case _:
                data[position:position] = draw.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 8))
        data = data or bytearray(b"\0")
    if draw.random() < 0.9:  # a true size, so that the message is read
        return struct.pack(">i", len(data)) + bytes(data)
    return bytes(data)


def _frames() -> list[bytes]:
    frames = []
    for message in every_message():
        if message.api_key is None or not message.__name__.endswith("Request"):
            continue
        for version in message.versions:
            draw = random.Random(f"{message.api_key} {version}")
            oracle = Interpreter(load(message.__name__), version)
            head = struct.pack(">hhih", message.api_key, version, 7, 1) + b"c"
            if version >= FIRST_FLEXIBLE.get(message.api_key, 1 << 15):
                head += b"\0"
            frames.append(head + oracle.write(oracle.invent(draw)))
    return frames


def test_hostile_frames(tmp_path: Path) -> None:
    """5,000 frames: no crash, no hang, memory bounded, other clients are served."""
    port = free_port()
    draw, frames = random.Random(24), _frames()
    with Broker(tmp_path, kafka_port=port) as broker:
        broker.create_topic("t")
        process = psutil.Process(broker.pid)
        _produce(f"127.0.0.1:{port}", "t", _values())
        old_bytes = process.memory_info().rss
        sent = 0
        while sent < 5_000:
            with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
                client.settimeout(0.01)
                for _ in range(draw.randint(1, 20)):
                    sent += 1
                    client.sendall(_mutated(draw, frames))
                with suppress(TimeoutError):
                    client.recv(1 << 16)
        _produce(f"127.0.0.1:{port}", "t", _values())
        assert process.memory_info().rss - old_bytes < 200 * 1024 * 1024
        log = broker.log()
        assert "Traceback" not in log, log
        assert broker.stop() == 0
