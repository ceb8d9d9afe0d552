"""Drafts that are merged into one, and drafts whose bytes are in objects of their own. Pure.

`parts` cuts the bytes of a draft's chunks into the bodies of such objects, and `refer` replaces the
bytes by the objects' keys.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from tidelog.storage.codec.entry import Commit, Draft, DraftId
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import AnyAction, Append, Chunk
from tidelog.storage.core.model import Part


def merge(drafts: Sequence[Draft]) -> Draft:
    """Merge drafts into one: commits in order, chunks one after the other.

    Drafts without `origins`, which are the writer's own, must come last.
    """
    if len(drafts) == 1:
        return drafts[0]
    own = [not draft.origins for draft in drafts]
    assert own == sorted(own), "own commits must come after the commits of forwarded drafts"
    commits: list[Commit] = []
    chunks: list[Chunk] = []
    bodies: list[Part] = []
    origins: list[DraftId] = []
    position = header_bytes = 0
    for draft in drafts:
        first = len(chunks)
        chunks += [_moved(chunk, position) for chunk in draft.chunks]
        commits += (
            [_renumbered(commit, first) for commit in draft.commits] if first else draft.commits
        )
        origins += draft.origins
        bodies += draft.bodies
        position += sum(len(body) for body in draft.bodies)
        header_bytes += draft.header_bytes
    return Draft(commits, chunks, bodies, origins, header_bytes=header_bytes)


def parts(draft: Draft, part_bytes: int) -> list[list[Part]]:
    """Cut the bodies of a draft into the bodies of objects of about `part_bytes` each, in order.

    Each body must be one chunk, which stays whole.
    """
    left_bytes = sum(map(len, draft.bodies))
    left_objects = max(round(left_bytes / part_bytes), 1)
    objects: list[list[Part]] = [[]]
    size = 0
    for body in draft.bodies:
        if size and len(body) and size >= left_bytes / left_objects:
            left_bytes, left_objects, size = left_bytes - size, max(left_objects - 1, 1), 0
            objects.append([])
        objects[-1].append(body)
        size += len(body)
    return objects


def refer(draft: Draft, objects: Sequence[tuple[str, Sequence[Part]]]) -> Draft:
    """Return the draft without its bodies.

    Its chunks are in `objects`: for each, its key, and the bodies that it contains, in order. Each
    body is one chunk.
    """
    places = iter(
        (key, position)
        for key, bodies in objects
        for position in accumulate((len(body) for body in bodies[:-1]), initial=0)
    )
    chunks = [chunk if chunk.data else _placed(chunk, *next(places)) for chunk in draft.chunks]
    return draft._replace(chunks=chunks, bodies=[])


def not_after_ms(draft: Draft) -> float:
    """Return the elapsed time in ms after which no entry may include the draft.

    Its uploads may be collected then (FORMAT rule 8). If the draft has no uploads, return infinity.
    """
    keys = {chunk.data for chunk in draft.chunks if chunk.data}
    ends = map(object_keys.data_not_after_ms, keys)
    return min((end for end in ends if end is not None), default=math.inf)


def _placed(chunk: Chunk, key: str, position: int) -> Chunk:
    return msgspec.structs.replace(chunk, data=key, position=position)


def _moved(chunk: Chunk, by: int) -> Chunk:
    if chunk.data or not by:
        return chunk
    return msgspec.structs.replace(chunk, position=chunk.position + by)


def _renumbered(commit: Commit, by: int) -> Commit:
    actions: list[AnyAction] = [
        msgspec.structs.replace(action, chunk=action.chunk + by)  # keeps a ProducerAppend's fields
        if isinstance(action, Append)
        else action
        for action in commit.actions
    ]
    return msgspec.structs.replace(commit, actions=actions)
