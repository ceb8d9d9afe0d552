"""The live brokers in listings of `brokers/`, by rank; the first is the sequencer.

`Member` is the content of a broker's object.

Pure. A broker overwrites its object every few seconds; a changed line in the listing is its
heartbeat. While all brokers answer each other, they write rarely, and an answer counts as a
heartbeat. The observer measures silence with its own clock, and only between two listings. Clocks
of two machines are never compared. If a listing fails or the observer is suspended, no other broker
looks dead because of this. The results affect only speed, so brokers may disagree about them.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.storage.core import format_levels
from tidelog.storage.core.log_settings import MembershipSettings
from tidelog.storage.store.object_store import ObjectInfo

__all__ = ["LivenessTracker", "Member", "MembershipSettings"]

PROTOCOL = 1
"""Version of the messages between brokers; brokers with another version are no peers."""
GAP_FACTOR = 2.0
"""At most this many planned pauses count as silence between two listings."""


class KafkaListener(msgspec.Struct, frozen=True, array_like=True):
    """Where clients of Kafka's protocol reach a broker, and its node id and zone."""

    host: str
    port: int
    node_id: int
    zone: str = ""


class Member(msgspec.Struct, frozen=True):
    """The content of `brokers/<id>.json`.

    `id` is random, one per process; `name` is for people. A request to `address` must carry
    `token`. Every process that can read `brokers/` can read the token. If security is on, then from
    level 2 on a request also needs a signature with the cluster's secret.
    """

    id: str
    name: str
    address: str
    token: str
    started_ms: int
    port: int = 0
    """The port for clients, on the host of `address`; 0 if not known."""
    protocol: int = PROTOCOL
    beat: int = 0
    level: int = format_levels.FIRST
    """The newest level of the format that the broker knows; version 0.1 did not write it."""
    kafka: tuple[KafkaListener, ...] = ()
    """The listener for Kafka's protocol, if there is one."""
    writes_rarely: bool = False
    """The broker answers beats, and writes this object rarely while its peers answer it, too. So
    the object's age says little: ask the broker. Versions before 0.3 did not write this field."""
    zone: str = ""

    @property
    def zone_name(self) -> str:
        """The broker's availability zone; earlier brokers name it with their Kafka listener."""
        return self.zone or next((listener.zone for listener in self.kafka), "")

    @property
    def number(self) -> int:
        """The numeric broker id in responses to clients; 1 stands for the responding broker."""
        return 2 + int(self.id[:7], 16)


class _Seen(NamedTuple):
    line: tuple[int, int]
    silent_s: float
    changes: int = 0
    is_heard: bool = False
    """Whether the broker answered after the last listing."""


class LivenessTracker:
    """The liveness of brokers, as one observer finds it in successive listings of `brokers/`."""

    def __init__(self, settings: MembershipSettings) -> None:
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self.looked_s = -math.inf
        """Boot time at which the last listing was requested."""

    def look(
        self,
        now_s: float,
        listing: Iterable[ObjectInfo],
        *,
        store_ms: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        """Process a listing that was requested at boot time `now_s`.

        `store_ms` is the time of the store's clock, if it is known. `pause_s` is the planned time
        since the last listing, if it is longer than the interval of heartbeats.
        """
        infos = list(listing)
        gap_s = min(
            now_s - self.looked_s, GAP_FACTOR * max(self._settings.heartbeat_interval_s, pause_s)
        )
        newest_ms = max((info.modified_ms for info in infos), default=0)
        newest_ms = max(newest_ms, store_ms)
        brokers: dict[str, _Seen] = {}
        for info in infos:
            line = (info.modified_ms, info.size)
            broker = self._seen.get(info.key)
            if broker is None:
                # Both times are by the store's clock. If an object is already old when it is first
                # listed, its broker counts as dead, until it answers.
                brokers[info.key] = _Seen(line, (newest_ms - info.modified_ms) / 1000)
            elif broker.line == line:
                silent_s = 0.0 if broker.is_heard else broker.silent_s + gap_s
                brokers[info.key] = _Seen(line, silent_s, broker.changes)
            else:
                brokers[info.key] = _Seen(line, 0.0, broker.changes + 1)
        self._seen = brokers
        self.looked_s = now_s

    def hear(self, key: str) -> None:
        """Process an answer, or a message, of a broker."""
        if key in self._seen:
            self._seen[key] = self._seen[key]._replace(silent_s=0.0, is_heard=True)

    def changes(self, key: str) -> int:
        """Return how many heartbeats the listings showed."""
        return self._seen[key].changes if key in self._seen else 0

    @property
    def listed(self) -> list[str]:
        """Keys of all brokers, live or not."""
        return list(self._seen)

    @property
    def live(self) -> list[str]:
        """Keys of brokers with a heartbeat within the timeout."""
        return self.silent_for_less_than(self._settings.member_timeout_s)

    def silent_for_less_than(self, seconds: float) -> list[str]:
        """Return keys of brokers with a heartbeat within this time."""
        return [key for key, broker in self._seen.items() if broker.silent_s < seconds]

    @property
    def forgotten(self) -> list[str]:
        """Keys of the objects to remove: their brokers have been silent for `sweep_after_s`."""
        after_s = self._settings.sweep_after_s
        return [key for key, broker in self._seen.items() if broker.silent_s >= after_s]


def ranked(cluster_id: str, members: Iterable[Member]) -> list[Member]:
    """Sort by rendezvous hash, the sequencer first.

    Brokers that agree on the live brokers agree on the order. If a broker comes or goes, the others
    keep their order.
    """
    return sorted(members, key=lambda member: weight(cluster_id, member.id), reverse=True)


def weight(task: str, broker_id: str) -> bytes:
    """Return the rendezvous hash. The live broker with the greatest weight has the task."""
    return hashlib.blake2b(f"{task}/{broker_id}".encode(), digest_size=16).digest()


def first_trusted(members: Sequence[Member], suspects: Mapping[str, object]) -> Member | None:
    return next((member for member in members if member.id not in suspects), None)
