"""Deliberate faults of uploads in parts (wal.chunk_uploads), for tests/sim/mutations.py."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tests.sim.plans import Plan
from tidelog.storage.cluster import sequencer
from tidelog.storage.codec.entry import Draft
from tidelog.storage.core.log_settings import SequencerSettings
from tidelog.storage.wal import chunk_uploads, merged_drafts
from tidelog.storage.wal.chunk_uploads import ChunkUploads
from tidelog.storage.write.segment_parts import BegunPart, EncodedPart, SegmentParts

Patch = tuple[Any, str, Any]


def _parts_backwards() -> list[Patch]:
    real = SegmentParts.encode

    async def encode(self: SegmentParts, *arguments: Any) -> list[EncodedPart]:
        return [*reversed(await real(self, *arguments))]

    return [(SegmentParts, "encode", encode)]


def _keys_backwards() -> list[Patch]:
    real = merged_drafts.refer

    def refer(draft: Draft, objects: Sequence[tuple[str, Any]]) -> Draft:
        keys = [key for key, _ in reversed(objects)]
        return real(draft, [(key, bodies) for key, (_, bodies) in zip(keys, objects, strict=True)])

    return [(chunk_uploads, "refer", refer)]


def _old_parts_are_named() -> list[Patch]:
    return [
        (sequencer, "not_after_ms", lambda draft: math.inf),
        (ChunkUploads, "is_fresh", lambda self, draft: True),
    ]


def _withdrawn_requests_are_committed() -> list[Patch]:
    @contextlib.contextmanager
    def taken(self: SegmentParts, requests: Sequence[Any]) -> Iterator[list[BegunPart]]:
        begun, self._begun, self._begun_bytes = self._begun, [], 0
        try:
            yield begun
        finally:
            self._release(begun)

    return [(SegmentParts, "taken", taken), (SegmentParts, "drop", lambda self: None)]


def _uploads_parts(plan: Plan) -> bool:
    return plan.settings.sequencer.upload_bytes < SequencerSettings().upload_bytes


def _stops_between_parts(plan: Plan) -> bool:
    return "uploaded" in plan.troubles and _uploads_parts(plan)


MUTATIONS: tuple[tuple[Any, ...], ...] = (
    ("parts of a flush in the wrong order", _parts_backwards, ("disks",), 100, _uploads_parts),
    ("uploads are named in the wrong order", _keys_backwards, ("brokers",), 20, _uploads_parts),
    (
        "parts are named after the end of their time",
        _old_parts_are_named,
        ("sleepers",),
        60,
        _stops_between_parts,
    ),
    (
        "a part is committed without a look at its requests",
        _withdrawn_requests_are_committed,
        ("brokers",),
        60,
        _uploads_parts,
    ),
)
