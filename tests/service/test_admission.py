"""Admission: connections, shares of memory and clocks, in virtual time."""

import random

import pytest

from tidelog.service.formats.shared_pages import SHARED_BYTES_MAX
from tidelog.service.http.connection_admission import (
    BYTES_PER_S_MIN,
    CONNECTION_BYTES,
    LOG_LINES,
    LOG_PERIOD_S,
    LOOKED_MAX,
    LOOKED_OWNERS_MAX,
    WATCHED_MAX,
    Admission,
    Limits,
    Phase,
    address_max,
)
from tidelog.service.kafka.appends import UNPACKED_BYTES_MAX
from tidelog.service.kafka.connections import listener
from tidelog.service.kafka.connections.frame import DECODED_FACTOR
from tidelog.service.kafka.connections.request_memory import DECODED_PART
from tidelog.service.memory_pool import EVERYONE, MemoryPool, Share
from tidelog.service.peers.listener import PEER_BODY_BYTES_MAX
from tidelog.service.server.kafka import UNSENT_ALL_BYTES_MAX
from tidelog.service.server.open_files import KEPT_FILES, connection_limits
from tidelog.service.server.router import limits_of
from tidelog.service.server.service import other_bounds
from tidelog.service.settings.settings import Settings


class Client:
    def __init__(self, phase: Phase = Phase.IDLE, owner: str = "") -> None:
        self.phase = phase
        self.owner = owner
        self.progress = 0

    def observed(self) -> tuple[Phase, int]:
        return self.phase, self.progress


def limits(**chosen: float) -> Limits:
    small = {"connections_max": 6, "unproved_max": 6, "address_max": 6, "spare_max": 2}
    return Limits()._replace(**{**small, **chosen})


@pytest.fixture
def admission() -> Admission[Client]:
    return Admission(limits())


def ended(admission: Admission[Client], now_s: float) -> list[tuple[Client, Phase]]:
    """One whole round."""
    clients: list[tuple[Client, Phase]] = []
    is_last = False
    while not is_last:
        some, is_last = admission.overdue(now_s)
        clients += some
    return clients


@pytest.mark.parametrize("seed", range(30))
def test_a1_a2_shares_are_given_back_and_limits_kept(seed: int) -> None:
    rng = random.Random(seed)
    pool = MemoryPool(1000)
    shares = [Share(pool, EVERYONE) for _ in range(8)]
    for _ in range(2000):
        share = rng.choice(shares)
        before = share.size
        size = rng.choice((0, rng.randrange(400), rng.randrange(3000)))
        is_held = share.set(size)
        assert share.size == (size if is_held else before)
        assert is_held or size > before, "less always fits"
        assert pool.used == sum(share.size for share in shares)
        others = pool.used - share.size
        assert not is_held or size <= before or not others or pool.used <= pool.limit
    for share in shares:
        assert share.set(0)
    assert pool.used == 0
    assert pool.refused > 0


@pytest.mark.parametrize("seed", range(30))
def test_connections_are_bounded_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    bounds = limits(address_max=4, unproved_max=5)
    admission: Admission[Client] = Admission(bounds)
    opened: dict[Client, str] = {}
    proved: set[Client] = set()
    spare: set[Client] = set()
    for _ in range(3000):
        deed = rng.randrange(4)
        if deed <= 1:
            phase = rng.choice((Phase.IDLE, Phase.SERVED))
            client, address = Client(phase, rng.choice("pqr")), rng.choice("abc")
            closed_client = admission.arrive(client, address)
            opened[client] = address
            if admission.is_spare(client):
                spare.add(client)
            if closed_client is not None:
                if closed_client in proved:
                    owners = [proved_client.owner for proved_client in proved]
                    assert owners.count(closed_client.owner) > 1
                    assert closed_client.phase is Phase.IDLE
                proved.discard(closed_client)
                spare.discard(closed_client)
                del opened[closed_client]
        elif opened:
            client = rng.choice(list(opened))
            if deed == 2:
                admission.prove(client)
                if client not in spare:
                    proved.add(client)
            else:
                admission.leave(client)
                admission.leave(client)
                del opened[client]
                proved.discard(client)
                spare.discard(client)
        usual = [address for client, address in opened.items() if client not in spare]
        assert len(usual) <= bounds.connections_max
        assert all(usual.count(address) <= bounds.address_max for address in "abc")
        assert len(spare) <= bounds.spare_max
        assert len(usual) - len(proved) <= bounds.unproved_max
        assert admission.connections == len(opened)
    for client in opened:
        admission.leave(client)
    assert admission.connections == 0
    assert not admission._addresses
    assert not admission._spare
    everyone = admission._everyone
    left = (everyone.count, everyone.unproved, everyone._owners, everyone._by_size)
    assert not any(left)


def test_a3_new_connection_displaces_oldest_unproved(admission: Admission[Client]) -> None:
    clients = [Client() for _ in range(6)]
    for client in clients:
        assert admission.arrive(client, "a") is None
    admission.prove(clients[0])
    assert admission.arrive(Client(), "b") is clients[1]
    for client in clients:
        admission.prove(client) if client is not clients[1] else None
    assert admission.ended["displaced"] == 1


def test_connection_above_bound_is_spare(admission: Admission[Client]) -> None:
    for _ in range(6):
        client = Client(Phase.SERVED)
        admission.arrive(client, "a")
        admission.prove(client)
    spare = [Client(), Client(), Client()]
    assert [admission.arrive(client, "b") for client in spare] == [None, None, spare[0]]
    assert [admission.is_spare(client) for client in spare] == [False, True, True]
    admission.leave(client)
    assert admission.arrive(Client(), "c") is None
    assert admission.connections == 8


def proved(admission: Admission[Client], client: Client, address: str = "a") -> Client:
    """Let the connection arrive within the bounds, and prove it."""
    assert admission.arrive(client, address) is None
    admission.prove(client)
    return client


def test_a5_longest_idle_of_largest_owner_is_displaced(admission: Admission[Client]) -> None:
    small = [proved(admission, Client(owner="small")) for _ in range(2)]
    large = [proved(admission, Client(owner="large")) for _ in range(4)]
    large[0].phase = Phase.SERVED
    ended(admission, 0.0)
    ended(admission, 1.0)
    large[1].progress += 1
    ended(admission, 2.0)
    large[2].progress += 1  # since the last check
    new = Client()
    assert admission.arrive(new, "b") is large[3]
    assert not admission.is_spare(new)
    new.owner = "new"
    admission.prove(new)
    last = Client()
    assert admission.arrive(last, "b") is large[1]
    admission.prove(last)
    assert all(client in admission._seen for client in (*small, large[0], large[2]))


def test_a5_equal_share_is_kept(admission: Admission[Client]) -> None:
    for owner in "ppqqrr":
        proved(admission, Client(owner=owner))
    new, later = Client(), Client()
    assert admission.arrive(new, "b") is not None
    new.owner = "s"
    admission.prove(new)
    for owner in "tu":
        client = Client()
        assert admission.arrive(client, "b") is not None
        client.owner = owner
        admission.prove(client)
    assert admission.arrive(later, "b") is None
    assert admission.is_spare(later)


def test_a5_requests_under_way_are_not_displaced(admission: Admission[Client]) -> None:
    for phase in (Phase.SERVED, Phase.BODY, Phase.STREAM, Phase.ANSWER):
        proved(admission, Client(phase, "large"))
    idle = [proved(admission, Client(owner="small")) for _ in range(2)]
    new = Client()
    assert admission.arrive(new, "b") is None
    assert admission.is_spare(new), "only the larger owner has more than an equal share"
    proved_large = [client for client in admission._seen if client.owner == "large"]
    assert len(proved_large) == 4
    assert all(client in admission._seen for client in idle)


def test_a5_without_principals_address_is_owner() -> None:
    admission: Admission[Client] = Admission(limits(address_max=3))
    for address in ("a", "a", "a", "b", "b", "b"):
        proved(admission, Client(), address)
    spare = Client()
    assert admission.arrive(spare, "a") is None
    assert admission.is_spare(spare), "an address displaces no connection of its own"
    new = Client()
    assert admission.arrive(new, "c") is not None
    assert not admission.is_spare(new)


def test_a5_principal_behind_full_address_is_served() -> None:
    admission: Admission[Client] = Admission(limits(address_max=3))
    large = [proved(admission, Client(owner="large")) for _ in range(3)]
    proved(admission, Client(owner="large"), "b")
    new = Client()
    assert admission.arrive(new, "a") is large[0]
    assert not admission.is_spare(new)


def test_a5_search_for_idle_connection_is_short() -> None:
    looks = 0

    class Busy(Client):
        def observed(self) -> tuple[Phase, int]:
            nonlocal looks
            looks += 1
            return Phase.SERVED, 0

    most = 20 * LOOKED_MAX * LOOKED_OWNERS_MAX
    bounds = limits(connections_max=most, unproved_max=most, address_max=most)
    admission: Admission[Client] = Admission(bounds)
    for number in range(most):
        proved(admission, Busy(owner=f"p{number % 20}"))
    assert admission.arrive(Client(), "a") is None
    assert looks <= LOOKED_MAX * LOOKED_OWNERS_MAX


def test_address_has_never_all_connections_and_network_of_ipv6_is_one() -> None:
    assert [address_max(most) for most in (1, 2, 4, 100, 999, 1000, 10_000)] == [
        *(1, 2, 3, 75, 750),
        *(250, 2_500),
    ]
    admission: Admission[Client] = Admission(limits(address_max=2))
    for host in (1, 2):
        proved(admission, Client(), f"2001:db8::{host}")
    proved(admission, Client(), "2001:db8:0:1::1")
    admission.arrive(spare := Client(), "2001:db8::3%eth0")
    assert admission.is_spare(spare)
    proved(admission, Client(), "::ffff:10.0.0.1")
    assert "10.0.0.1" in admission._addresses


def test_connection_with_refused_requests_may_be_idle_as_long_as_others() -> None:
    """Else a balancer could send a request on a connection that the broker closes."""
    for idle_s, is_closed in ((75.0, False), (10.0, True)):
        admission: Admission[Client] = Admission(limits(unproved_idle_s=idle_s))
        admission.arrive(client := Client(), "a")
        client.progress = 1
        for now_s in (0.0, 0.0, 10.0):
            ended_now = ended(admission, now_s)
        assert bool(ended_now) is is_closed


def test_each_clock_ends_what_stands_still() -> None:
    bounds = limits()
    times = {
        Phase.HEAD: bounds.head_s,
        Phase.BODY: bounds.body_s,
        Phase.STREAM: bounds.stream_s,
        Phase.ANSWER: bounds.answer_s,
        Phase.IDLE: bounds.idle_s,
    }
    for phase, limit_s in times.items():
        admission: Admission[Client] = Admission(bounds)
        client = Client(phase)
        admission.arrive(client, "a")
        admission.prove(client)
        ended(admission, 0.0)
        ended(admission, 1.0)  # first seen
        assert ended(admission, limit_s) == []
        assert ended(admission, limit_s + 1.0) == [(client, phase)]
        assert admission.ended[phase.value] == 1


def test_unproved_connection_has_less_time(admission: Admission[Client]) -> None:
    client = Client()
    admission.arrive(client, "a")
    ended(admission, 0.0)
    ended(admission, 0.0)
    assert ended(admission, 9.0) == []
    assert ended(admission, 10.0) == [(client, Phase.IDLE)]


def test_body_needs_more_than_byte_now_and_then() -> None:
    bounds = limits()
    admission: Admission[Client] = Admission(bounds)
    slow, steady = Client(Phase.BODY), Client(Phase.BODY)
    for client in (slow, steady):
        admission.arrive(client, "a")
    clients: list[tuple[Client, Phase]] = []
    now_s = 0.0
    while not clients and now_s < 1000:
        now_s += 1.0
        slow.progress += 1
        steady.progress += 2 * BYTES_PER_S_MIN
        clients = ended(admission, now_s)
    assert clients == [(slow, Phase.BODY)]
    assert now_s <= bounds.body_s + 2


def test_a4_no_clock_runs_while_broker_works(admission: Admission[Client]) -> None:
    client = Client(Phase.BODY)
    admission.arrive(client, "a")
    for now_s in range(10_000):
        client.phase = Phase.SERVED if now_s % 20 > 10 else Phase.BODY
        assert ended(admission, float(now_s)) == []


def test_round_over_many_connections_is_in_pieces() -> None:
    many = 3 * WATCHED_MAX
    bounds = Limits(connections_max=many, unproved_max=many, address_max=many)
    admission: Admission[Client] = Admission(bounds)
    for _ in range(many):
        admission.arrive(Client(), "a")
    ended(admission, 0.0)
    pieces = [admission.overdue(0.0) for _ in range(4)]
    assert [is_last for _, is_last in pieces] == [False, False, False, True]
    assert len(ended(admission, 100.0)) == many


def test_lines_of_bad_requests_are_few_and_counted(admission: Admission[Client]) -> None:
    lines = [admission.line(0.0) for _ in range(100)]
    assert lines == [0] * LOG_LINES + [None] * (100 - LOG_LINES)
    assert admission.line(LOG_PERIOD_S) == 100 - LOG_LINES
    assert admission.line(LOG_PERIOD_S) == 0


def test_bound_of_memory_is_sum_of_limits() -> None:
    admission: Admission[Client] = Admission(
        limits(bodies_bytes_max=10, answers_bytes_max=20), {"cache": 30}
    )
    assert admission.bounds() == {
        "bodies": 10,
        "answers": 20,
        "connections": 8 * CONNECTION_BYTES,
        "cache": 30,
    }


@pytest.mark.parametrize("kafka_port", [0, 9092])
def test_bound_of_memory_has_every_part_that_holds_bytes_of_clients(kafka_port: int) -> None:
    settings = Settings(store="memory://", kafka_port=kafka_port)
    admission: Admission[Client] = Admission(limits_of(settings, 100), other_bounds(settings, 100))
    buffer = settings.buffer_bytes_max
    caches = settings.tail_cache_bytes + settings.read_cache_bytes
    http = buffer + buffer // 2 + settings.fetch_bytes_in_flight + UNPACKED_BYTES_MAX
    fixed = 4 * PEER_BODY_BYTES_MAX + SHARED_BYTES_MAX + 106 * CONNECTION_BYTES
    decoded = DECODED_FACTOR * (buffer // DECODED_PART)
    kafka = buffer + decoded + UNSENT_ALL_BYTES_MAX + 101 * listener.CONNECTION_BYTES
    assert sum(admission.bounds().values()) == http + caches + fixed + (kafka if kafka_port else 0)


@pytest.mark.parametrize("files", [64, 128, 256, 1024, 4096, 20_000, 1 << 20])
def test_descriptors_are_kept_for_store(files: int) -> None:
    divided = connection_limits(files, 10_000, 1_000)
    assert divided.clients <= 10_000
    assert divided.peers <= 1_000
    kept_files = files - divided.clients - divided.peers
    assert kept_files >= min(KEPT_FILES, files // 2)
    assert divided.backlog <= kept_files // 4
