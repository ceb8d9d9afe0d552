"""A broker's log on a store in memory, and a client of the application on it."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from service.app import build_app
from storage.clock import SystemClock
from storage.log import Log, LogSettings
from storage.objectstore import MemoryStore

QUIET = LogSettings(poll_interval_s=60.0, is_sealing=False)
"""Nothing happens by itself: what a test sees follows from what it asked."""


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    yield store
    await store.close()


@pytest.fixture
async def log(store: MemoryStore) -> AsyncIterator[Log]:
    log = Log(store, SystemClock(), "broker-1", QUIET, None)
    await log.open()
    yield log
    await log.close()


@pytest.fixture
def app(log: Log) -> FastAPI:
    return build_app(log)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tide:8082") as client:
        yield client


@pytest.fixture
def v3(log: Log) -> str:
    """The cluster's path in the v3 dialect."""
    return f"/v3/clusters/{log.wal.cluster.cluster_id}"
