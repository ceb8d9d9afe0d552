"""Attacks by bodies without records, which a broker parses on its event loop.

Large ones have less than 4 MiB.
"""

import functools
import gzip
from typing import Any, NamedTuple

from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import JSON, sent
from tests.tools.attack.measure import VICTIM, Attack, scaled
from tests.tools.attack.probes import TYPE
from tests.tools.attack.produce_attacks import NOBODY, STRANGER
from tests.tools.attack.share_attacks import MEMBER

CONFIGURER = "configurer"
"""A user that may alter the configs of the topic VICTIM."""
INSTANCE = f"/consumers/{MEMBER}/instances/i"
REQUESTS = 4


def object_of(item: bytes, count: int) -> bytes:
    """Return an object with many fields; `item` has a place for their number."""
    return b"{" + b",".join(item % number for number in range(count)) + b"}"


def list_of(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


class Bodies(NamedTuple):
    """Bodies of many items, the route that gets them, and who sends them."""

    user: str
    path: str
    body: bytes
    """With a place for the items."""
    item: bytes
    few: int
    """Items of a body that is below the limits of its route, or little above them."""
    many: int = 300_000
    is_object: bool = False
    is_packed: bool = False

    def of(self, count: int) -> bytes:
        return self.body % (object_of if self.is_object else list_of)(self.item, count)


TOPICS, FIELD = "{cluster}/topics", b'"%d":1'
PARTITION = b'{"topic":"%b","partition":0}' % VICTIM.encode()
OFFSET = PARTITION[:-1] + b',"offset":1}'
STAMP = PARTITION[:-1] + b',"timestamp":"2021-02-05T19:14:42Z"}'
RESET = b'{"topic_name":"%b","partition_id":0,"offset":1}' % VICTIM.encode()
TABLE = {
    "a login": Bodies(NOBODY, "/tidelog/v1/login", b"%b", FIELD, 98, is_object=True),
    "a new topic with many fields": Bodies(
        STRANGER, "/admin/topics", b"%b", FIELD, 3_900, is_object=True
    ),
    "a new topic with many configs, in gzip": Bodies(
        STRANGER,
        TOPICS,
        b'{"topic_name":"q","configs":%b}',
        b"{}",
        26_900,
        1_380_000,
        is_packed=True,
    ),
    "a new topic with many assignments": Bodies(
        STRANGER,
        TOPICS,
        b'{"topic_name":"q","replicas_assignments":%b}',
        b'"%d":[]',
        26_900,
        is_object=True,
    ),
    "many changes of configs": Bodies(
        CONFIGURER,
        f"{TOPICS}/{VICTIM}/configs:alter",
        b'{"data":%b}',
        b"{}",
        1_990,
        1_380_000,
        is_packed=True,
    ),
    "an assignment of an instance": Bodies(
        MEMBER, f"{INSTANCE}/assignments", b'{"partitions":%b}', PARTITION, 20_000, 140_000
    ),
    "a commit of an instance": Bodies(
        MEMBER, f"{INSTANCE}/offsets", b'{"offsets":%b}', OFFSET, 20_000, 100_000
    ),
    "times of an instance": Bodies(
        MEMBER, f"{INSTANCE}/positions", b'{"timestamps":%b}', STAMP, 20_000, 62_000
    ),
    "a reset of a group": Bodies(
        MEMBER,
        f"{{cluster}}/consumer-groups/{MEMBER}-2/offsets:reset",
        b'{"to":"OFFSETS","offsets":%b}',
        RESET,
        20_000,
        87_000,
    ),
    "topics of an instance": Bodies(
        MEMBER, f"{INSTANCE}/subscription", b'{"topics":%b}', b'"t"', 4_900, 1_000_000
    ),
}


def allow(broker: SecuredBroker, user: str) -> dict[str, str]:
    """Give the user its rights; return the headers of its requests."""
    if user == NOBODY:
        return {}
    if user == CONFIGURER:
        broker.allow(user, "ALTER_CONFIGS", "TOPIC", VICTIM)
    if user == MEMBER:
        broker.allow(user, "READ", "GROUP", user, "PREFIXED")
        broker.allow(user, "READ", "TOPIC", VICTIM)
    return broker.principal(user).headers


def bodies(name: str, scale: float, broker: SecuredBroker) -> str:
    """Send large bodies one after the other, then bodies that a broker parses."""
    row = TABLE[name]
    headers: dict[str, str] = {**JSON, **allow(broker, row.user)}
    requests: list[tuple[str, str, Any]] = []
    if row.path.startswith("/consumers"):
        headers |= TYPE
        created = {"content": b'{"name":"i"}', "headers": headers}
        requests.append(("POST", f"/consumers/{MEMBER}", created))
    coding = {"content-encoding": "gzip"} if row.is_packed else {}
    path = row.path.replace("{cluster}", broker.cluster_path)
    for items in (row.many, row.few):
        body = gzip.compress(row.of(items)) if row.is_packed else row.of(items)
        sending = {"content": body, "headers": {**headers, **coding}}
        requests += [("POST", path, sending)] * scaled(REQUESTS, scale, 1)
    return sent(broker, requests)


def body_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {f"bodies: {name}": functools.partial(bodies, name, scale) for name in TABLE}
