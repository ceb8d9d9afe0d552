"""The hash of store, brokers and answers at rest: runs with equal ones go on alike.

Times and drawn ids are left out: acts begin at the same times in each run, and an id is known by
its first appearance. Everything else counts.
"""

import hashlib
import re
from typing import Any

import msgspec

from tests.explore.script import ACT_S, Cast
from tests.sim.history import to_line
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.codec import entry as entries
from tidelog.storage.core import object_keys

_ID = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"\d{13,}(?!\d*\.parquet|\d*-)")
_ID_BYTES = frozenset({16, 32})
_TIME_MIN = 10**12


class _Names:
    """Ids by their first appearance."""

    def __init__(self) -> None:
        self._known: dict[str | bytes, int] = {}

    def name(self, unique_id: str | bytes) -> str:
        return f"#{self._known.setdefault(unique_id, len(self._known))}"

    def text(self, text: str) -> str:
        return _ID.sub(lambda match: self.name(bytes.fromhex(match[0])), text)

    def plain(self, value: Any) -> Any:
        """A tree of MessagePack without ids and times."""
        match value:
            case bytes():
                return self.name(value) if len(value) in _ID_BYTES else value
            case str():
                return self.text(value)
            case bool():
                return value
            case int():
                return "time" if value > _TIME_MIN else value
            case list() | tuple():
                return [self.plain(item) for item in value]
            case dict():
                return {self.plain(key): self.plain(item) for key, item in value.items()}
            case _:
                return value


def digest(cast: Cast) -> bytes:
    names = _Names()
    world = cast.world
    answers = [
        names.text(str({**msgspec.json.decode(to_line(event)), "at": 0}))
        for event in world.recorder.events
    ]
    objects = [
        (names.text(key), (at_ms - TIME_MS) // int(ACT_S * 1000), _content(names, key, body))
        for key, (body, at_ms) in sorted(world.bucket._objects.items())
        if not key.startswith((object_keys.BROKERS, object_keys.PROBE))
    ]
    brokers = [
        (slot, broker.process.is_stopped, _broker(names, broker.log))
        for slot, broker in sorted(cast.slots.items())
        if not broker.process.is_dead
    ]
    dead = [slot for slot, broker in cast.slots.items() if broker.process.is_dead]
    held_requests = [
        (request.name, names.plain(_decoded(request.body)) if request.body else "")
        for request in cast.stage.held
    ]
    whole = repr((answers, objects, brokers, dead, held_requests, cast.ends, len(world.bugs)))
    return hashlib.blake2b(whole.encode(), digest_size=16).digest()


def _content(names: _Names, key: str, body: bytes) -> object:
    if key.startswith(object_keys.WAL):
        return names.plain(_decoded(body))
    if key.startswith(object_keys.CHECKPOINTS):
        return _state(names, body[12:])
    if key.endswith(".json"):
        return _TIME.sub("time", names.text(body.decode()))
    return _hash(body)


def _decoded(body: bytes) -> object:
    """An entry: its header, and a hash of its chunks."""
    length = entries.header_length(body, "")
    copy = len(body) - length - 12 if body.endswith(entries.COPY_MAGIC) else len(body)
    return [msgspec.msgpack.decode(body[16:length]), _hash(body[length:copy])]


def _state(names: _Names, encoded: bytes) -> object:
    state = msgspec.msgpack.decode(encoded)
    state += [None] * (17 - len(state))
    # The times in idempotency keys, in marks of drafts, and elapsed time.
    state[7] = [[key, *fields[1:]] for key, *fields in state[7]]
    state[12] = [mark[:2] for mark in state[12] or []]
    state[14] = None
    state[15] = None
    return names.plain(state)


def _broker(names: _Names, log: Broker) -> object:
    wal, sequencer = log._log.wal, log._sequencer
    tables = [
        (names.text(key), open_table.table.version)
        for key, open_table in log._log.tables._open.items()
    ]
    return (
        _state(names, wal._state.encode()),
        wal._is_void(),
        len(wal._offers.numbers()),
        sequencer._number,
        names.text(sequencer.membership.me.id),
        [names.text(member.id) for member in sequencer.membership.ranking],
        sorted(names.text(peer_id) for peer_id in sequencer.announcer.suspects),
        sorted(sequencer.announcer._failures.values()),
        len(sequencer._queue),
        wal.clone_fence._fence is not None,
        len(log._log.writer._failures),
        wal._checkpoints._seq,
        tables,
        sorted(log._log.sealer._set_aside.values()),
        sorted(log._log.tables.doubts),
    )


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
