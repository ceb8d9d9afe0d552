"""The cluster's secret: an object that brokers can read, and clients and readers of tables cannot.

Drawn once, by whichever broker comes first; it signs what browsers carry, so that any broker
believes what another has signed. Whoever can read it is a broker (tests/README.md).
"""

import asyncio

import msgspec

from storage import keys
from storage.clock import Clock
from storage.errors import NotFound, StoreUnfit
from storage.objectstore import ObjectStore

RETRY_S = 0.05
BYTES_MIN = 16


class _Secret(msgspec.Struct, frozen=True):
    format: int
    secret: str


async def cluster_secret(store: ObjectStore, clock: Clock) -> bytes:
    """32 bytes, the same for every broker. Raises StoreUnfit, Unavailable.

    Several may create it at once, and any may die in between: what lies there afterwards is it,
    whatever became of our own PUT.
    """
    while True:
        try:
            return _decoded(await store.get(keys.SECRET), store.url)
        except NotFound:
            drawn = clock.new_id() + clock.new_id()
        await store.create(keys.SECRET, [msgspec.json.encode(_Secret(1, drawn.hex()))])
        await asyncio.sleep(RETRY_S)


def _decoded(body: bytes, url: str) -> bytes:
    try:
        secret = bytes.fromhex(msgspec.json.decode(body, type=_Secret).secret)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        secret = b""
    if len(secret) < BYTES_MIN:
        raise StoreUnfit(
            f"{url}/{keys.SECRET} is no secret of ours: delete it, and all log in anew"
        )
    return secret
