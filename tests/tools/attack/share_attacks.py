"""Attacks on what the clients of Kafka's protocol share.

The memory of requests, the bytes of groups, fetch sessions and large answers.

Each attack is run by a client that has not logged in, a principal without rights, and one that may
read its own groups. Meanwhile a principal of another tenant joins groups of its own: it fails the
attack if the broker refuses it or does not answer in time.
"""

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from tests.service.kafka.wire import answer, framed
from tests.support.threads import Threads
from tests.tools.attack.brokers import Principal, SecuredBroker
from tests.tools.attack.kafka_attacks import joined
from tests.tools.attack.kafka_client import connected, received, request_on
from tests.tools.attack.measure import HOLD_S, VICTIM, Attack, scaled
from tests.tools.attack.probes import NEIGHBOUR
from tests.tools.attack.produce_attacks import NOBODY, STRANGER
from tidelog.service.kafka.messages import fetch, group_offsets, groups, handshake

MEMBER = "member"
"""A user that may read a topic, and the groups whose names begin with its own."""
TENANT_TIMEOUT_S = 5.0
TENANT_BYTES = 3_000
"""Metadata of the tenant's members. A broker takes memory of the pool for such a request."""
LONG_MS = 1_800_000
FAT_BYTES = 1_040_000
GROUPS_AT_ONCE = 6
MEMBERS_AT_ONCE = 300
ROUNDS_OF_MEMBERS = 168
"""They have more members than the bound of all groups."""
JOINS_S = 3.0
"""How long the attack waits for answers to its joins. Most joins wait for a SyncGroup."""
COMMITTERS = 20
PIPELINED = 10
UNKNOWN_PARTITIONS = 190_000
REQUEST_PARTITIONS = 25_000
SharedAttack = Callable[[float, SecuredBroker, Principal | None], str]


def attacker(broker: SecuredBroker, user: str) -> Principal | None:
    """Return the principal with its rights; None for a client that does not log in."""
    if user == NOBODY:
        return None
    principal = broker.principal(user)
    if user == MEMBER:
        broker.allow(user, "READ", "GROUP", user, "PREFIXED")
        broker.allow(user, "READ", "TOPIC", VICTIM)
    return principal


class _Tenant:
    """A principal that joins a group of its own again and again."""

    def __init__(self, broker: SecuredBroker) -> None:
        broker.allow(NEIGHBOUR, "READ", "GROUP", NEIGHBOUR, "PREFIXED")
        self._broker = broker
        self._principal = broker.neighbour
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0

    def run(self, end: threading.Event) -> None:
        for number in itertools.count():
            began_s = time.perf_counter()
            self.outcomes[self._join(number)] += 1
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)
            if end.wait(0.2):
                return

    def _join(self, number: int) -> str:
        timeouts = {"session_timeout_ms": 6_000, "rebalance_timeout_ms": 500}
        group = f"{NEIGHBOUR}-{time.monotonic_ns()}-{number}"
        try:
            with connected(self._broker, self._principal, timeout_s=TENANT_TIMEOUT_S) as connection:
                connection.sendall(joined(group, TENANT_BYTES, **timeouts))
                response = answer(received(connection), groups.JoinGroupResponse, 3)[1]
        except OSError as error:
            return repr(error)
        return f"error {response.error_code}" if response.error_code else ""

    def __str__(self) -> str:
        faults = {outcome: count for outcome, count in self.outcomes.items() if outcome}
        joins = f"{self.outcomes['']} joins of a tenant, slowest {self.slowest_s:.1f} s"
        return f"FAILED: the tenant: {faults}, {joins}" if faults else joins


def beside_a_tenant(attack: SharedAttack, user: str, scale: float, broker: SecuredBroker) -> str:
    """Run the attack while another tenant joins groups."""
    principal, tenant, end = attacker(broker, user), _Tenant(broker), threading.Event()
    with Threads(functools.partial(tenant.run, end), stop=end):
        try:
            answers = attack(scale, broker, principal)
        except ConnectionError:
            answers = "closed"
        time.sleep(0.5)
    return f"{answers}; {tenant}"


def _asked_on_many(
    broker: SecuredBroker, principal: Principal | None, requests: Sequence[bytes], hold_s: float
) -> int:
    """Send each request on a connection of its own, and hold the connections.

    Return the number of connections that the broker accepted.
    """
    count = 0
    with ExitStack() as stack:
        for request in requests:
            with suppress(OSError):
                connection = connected(broker, principal, timeout_s=5.0, reads=principal is None)
                stack.enter_context(connection)
                connection.sendall(request)
                count += 1
        time.sleep(hold_s)
    return count


def waiting_joins(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Large JoinGroups that wait for a member that does not join again."""
    timeouts = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000}
    names = [f"{MEMBER}-wait-{number}" for number in range(scaled(9, scale, 3))]
    for name in names:
        with connected(broker, principal) as connection:
            connection.sendall(joined(name, 10, **timeouts))
            received(connection)
    data = [joined(name, FAT_BYTES, **timeouts) for name in names * 3]
    return f"{_asked_on_many(broker, principal, data, HOLD_S * scale)} connections"


def proofs(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Many large SaslAuthenticate, whose refusals a broker delays."""
    shake = framed(handshake.SaslHandshakeRequest(mechanism="PLAIN"), 1)
    proof = framed(handshake.SaslAuthenticateRequest(auth_bytes=bytes(60_000)), 2)
    data = [shake + proof] * scaled(400, scale, 20)
    rounds = [_asked_on_many(broker, principal, data, 1.0) for _ in range(scaled(4, scale, 1))]
    return f"{sum(rounds)} connections"


def unsynced_groups(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Groups of large members that never send SyncGroup, and whose connections end."""
    timeouts = {"session_timeout_ms": LONG_MS, "rebalance_timeout_ms": LONG_MS}
    outcomes: Counter[int] = Counter()
    numbers = range(scaled(66, scale, 1))
    for first in range(0, len(numbers), GROUPS_AT_ONCE):
        with ExitStack() as stack:
            connections = []
            for number in numbers[first : first + GROUPS_AT_ONCE]:
                data = joined(f"{MEMBER}-fat-{number}", FAT_BYTES, **timeouts)
                for _ in range(4):
                    connection = stack.enter_context(connected(broker, principal, timeout_s=10.0))
                    connection.sendall(data)
                    connections.append(connection)
            until_s = time.monotonic() + JOINS_S
            for connection in connections:
                connection.settimeout(max(until_s - time.monotonic(), 0.01))
                with suppress(TimeoutError):
                    response = answer(received(connection), groups.JoinGroupResponse, 3)[1]
                    outcomes[response.error_code] += 1
    return f"joins by error {dict(outcomes)}"


def unsynced_members(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Groups of one small member each, which never sends SyncGroup.

    Its connection ends before the answer.
    """
    timeouts = {"session_timeout_ms": LONG_MS, "rebalance_timeout_ms": LONG_MS}
    count = 0
    for number in range(scaled(ROUNDS_OF_MEMBERS, scale, 1)):
        names = [f"{MEMBER}-thin-{number}-{name}" for name in range(MEMBERS_AT_ONCE)]
        data = [joined(name, 0, **timeouts) for name in names]
        count += _asked_on_many(broker, principal, data, 0.05)
    return f"{count} connections"


def described_groups(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Describe all groups of large members in one request, on connections that do not read too."""
    creations = unsynced_groups(scale, broker, principal)
    names = [f"{MEMBER}-fat-{number}" for number in range(scaled(66, scale, 1))]
    request = framed(groups.DescribeGroupsRequest(groups=names), 4)
    with connected(broker, principal) as connection:
        connection.sendall(request)
        size = len(received(connection))
    count = scaled(20, scale, 2)
    with ExitStack() as stack:
        for _ in range(count):
            unread = connected(broker, principal, timeout_s=10.0, reads=False)
            stack.enter_context(unread).sendall(request)
        time.sleep(HOLD_S * scale)
    return f"{creations}; {len(request)} bytes answered by {size}, {count} times unread"


def unknown_sessions(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Let a fetch session grow by partitions that do not exist, then ask with few bytes."""
    session = epoch = errors = 0
    with connected(broker, principal) as connection:
        for first in range(0, scaled(UNKNOWN_PARTITIONS, scale, 100), REQUEST_PARTITIONS):
            numbers = range(first, min(first + REQUEST_PARTITIONS, UNKNOWN_PARTITIONS))
            answer = request_on(
                connection, _fetch_of(session, epoch, numbers), fetch.FetchResponse, 12
            )
            session, epoch = session or answer.session_id, epoch + 1
            errors += answer.error_code != 0
        sizes = []
        for _ in range(scaled(10, scale, 2)):
            connection.sendall(framed(_fetch_of(session, epoch, ()), 12))
            sizes.append(len(received(connection)))
            epoch += 1
    return f"{errors} refused; answers of at most {max(sizes)} bytes"


def _fetch_of(session: int, epoch: int, numbers: Sequence[int]) -> fetch.FetchRequest:
    parts = [
        fetch.FetchPartition(partition=number, fetch_offset=0, partition_max_bytes=1)
        for number in numbers
    ]
    return fetch.FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        session_id=session,
        session_epoch=epoch,
        topics=[fetch.FetchTopic(topic="unknown", partitions=parts)] if parts else [],
    )


def deleted_offsets(scale: float, broker: SecuredBroker, principal: Principal | None) -> str:
    """Delete offsets of some of many groups: OffsetCommit with the offset -1 deletes one."""
    names = [f"{MEMBER}-offset-{number}" for number in range(scaled(30_000, scale, 20))]
    _committed(broker, principal, names, 0)
    deleted_names = names[: scaled(200, scale, 2)]
    _committed(broker, principal, deleted_names, -1)
    return f"{len(deleted_names)} deletions, {len(names)} groups"


def _committed(
    broker: SecuredBroker, principal: Principal | None, names: Sequence[str], offset: int
) -> None:
    """Commit an offset of each group, on some connections at once."""

    def commit(first: int) -> None:
        own = names[first::COMMITTERS]
        with connected(broker, principal) as connection:
            for begin in range(0, len(own), PIPELINED):
                requests = [_commit_of(name, offset) for name in own[begin : begin + PIPELINED]]
                connection.sendall(b"".join(requests))
                for _ in requests:
                    received(connection)

    with ThreadPoolExecutor(COMMITTERS) as pool:
        list(pool.map(commit, range(COMMITTERS)))


def _commit_of(group: str, offset: int) -> bytes:
    part = group_offsets.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=offset, committed_metadata=None
    )
    topic = group_offsets.OffsetCommitRequestTopic(name=VICTIM, partitions=[part])
    request = group_offsets.OffsetCommitRequest(group_id=group, member_id="", topics=[topic])
    return framed(request, 8)


def share_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    table = (
        *(waiting_joins, proofs, unsynced_groups, unsynced_members),
        *(described_groups, unknown_sessions, deleted_offsets),
    )
    return {
        f"shares: {attack.__name__.replace('_', ' ')}, {user}": functools.partial(
            beside_a_tenant, attack, user, scale
        )
        for attack in table
        for user in (NOBODY, STRANGER, MEMBER)
    }
