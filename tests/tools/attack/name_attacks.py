"""Attacks by names and words: long names, words that an error quotes, waiting logins.

A principal without rights asks for the names; the logins wait behind others on their connection.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from tests.service.kafka.wire import framed
from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import JSON, V2, opened, sent
from tests.tools.attack.kafka_arrays import cut, names
from tests.tools.attack.kafka_client import sent as sent_by_kafka
from tests.tools.attack.measure import HOLD_S, MIB, Attack, scaled
from tests.tools.attack.produce_attacks import STRANGER
from tidelog.service.kafka.messages import handshake, metadata, produce, topics

CREATOR, SUBSCRIBER = "creator", "subscriber"
NAME = 31_000
"""Characters of a name in a request of Kafka."""


def path(scale: float, broker: SecuredBroker) -> str:
    headers = broker.principal(STRANGER).headers
    name = "x" * 60_000
    return sent(broker, [("GET", f"/topics/{name}", {"headers": headers})] * scaled(20, scale, 1))


def distinct_paths(scale: float, broker: SecuredBroker) -> str:
    """Ask for thousands of long names under several spellings of one credential.

    The names have four bytes a character.
    """
    secret = broker.principal(STRANGER).secret
    name = "x" * 60_000 + "\N{GRINNING FACE}"
    requests = [
        ("GET", f"/topics/{number}{name}", {"headers": {"authorization": f"{spelling} {secret}"}})
        for number in range(scaled(500, scale, 10))
        for spelling in ("Bearer", "bearer", "BEARER")
    ]
    return sent(broker, requests)


def transaction(body: Callable[[int], bytes], scale: float, broker: SecuredBroker) -> str:
    """Send transactions of up to 60 MiB."""
    headers = {**JSON, **broker.principal(STRANGER).headers}
    sending = {"content": body(scaled(60 * MIB, scale, MIB)), "headers": headers}
    return sent(broker, [("POST", f"{broker.cluster_path}/transactions", sending)] * 2)


def topic_name(size: int) -> bytes:
    return b'{"topics":[{"topic_name":"%b","records":[{"value":1}]}]}' % (b"x" * size)


def field(word: bytes, size: int) -> bytes:
    return b'{"%b":1}' % (word * (size // len(word)))


def kafka_requests(scale: float) -> Iterator[tuple[str, bytes]]:
    few, many = names(32, NAME), names(scaled(1_000, scale, 10), NAME)
    topics = [metadata.MetadataRequestTopic(name=name) for name in few]
    yield "Metadata", cut(metadata.MetadataRequest(topics=topics), 8)
    yield "FindCoordinator", cut(metadata.FindCoordinatorRequest(coordinator_keys=few), 4)
    data = [produce.TopicProduceData(name=name, partition_data=[]) for name in many]
    yield "Produce", framed(produce.ProduceRequest(acks=1, timeout_ms=1000, topic_data=data), 8)


def kafka(data: bytes, broker: SecuredBroker) -> str:
    return sent_by_kafka(broker, [data] * 2, 2, broker.principal(STRANGER))


def all_topics(scale: float, broker: SecuredBroker) -> str:
    """Ask for all topics on many connections.

    No topic is for this principal, and the answers have a few bytes.
    """
    broker.allow(CREATOR, "CREATE", "CLUSTER", "kafka-cluster")
    creation = [
        topics.CreatableTopic(
            name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        for name in names(scaled(2_500, scale, 25), 200)
    ]
    for first in range(0, len(creation), 500):
        request = topics.CreateTopicsRequest(
            topics=creation[first : first + 500], timeout_ms=60_000, validate_only=False
        )
        sent_by_kafka(broker, [framed(request, 7)], 1, broker.principal(CREATOR))
    listing = framed(metadata.MetadataRequest(topics=None), 9) * 10
    return sent_by_kafka(broker, [listing] * 30, 30, broker.principal(STRANGER))


def subscriptions(scale: float, broker: SecuredBroker) -> str:
    """Make many instances, each of which subscribes to a thousand topics that do not exist."""
    headers = {**V2, **broker.principal(SUBSCRIBER).headers}
    for kind in ("TOPIC", "GROUP"):
        broker.allow(SUBSCRIBER, "READ", kind, SUBSCRIBER, "PREFIXED")
    requests: list[tuple[str, str, Any]] = []
    for number in range(scaled(1_500, scale, 3)):
        group = f"/consumers/{SUBSCRIBER}-{number}"
        absent = [f"{SUBSCRIBER}-{number}-{topic:0180}" for topic in range(1_000)]
        subscription = {"json": {"topics": absent}, "headers": headers}
        requests += [
            ("POST", group, {"json": {"name": "i"}, "headers": headers}),
            ("POST", f"{group}/instances/i/subscription", subscription),
        ]
    return sent(broker, requests)


def logins(scale: float, broker: SecuredBroker) -> str:
    """Many logins on each connection: the answer to a wrong key takes a second."""
    body = b'{"key":"a"}'
    head = b"POST /tidelog/v1/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = b"%bContent-Length: %d\r\n%b\r\n%b" % (head, len(body), b"a:\r\n" * 95, body)
    with ExitStack() as stack:
        for connection in opened(broker, scaled(1_000, scale, 10), stack):
            connection.sendall(request * 100)
        time.sleep(HOLD_S * scale)
    return ""


def handshakes(scale: float, broker: SecuredBroker) -> str:
    """Small requests without pause, on connections that do not log in."""
    frame = framed(handshake.SaslHandshakeRequest(mechanism="PLAIN"), 1)
    data = frame * (200_000 // len(frame))
    until_s = time.monotonic() + HOLD_S * scale
    with ExitStack() as stack:
        port = int(str(broker.settings["kafka_port"]))
        connections = list(opened(broker, scaled(400, scale, 10), stack, port))
        for connection in connections:
            connection.setblocking(False)
        rounds = 0
        while time.monotonic() < until_s or not rounds:
            for connection in connections:
                with suppress(OSError):
                    connection.send(data)
                with suppress(OSError):
                    connection.recv(MIB)
            rounds += 1
            time.sleep(0.05)
    return ""


def name_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    words = functools.partial(field, b"ab ")
    return {
        "names: a path": functools.partial(path, scale),
        "names: distinct paths": functools.partial(distinct_paths, scale),
        "names: a topic of a transaction": functools.partial(transaction, topic_name, scale),
        "names: a field of words": functools.partial(transaction, words, scale),
        **{f"names: {api}": functools.partial(kafka, data) for api, data in kafka_requests(scale)},
        "names: all topics": functools.partial(all_topics, scale),
        "names: subscriptions": functools.partial(subscriptions, scale),
        "names: logins behind others": functools.partial(logins, scale),
        "names: handshakes without pause": functools.partial(handshakes, scale),
    }
