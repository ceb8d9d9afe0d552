"""Deliberate faults of kept record batches (DESIGN 7), for tests/sim/mutations.py."""

from collections.abc import Iterator
from typing import Any

from tidelog.storage.codec import batches_as_sent
from tidelog.storage.codec.batches_as_sent import KeptBatches
from tidelog.storage.core.model import Part

Patch = tuple[Any, str, Any]


def _offsets_as_sent() -> list[Patch]:
    def placed(
        self: KeptBatches, base_offset: int, offset: int
    ) -> Iterator[tuple[int, list[Part]]]:
        for batch in self.batches:
            base_offset += batch.count
            if base_offset > offset:
                yield base_offset, [batch.data]

    return [(KeptBatches, "placed", placed)]


def _joined_backwards() -> list[Patch]:
    real = batches_as_sent.concat

    def concat(parts: Any) -> KeptBatches:
        return real(list(reversed(parts)))

    return [(batches_as_sent, "concat", concat)]


def _encoded_backwards() -> list[Patch]:
    real = batches_as_sent.encode

    def encode(batches: Any) -> Any:
        return real(list(reversed(batches)))

    return [(batches_as_sent, "encode", encode)]


MUTATIONS = (
    ("batches are served with the offsets that producers sent", _offsets_as_sent, ("brokers",), 5),
    ("the tail cache joins batches in the wrong order", _joined_backwards, ("brokers",), 150),
    ("a chunk has its batches in the wrong order", _encoded_backwards, ("brokers",), 100),
)
