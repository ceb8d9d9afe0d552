"""Many followers of a principal's own topic: each commit wakes all of them."""

import functools
import time
from collections import Counter
from contextlib import ExitStack

from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import opened, sent
from tests.tools.attack.measure import HOLD_S, Attack, scaled
from tests.tools.attack.probes import TYPE

FOLLOWER = "follower"
FOLLOWERS_LEAST = 40


def followed(partitions: int, scale: float, broker: SecuredBroker) -> str:
    """Follow a topic with as many streams as the broker accepts, then produce to all partitions."""
    topic = f"{FOLLOWER}-{time.monotonic_ns()}"
    broker.create_topic(topic, partitions)
    principal = broker.principal(FOLLOWER)
    for operation in ("READ", "WRITE"):
        broker.allow(FOLLOWER, operation, "TOPIC", topic)
    head = f"GET /topics/{topic}/records?offset=latest HTTP/1.1\r\nHost: x\r\n"
    rights = f"Authorization: {principal.headers['authorization']}\r\n"
    data = f"{head}{rights}Accept: text/event-stream\r\n\r\n".encode()
    records = ",".join(f'{{"partition":{number},"value":1}}' for number in range(partitions))
    keywords = {"content": f'{{"records":[{records}]}}', "headers": TYPE | principal.headers}
    statuses: Counter[str] = Counter()
    with ExitStack() as stack:
        for connection in opened(broker, scaled(1_000, scale, FOLLOWERS_LEAST), stack):
            connection.sendall(data)
            statuses[connection.recv(16).decode().split(" ")[1]] += 1
        statuses_of_produce = sent(
            broker, [("POST", f"/topics/{topic}", keywords)] * scaled(10, scale, 3)
        )
        time.sleep(HOLD_S * scale)
    return f"followers: {dict(sorted(statuses.items()))}; {statuses_of_produce}"


def follow_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {
        f"followers of {partitions} partitions": functools.partial(followed, partitions, scale)
        for partitions in (8, 256)
    }
