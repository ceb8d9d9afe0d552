"""The cluster's secret: an object that brokers can read, but clients and table readers cannot.

The first broker creates the object. The secret signs the console's session cookies, so each broker
accepts the cookies of all brokers. It also signs the messages between brokers. A process that can
read the secret and `brokers/` can act as a broker (DESIGN 11).
"""

import asyncio

import msgspec

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import ObjectNotFound, StoreUnfit
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.object_store import ObjectStore

SECRET_RETRY_S = 0.05
BYTES_MIN = 16


class _Secret(msgspec.Struct, frozen=True):
    format: int
    secret: str


async def cluster_secret(store: ObjectStore, clock: Clock) -> bytes:
    """Return the secret: 32 bytes, the same on every broker. If there is none, create it.

    Raises StoreUnfit, Unavailable. Several brokers may create the secret at once, and each may
    crash. So after its PUT, with any outcome, a broker reads the stored object and uses the secret
    in that object.
    """
    while True:
        try:
            return _decoded(await store.get(object_keys.SECRET), store.url)
        except ObjectNotFound:
            drawn = clock.new_id() + clock.new_id()
        await store.create(object_keys.SECRET, [msgspec.json.encode(_Secret(1, drawn.hex()))])
        await asyncio.sleep(SECRET_RETRY_S)


def _decoded(body: bytes, url: str) -> bytes:
    try:
        secret = bytes.fromhex(msgspec.json.decode(body, type=_Secret).secret)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        secret = b""
    if len(secret) < BYTES_MIN:
        raise StoreUnfit(
            f"{url}/{object_keys.SECRET} is invalid: delete the object and restart all brokers; "
            "all users must log in again"
        )
    return secret
