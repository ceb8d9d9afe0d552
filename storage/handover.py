"""What brokers say to each other, as bytes; and how the drafts of many become one entry.

Pure. Whatever comes in from outside leaves as a value or as Corrupt: chunks are verified before
they are put into an entry, where nobody could mend them any more.
"""

import math
from collections.abc import Sequence

import msgspec

from storage import keys
from storage.chunk import crc32c
from storage.entry import AnyAction, Append, Chunk, Commit, Draft, Origin
from storage.errors import Corrupt, LogError
from storage.objectstore import Part

MESSAGE = "message of a peer"


class NotTaken(LogError):
    """The peer has not taken the draft, and never will put it into an entry."""


class NoAnswer(LogError):
    """Nobody knows whether the peer has put the draft into an entry, or will."""


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """A draft for the sequencer: its commits are of `origin`."""

    origin: Origin
    commits: list[Commit]
    chunks: list[Chunk]
    body: bytes


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Entry `seq` is in the chain. `header` is its object's beginning, empty where that is large;
    `body` its chunks, empty where they are."""

    seq: int
    header: bytes = b""
    body: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_hand_overs = msgspec.msgpack.Decoder(HandOver)
_tellings = msgspec.msgpack.Decoder(list[Told])


def encode_hand_over(draft: Draft) -> bytes:
    (origin,) = draft.origins
    body = b"".join(draft.bodies)
    return _encoder.encode(HandOver(origin, draft.commits, draft.chunks, body))


def decode_hand_over(message: Part) -> Draft:
    """The draft; raises Corrupt when it does not hold together."""
    try:
        taken = _hand_overs.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error
    at = 0
    view = memoryview(taken.body)
    for chunk in taken.chunks:
        if chunk.data:
            if keys.data_not_after_ms(chunk.data) is None:
                raise Corrupt(MESSAGE, f"refers to {chunk.data!r}, which is no upload")
            continue
        if chunk.position != at or chunk.size < 0:
            raise Corrupt(MESSAGE, "chunks do not lie one after the other")
        if crc32c(view[at : at + chunk.size]) != chunk.crc32c:
            raise Corrupt(MESSAGE, "checksum of a chunk differs")
        at += chunk.size
    if at != len(view) or taken.origin.commits != len(taken.commits):
        raise Corrupt(MESSAGE, "is longer or shorter than it says")
    bodies: list[Part] = [taken.body] if taken.body else []
    return Draft(taken.commits, taken.chunks, bodies, [taken.origin])


def encode_told(told: Sequence[Told]) -> bytes:
    return _encoder.encode(told)


def decode_told(message: Part) -> list[Told]:
    """What the peer tells; raises Corrupt."""
    try:
        return _tellings.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(MESSAGE, f"does not decode: {error}") from error


def merge(drafts: Sequence[Draft]) -> Draft:
    """One draft of all: commits in order, chunks one after the other. Those without origins, the
    writer's own, must come last."""
    if len(drafts) == 1:
        return drafts[0]
    own = [not draft.origins for draft in drafts]
    assert own == sorted(own), "commits without an origin would be taken for another's"
    commits: list[Commit] = []
    chunks: list[Chunk] = []
    bodies: list[Part] = []
    origins: list[Origin] = []
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
    """The same with its chunks in object `key`, which holds the bodies one after the other."""
    chunks = [
        chunk if chunk.data else msgspec.structs.replace(chunk, data=key) for chunk in draft.chunks
    ]
    return draft._replace(chunks=chunks, bodies=[])


def not_after_ms(draft: Draft) -> float:
    """The time of the cluster after which nothing that the draft refers to may be named any more:
    it may be collected by then (FORMAT rule 8)."""
    ends = {keys.data_not_after_ms(chunk.data) for chunk in draft.chunks if chunk.data}
    return min((end for end in ends if end is not None), default=math.inf)


def _moved(chunk: Chunk, by: int) -> Chunk:
    if chunk.data or not by:
        return chunk
    return msgspec.structs.replace(chunk, position=chunk.position + by)


def _renumbered(commit: Commit, by: int) -> Commit:
    actions: list[AnyAction] = [
        msgspec.structs.replace(action, chunk=action.chunk + by)  # a producer's keeps its sequence
        if isinstance(action, Append)
        else action
        for action in commit.actions
    ]
    return msgspec.structs.replace(commit, actions=actions)
