"""Signatures of messages between brokers, with the cluster's secret.

A message with the token of a liveness object proves only that its sender can read `brokers/`. A
signature also proves that the sender has the cluster's secret, and that the message is unchanged,
is for the process that receives it, and was sent lately and only once. The signature covers the
path, the ids of receiver and sender, a number, the time and the whole message. So if the message
names a principal, a broker of the cluster authenticated this principal.

Times are the store's (storage.wal.store_time), which all brokers share. Numbers of a sender may
arrive out of order, because requests go over several connections. A receiver remembers the newest
NUMBERS_KEPT numbers of each sender. It refuses a number that it has seen, and a number that is at
least NUMBERS_KEPT lower than the newest. It forgets a sender that sends nothing for two windows
(WINDOW_MS). By then, the sender's older messages are refused for their age.

Version 0.1 neither signs nor verifies. Its brokers cannot share a cluster whose level is
SIGNED_LEVEL: from that level on, brokers refuse a message without a signature.
"""

import hashlib
import hmac
from collections.abc import Callable
from typing import NamedTuple

HEADER = "tidelog-signature"
VERSION = "v1"
PURPOSE = b"tidelog messages between brokers"
SIGNED_LEVEL = 2
WINDOW_MS = 60_000
"""Greatest age of a message, and greatest lead of its sender's clock."""
NUMBERS_KEPT = 4096
SENDERS_MAX = 10_000
"""Senders that a broker remembers for two windows (I10). At the bound, it refuses messages of new
senders."""
_PARTS = 5
_DIGITS_MAX = 18


class _Sent(NamedTuple):
    sender: str
    number: int
    sent_ms: int
    mac: str


class _SeenNumbers:
    """The numbers of one sender that a receiver has seen."""

    __slots__ = ("heard_ms", "newest", "seen")

    def __init__(self, now_ms: int) -> None:
        self.newest = -1
        self.seen: set[int] = set()
        self.heard_ms = now_ms

    def take(self, number: int, now_ms: int) -> bool:
        """Return whether the number is new, and remember it."""
        if number in self.seen or number <= self.newest - NUMBERS_KEPT:
            return False
        self.heard_ms = now_ms
        self.seen.add(number)
        self.newest = max(self.newest, number)
        if len(self.seen) >= 2 * NUMBERS_KEPT:
            oldest = self.newest - NUMBERS_KEPT
            self.seen = {seen_number for seen_number in self.seen if seen_number > oldest}
        return True


class Signatures:
    """The signatures of one broker with security on.

    Owned by one event loop. `now_ms` returns the store's time, `level` returns the level of the
    cluster's format.
    """

    def __init__(
        self, secret: bytes, me: str, now_ms: Callable[[], int], level: Callable[[], int]
    ) -> None:
        self._key = hmac.digest(secret, PURPOSE, "sha256")
        self._me = me
        self._now_ms = now_ms
        self._level = level
        self._number = 0
        self._senders: dict[str, _SeenNumbers] = {}

    def sign(self, receiver: str, path: str, message: bytes) -> str:
        """Return the header's value for a message to the broker with the id `receiver`."""
        self._number += 1
        sent = _Sent(self._me, self._number, self._now_ms(), "")
        mac = self._mac(receiver, path, sent, message)
        return f"{VERSION}.{sent.sender}.{sent.number}.{sent.sent_ms}.{mac}"

    def accepts(self, header: bytes, path: str, message: bytes) -> bool:
        """Whether this broker accepts the message. Below SIGNED_LEVEL, it accepts every message."""
        return self.is_valid(header, path, message) or self._level() < SIGNED_LEVEL

    def is_valid(self, header: bytes, path: str, message: bytes) -> bool:
        """Whether a broker of this cluster signed the message for this one.

        True only once for each message.
        """
        sent = _parsed(header)
        if sent is None or not hmac.compare_digest(
            self._mac(self._me, path, sent, message), sent.mac
        ):
            return False
        now_ms = self._now_ms()
        if abs(now_ms - sent.sent_ms) > WINDOW_MS:
            return False
        sender = self._senders.get(sent.sender)
        if sender is None:
            self._forget_silent(now_ms)
            if len(self._senders) >= SENDERS_MAX:
                return False
            sender = self._senders[sent.sender] = _SeenNumbers(now_ms)
        return sender.take(sent.number, now_ms)

    def _forget_silent(self, now_ms: int) -> None:
        for name in [
            name
            for name, sender in self._senders.items()
            if now_ms - sender.heard_ms > 2 * WINDOW_MS
        ]:
            del self._senders[name]

    def _mac(self, receiver: str, path: str, sent: _Sent, message: bytes) -> str:
        head = f"{VERSION}\n{path}\n{receiver}\n{sent.sender}\n{sent.number}\n{sent.sent_ms}\n"
        signed = hmac.new(self._key, head.encode(), hashlib.sha256)
        signed.update(message)
        return signed.hexdigest()


def _parsed(header: bytes) -> _Sent | None:
    parts = header.decode("latin-1").split(".") if header.isascii() else []
    if len(parts) != _PARTS or parts[0] != VERSION:
        return None
    _, sender, number, sent_ms, mac = parts
    if not all(text.isdigit() and len(text) <= _DIGITS_MAX for text in (number, sent_ms)):
        return None
    return _Sent(sender, int(number), int(sent_ms), mac)
