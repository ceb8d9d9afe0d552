"""Drafts that the sequencer merges into one, and drafts whose bytes are in an object already. Pure.

`refer` replaces the bytes of a draft's chunks by the key of an object that has these bytes.
"""

import math
from collections.abc import Sequence

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
    position = 0
    for draft in drafts:
        first = len(chunks)
        chunks += [_moved(chunk, position) for chunk in draft.chunks]
        commits += (
            [_renumbered(commit, first) for commit in draft.commits] if first else draft.commits
        )
        origins += draft.origins
        bodies += draft.bodies
        position += sum(len(body) for body in draft.bodies)
    return Draft(commits, chunks, bodies, origins)


def refer(draft: Draft, key: str) -> Draft:
    """Return the draft without its bodies.

    Its chunks are in the object `key`, which contains the bodies in order.
    """
    chunks = [
        chunk if chunk.data else msgspec.structs.replace(chunk, data=key) for chunk in draft.chunks
    ]
    return draft._replace(chunks=chunks, bodies=[])


def not_after_ms(draft: Draft) -> float:
    """Return the elapsed time in ms after which no entry may include the draft.

    Its uploads may be collected then (FORMAT rule 8). If the draft has no uploads, return infinity.
    """
    ends = {object_keys.data_not_after_ms(chunk.data) for chunk in draft.chunks if chunk.data}
    return min((end for end in ends if end is not None), default=math.inf)


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
