"""A broker with security on, and clients that have keys."""

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.service.conftest import JSON, Broker, broker_on
from tidelog.service.security.authenticator import CONSOLE_HEADER
from tidelog.service.security.token_bucket import Bucket
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core.acls import Acl
from tidelog.storage.core.actions import CreateAcls
from tidelog.storage.store.memory import MemoryStore

ADMIN_KEY = "an-administrators-key-of-many-characters"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
SETTINGS: Mapping[str, Any] = {"security": "keys", "admin_key": ADMIN_KEY}
RECORDS = b'{"records":[{"value":1}]}'
JSON_TYPE = {"content-type": JSON}
CONSOLE = {CONSOLE_HEADER.decode(): "1"}
"""Proves that a page of the console sent the request."""
ALICE, MALLORY = "User:alice", "User:mallory"
OPEN_TO_MALLORY = pytest.mark.broker(
    topics={"m.t": 1},
    acls=[Acl(kind, "m.", "PREFIXED", MALLORY, "*", "ALL", "ALLOW") for kind in ("TOPIC", "GROUP")],
    **SETTINGS,
)
"""A broker with the topic m.t. Mallory may do everything with topics and groups m.*."""
ACLS_OF_ALICE = [
    Acl(kind, name, "LITERAL", ALICE, "*", "ALL", "ALLOW")
    for kind, name in (("TOPIC", "t"), ("GROUP", "g"))
]
OPEN_TO_ALICE = pytest.mark.broker(topics={"t": 1}, acls=ACLS_OF_ALICE, **SETTINGS)
"""A broker with the topic t. Alice may do everything with it and with the group g."""


@asynccontextmanager
async def secured(store: MemoryStore, name: str = "broker-1", **more: Any) -> AsyncIterator[Broker]:
    async with broker_on(store, name, **{**SETTINGS, **more}) as broker:
        yield broker


async def key_of(log: LogBroker, principal: str, **more: Any) -> dict[str, str]:
    """A new key's header."""
    _, secret = await log.access.create_key(principal, **more)
    return bearer(secret)


def bearer(secret: str) -> dict[str, str]:
    """The header of a key or a token."""
    return {"authorization": f"Bearer {secret}"}


def refill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of token buckets stand still."""
    real = Bucket.throttle_s
    monkeypatch.setattr(Bucket, "throttle_s", lambda bucket, _: real(bucket, 0.0))


def basic(user: str, secret: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{secret}".encode()).decode()}


async def allow(
    log: LogBroker,
    principal: str,
    operation: str,
    resource_type: str = "TOPIC",
    name: str = "t",
    pattern: str = "LITERAL",
    permission: str = "ALLOW",
) -> None:
    acl = Acl(resource_type, name, pattern, principal, "*", operation, permission)
    await log.access.change(CreateAcls([acl]))


def assert_denied(answer: httpx.Response) -> str:
    """Known, and may not; the message."""
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (403, 40301), said
    return str(said["message"])


def assert_unknown(answer: httpx.Response) -> str:
    """Assert that no principal was found; return the message."""
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (401, 40101), said
    assert answer.headers["www-authenticate"].startswith(("Basic", "Bearer"))
    return str(said["message"])
