"""Signatures between brokers: what is not a broker's, or not for this one, is refused."""

from tests.support.clock import ManualClock
from tidelog.service.security.peer_signatures import (
    NUMBERS_KEPT,
    SENDERS_MAX,
    SIGNED_LEVEL,
    WINDOW_MS,
    Signatures,
)

SECRET = b"s" * 32
PATH = "/peers/v1/group-requests"
MESSAGE = b"the message"


def broker(
    name: str, clock: ManualClock, secret: bytes = SECRET, level: int = SIGNED_LEVEL
) -> Signatures:
    return Signatures(secret, name, clock.now_ms, lambda: level)


def signed(sender: Signatures, receiver: str = "b", message: bytes = MESSAGE) -> bytes:
    return sender.sign(receiver, PATH, message).encode()


def test_brokers_message_is_taken_once(clock: ManualClock) -> None:
    a, b = broker("a", clock), broker("b", clock)
    first, second = signed(a), signed(a)
    assert b.accepts(second, PATH, MESSAGE)
    assert b.accepts(first, PATH, MESSAGE)  # over another connection
    assert not b.accepts(first, PATH, MESSAGE)
    assert not b.accepts(second, PATH, MESSAGE)


def test_all_that_is_signed_counts(clock: ManualClock) -> None:
    a, b, c = (broker(name, clock) for name in "abc")
    header = signed(a)
    version, sender, number, sent_ms, mac = header.split(b".")
    assert not c.accepts(header, PATH, MESSAGE)  # replayed to another broker
    assert not b.accepts(header, PATH + "x", MESSAGE)
    assert not b.accepts(header, PATH, MESSAGE + b"x")
    for other in (
        [version, b"c", number, sent_ms, mac],
        [version, sender, number + b"1", sent_ms, mac],
        [version, sender, number, b"%d" % (int(sent_ms) + 1), mac],
        [version, sender, number, sent_ms, mac[:-1]],
        [version, sender, number, sent_ms, b"0" * 64],
        [b"v2", sender, number, sent_ms, mac],
        [version, sender, b"", sent_ms, mac],
        [version, sender, b"-1", sent_ms, mac],
        [version, sender, b"9" * 400, sent_ms, mac],
        [version, sender, b"\xd9\xa1", sent_ms, mac],
        [version, sender, number, sent_ms],
        [b""],
        [b"\xff"],
    ):
        assert not b.accepts(b".".join(other), PATH, MESSAGE)
    assert not b.accepts(signed(broker("a", clock, b"t" * 32)), PATH, MESSAGE)
    assert b.accepts(header, PATH, MESSAGE)


def test_clocks_may_differ_by_window(clock: ManualClock) -> None:
    a, b = broker("a", clock), broker("b", clock)
    before, other = signed(a), signed(a)
    clock.skew_ms += WINDOW_MS
    assert b.accepts(before, PATH, MESSAGE)
    clock.skew_ms += 1
    assert not b.accepts(other, PATH, MESSAGE)
    ahead, further = signed(a), signed(a)
    clock.skew_ms -= WINDOW_MS
    assert b.accepts(ahead, PATH, MESSAGE)
    clock.skew_ms -= 1
    assert not b.accepts(further, PATH, MESSAGE)


def test_number_is_never_taken_twice_however_many_come(clock: ManualClock) -> None:
    a, b = broker("a", clock), broker("b", clock)
    headers = [signed(a) for _ in range(3 * NUMBERS_KEPT)]
    accepted_headers = [header for header in headers if b.accepts(header, PATH, MESSAGE)]
    assert accepted_headers == headers
    assert not any(b.accepts(header, PATH, MESSAGE) for header in headers)
    assert len(b._senders["a"].seen) < 2 * NUMBERS_KEPT


def test_message_of_forgotten_sender_is_too_old(clock: ManualClock) -> None:
    b = broker("b", clock)
    old = signed(broker("a", clock))
    assert b.accepts(old, PATH, MESSAGE)
    for number in range(SENDERS_MAX - 1):
        assert b.accepts(signed(broker(f"s{number}", clock)), PATH, MESSAGE)
    assert not b.accepts(signed(broker("one more", clock)), PATH, MESSAGE)
    clock.skew_ms += 2 * WINDOW_MS + 1
    assert b.accepts(signed(broker("one more", clock)), PATH, MESSAGE)
    assert len(b._senders) == 1
    assert not b.accepts(old, PATH, MESSAGE)


def test_version_0_1_does_not_sign_and_shares_level_1_only(clock: ManualClock) -> None:
    assert broker("b", clock, level=SIGNED_LEVEL - 1).accepts(b"", PATH, MESSAGE)
    assert not broker("b", clock, level=SIGNED_LEVEL).accepts(b"", PATH, MESSAGE)
