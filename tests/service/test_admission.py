"""Admission: connections, shares of memory and clocks, in virtual time."""

import random

import pytest

from tidelog.service.formats.shared_pages import SHARED_BYTES_MAX
from tidelog.service.http.admission import (
    BYTES_PER_S_MIN,
    CONNECTION_BYTES,
    LOG_LINES,
    LOG_PERIOD_S,
    WATCHED_MAX,
    Admission,
    Limits,
    Phase,
)
from tidelog.service.kafka.appends import UNPACKED_BYTES_MAX
from tidelog.service.kafka.connections.frame import DECODED_FACTOR, DECODED_PART
from tidelog.service.memory_pool import EVERYONE, MemoryPool, Share
from tidelog.service.peers.listener import PEER_BODY_BYTES_MAX
from tidelog.service.server.kafka import UNSENT_ALL_BYTES_MAX
from tidelog.service.server.open_files import KEPT_FILES, connection_limits
from tidelog.service.server.router import limits_of
from tidelog.service.server.serve import other_bounds
from tidelog.service.settings import Settings


class Client:
    """A connection as a test sets it."""

    def __init__(self, phase: Phase = Phase.IDLE) -> None:
        self.phase = phase
        self.progress = 0

    def observed(self) -> tuple[Phase, int]:
        return self.phase, self.progress


def limits(**chosen: float) -> Limits:
    small = {"connections_max": 6, "unproved_max": 6, "address_max": 6, "spare_max": 2}
    return Limits()._replace(**{**small, **chosen})  # type: ignore[arg-type]


def ended(admission: Admission[Client], now_s: float) -> list[tuple[Client, Phase]]:
    """One whole round."""
    found: list[tuple[Client, Phase]] = []
    is_last = False
    while not is_last:
        some, is_last = admission.overdue(now_s)
        found += some
    return found


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
            client, address = Client(), rng.choice("abc")
            gone = admission.arrive(client, address)
            opened[client] = address
            if admission.is_spare(client):
                spare.add(client)
            if gone is not None:
                assert gone not in proved
                spare.discard(gone)
                del opened[gone]
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
    assert not admission._unproved
    assert not admission._spare


def test_a3_a_new_connection_displaces_the_oldest_unproved() -> None:
    admission: Admission[Client] = Admission(limits())
    clients = [Client() for _ in range(6)]
    for client in clients:
        assert admission.arrive(client, "a") is None
    admission.prove(clients[0])
    assert admission.arrive(Client(), "b") is clients[1]
    for client in clients:
        admission.prove(client) if client is not clients[1] else None
    assert admission.ended["displaced"] == 1


def test_a_connection_above_the_bound_is_spare() -> None:
    admission: Admission[Client] = Admission(limits())
    for _ in range(6):
        client = Client()
        admission.arrive(client, "a")
        admission.prove(client)
    spare = [Client(), Client(), Client()]
    assert [admission.arrive(client, "b") for client in spare] == [None, None, spare[0]]
    assert [admission.is_spare(client) for client in spare] == [False, True, True]
    admission.leave(client)
    assert admission.arrive(Client(), "c") is None
    assert admission.connections == 8


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


def test_an_unproved_connection_has_less_time() -> None:
    admission: Admission[Client] = Admission(limits())
    client = Client()
    admission.arrive(client, "a")
    ended(admission, 0.0)
    ended(admission, 0.0)
    assert ended(admission, 9.0) == []
    assert ended(admission, 10.0) == [(client, Phase.IDLE)]


def test_a_body_needs_more_than_a_byte_now_and_then() -> None:
    bounds = limits()
    admission: Admission[Client] = Admission(bounds)
    slow, steady = Client(Phase.BODY), Client(Phase.BODY)
    for client in (slow, steady):
        admission.arrive(client, "a")
    found: list[tuple[Client, Phase]] = []
    now_s = 0.0
    while not found and now_s < 1000:
        now_s += 1.0
        slow.progress += 1
        steady.progress += 2 * BYTES_PER_S_MIN
        found = ended(admission, now_s)
    assert found == [(slow, Phase.BODY)]
    assert now_s <= bounds.body_s + 2


def test_a4_no_clock_runs_while_the_broker_works() -> None:
    admission: Admission[Client] = Admission(limits())
    client = Client(Phase.BODY)
    admission.arrive(client, "a")
    for now_s in range(10_000):
        client.phase = Phase.SERVED if now_s % 20 > 10 else Phase.BODY
        assert ended(admission, float(now_s)) == []


def test_a_round_over_many_connections_is_in_pieces() -> None:
    many = 3 * WATCHED_MAX
    bounds = Limits(connections_max=many, unproved_max=many, address_max=many)
    admission: Admission[Client] = Admission(bounds)
    for _ in range(many):
        admission.arrive(Client(), "a")
    ended(admission, 0.0)
    pieces = [admission.overdue(0.0) for _ in range(4)]
    assert [is_last for _, is_last in pieces] == [False, False, False, True]
    assert len(ended(admission, 100.0)) == many


def test_lines_of_bad_requests_are_few_and_counted() -> None:
    admission: Admission[Client] = Admission(limits())
    lines = [admission.line(0.0) for _ in range(100)]
    assert lines == [0] * LOG_LINES + [None] * (100 - LOG_LINES)
    assert admission.line(LOG_PERIOD_S) == 100 - LOG_LINES
    assert admission.line(LOG_PERIOD_S) == 0


def test_the_bound_of_memory_is_the_sum_of_the_limits() -> None:
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
def test_the_bound_of_memory_has_every_part_that_holds_bytes_of_clients(kafka_port: int) -> None:
    settings = Settings(store="memory://", kafka_port=kafka_port)
    admission: Admission[Client] = Admission(limits_of(settings, 100), other_bounds(settings, 100))
    buffer = settings.buffer_bytes_max
    caches = settings.tail_cache_bytes + settings.read_cache_bytes
    http = buffer + buffer // 2 + settings.fetch_bytes_in_flight + UNPACKED_BYTES_MAX
    fixed = 4 * PEER_BODY_BYTES_MAX + SHARED_BYTES_MAX + 106 * CONNECTION_BYTES
    decoded = DECODED_FACTOR * (buffer // DECODED_PART)
    kafka = buffer + decoded + UNSENT_ALL_BYTES_MAX + 101 * CONNECTION_BYTES
    assert sum(admission.bounds().values()) == http + caches + fixed + (kafka if kafka_port else 0)


@pytest.mark.parametrize("files", [64, 128, 256, 1024, 4096, 20_000, 1 << 20])
def test_descriptors_are_kept_for_the_store(files: int) -> None:
    divided = connection_limits(files, 10_000, 1_000)
    assert divided.clients <= 10_000
    assert divided.peers <= 1_000
    kept = files - divided.clients - divided.peers
    assert kept >= min(KEPT_FILES, files // 2)
    assert divided.backlog <= kept // 4
