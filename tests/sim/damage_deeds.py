"""The damage in the store of a simulated cluster (tests/sim/damage.py).

Each deed changes one object, and says which records that costs.
"""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from tests.sim.clients import TOPIC
from tests.sim.stores import files_at
from tests.sim.world import World
from tidelog.storage.codec import entry as entries
from tidelog.storage.core import object_keys

FAR, SPAN = 10_000, 1000
"""Numbers between the chain and a stray: no chain of a run comes so far (the longest has 1,200)."""


class Range(NamedTuple):
    topic: str
    partition: int
    offset: int
    end_offset: int


class Damaged(NamedTuple):
    """One damaged object: what was done to it, the bytes before, and the records that it costs."""

    what: str
    key: str
    before: bytes | None
    ranges: tuple[Range, ...] = ()


class Objects:
    """The objects of a world, and which of them are damaged, by key: now, and ever."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now: dict[str, Damaged] = {}
        self.ever: dict[str, Damaged] = {}

    def entries(self) -> list[str]:
        infos = self.world.bucket.infos(object_keys.WAL, "")
        return [
            info.key
            for info in infos
            if (object_keys.seq_of(info.key) or FAR**3) <= self.world.truth.seq
        ]

    def any_of(self, keys: list[str]) -> str | None:
        undamaged = [key for key in keys if key not in self.ever]
        return self.world.draws.choice(undamaged) if undamaged else None

    def changed(self, deed: str, key: str, new_body: bytes) -> Damaged:
        """The object with other bytes: what it costs are the chunks of tails that changed."""
        bucket = self.world.bucket
        old_body = bucket.read(key)
        bucket._objects[key] = (new_body, bucket._objects[key][1])  # damage has no time of its own
        ranges = tuple(
            Range(topic.name, number, run.base_offset, run.end_offset)
            for topic, number, partition in self.world.truth.partitions()
            for run in partition.tail
            if run.object_key == key
            and not run.is_lost
            and _part(old_body, run.position, run.size) != _part(new_body, run.position, run.size)
        )
        return Damaged(deed, key, old_body, ranges)

    def flipped(self, deed: str, key: str, start: int, end: int) -> Damaged:
        body = bytearray(self.world.bucket.read(key))
        body[self.world.draws.randrange(start, end)] ^= 1 << self.world.draws.randrange(8)
        return self.changed(deed, key, bytes(body))

    def kinds(self) -> set[str]:
        """The kinds of damage that there are now."""
        return {damage.what for damage in self.now.values()}


def _part(body: bytes, position: int, size: int) -> bytes:
    return body[position : position + size]


def version_of(key: str) -> tuple[str, int]:
    prefix, _, name = key.partition("/_delta_log/")
    return prefix, int(name.removesuffix(".json"))


# -- deeds


def _header(of: Objects) -> Damaged | None:
    key = of.any_of(of.entries())
    if key is None:
        return None
    return of.flipped("header", key, 0, entries.header_length(of.world.bucket.read(key), key))


def _copy(of: Objects) -> Damaged | None:
    key = of.any_of(of.entries())
    if key is None:
        return None
    body = of.world.bucket.read(key)
    return of.flipped("copy", key, len(body) - 12 - entries.header_length(body, key), len(body))


def _chunk_in(of: Objects, deed: str, prefix: str) -> Damaged | None:
    runs = {
        run.object_key: run
        for topic, _, partition in of.world.truth.partitions()
        if topic.name == TOPIC
        for run in partition.tail
        if not run.is_lost and run.object_key.startswith(prefix)
    }
    key = of.any_of(list(runs))
    if key is None:
        return None
    return of.flipped(deed, key, runs[key].position, runs[key].position + runs[key].size)


def _cut(of: Objects) -> Damaged | None:
    """Behind the header: the chunks there are gone, and the copy."""
    key = of.any_of(of.entries())
    if key is None:
        return None
    body = of.world.bucket.read(key)
    end = of.world.draws.randrange(entries.header_length(body, key), len(body))
    return of.changed("cut", key, body[:end])


def _emptied(of: Objects) -> Damaged | None:
    key = of.any_of(of.entries())
    if key is None:
        return None
    body = of.world.bucket.read(key)
    end = of.world.draws.choice([0, of.world.draws.randrange(entries.header_length(body, key))])
    return of.changed("emptied", key, body[:end])


def _checkpoint(of: Objects) -> Damaged | None:
    """One at a time: of two, an entry between them may be collected."""
    if "checkpoint" in of.kinds():
        return None
    key = of.any_of([info.key for info in of.world.bucket.infos(object_keys.CHECKPOINTS, "")][-2:])
    if key is None:
        return None
    body = of.world.bucket.read(key)
    if of.world.draws.random() < 0.3:
        return of.changed("checkpoint", key, body[: of.world.draws.randrange(len(body))])
    return of.flipped("checkpoint", key, 0, len(body))


def _segment(of: Objects) -> Damaged | None:
    """A bit of a page or of the footer, or the end is gone."""
    topic, bucket = of.world.truth.topic(TOPIC), of.world.bucket
    commits = bucket.tables.get(topic.prefix, [])
    files = {f"{topic.prefix}/{file.path}": file for file in files_at(commits, len(commits) - 1)}
    key = of.any_of(list(files))
    if key is None:
        return None
    body, file = bucket.read(key), files[key]
    footer = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    match of.world.draws.choice(["page", "footer", "cut"]):
        case "page":
            group: Any = pq.read_metadata(io.BytesIO(body)).row_group(0)
            columns = [group.column(index) for index in range(group.num_columns)]
            end = max(
                (column.dictionary_page_offset or column.data_page_offset)
                + column.total_compressed_size
                for column in columns
            )
            damage = of.flipped("segment", key, 4, end)
        case "footer":
            damage = of.flipped("segment", key, footer, len(body))
        case _:
            damage = of.changed("segment", key, body[: of.world.draws.randrange(len(body))])
    return damage._replace(
        ranges=(Range(TOPIC, file.partition, file.base_offset, file.end_offset),)
    )


def _commit(of: Objects) -> Damaged | None:
    if "commit" in of.kinds():
        return None
    topic, bucket = of.world.truth.topic(TOPIC), of.world.bucket
    infos = bucket.infos(f"{topic.prefix}/_delta_log/", "")
    key = of.any_of([info.key for info in infos if info.key.endswith(".json") and info.size > 50])
    if key is None:
        return None
    of.world.tables.damaged.add(version_of(key))
    return of.changed("commit", key, bucket.read(key)[:-20])  # within its last line


def _stray(of: Objects, deed: str, beyond: int) -> Damaged | None:
    key, bucket = object_keys.wal(of.world.truth.seq + beyond), of.world.bucket
    if key in bucket._objects:
        return None
    keys = of.entries()
    texts = [b"", b"not an entry", bucket.read(keys[-1]) if keys else b""]
    bucket.write(key, of.world.draws.choice(texts))
    return Damaged(deed, key, None)


DEEDS: dict[str, Callable[[Objects], Damaged | None]] = {
    "header": _header,
    "copy": _copy,
    "chunk": lambda of: _chunk_in(of, "chunk", object_keys.WAL),
    "upload": lambda of: _chunk_in(of, "upload", object_keys.DATA),
    "cut": _cut,
    "emptied": _emptied,
    "checkpoint": _checkpoint,
    "segment": _segment,
    "commit": _commit,
    "near stray": lambda of: _stray(of, "near stray", of.world.draws.randrange(1, 20)),
    "far stray": lambda of: _stray(of, "far stray", FAR + of.world.draws.randrange(SPAN)),
}
