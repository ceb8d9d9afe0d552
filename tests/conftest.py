"""Fixtures that every suite may use: servers once per worker, stores once per test."""

import gc
import itertools
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.support import vloop
from tests.support.counting_s3 import RunningServer, running_counting_s3
from tests.support.moto import Moto, running_moto
from tests.support.properties import load_profile
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY, Seaweed, running_seaweed
from tidelog.storage.runtime import threads
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options

load_profile()
# httpx waits for 5 s by default. On a busy machine, a first seal takes longer.
DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.connect = 60.0

STORES = (
    "memory",
    "folder",
    "moto",
    "counting_s3",
    pytest.param("seaweed", marks=pytest.mark.seaweed),
)
ID_BYTES_MAX = 24
SYSTEM_TESTS = "tests/system/"
_prefixes = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture-minutes", type=float, default=0.1, help="for how long brokers are tortured"
    )
    parser.addoption(
        "--api-examples", type=int, default=10, help="requests to each operation of the API"
    )
    parser.addoption(
        "--restart-requests",
        type=int,
        default=1000,
        help="requests during rolling restarts; from 10,000 on, two with the default drain_ms",
    )
    parser.addoption("--old-version", help="a revision whose brokers are rolled to this version")
    parser.addoption("--torture-seed", type=int, help="what is done to them; drawn unless given")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and leave the tests out of later collections of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """System tests and slow ones run first.

    A test of a minute that begins last keeps one worker busy alone.
    """
    items.sort(key=lambda item: not _is_slow(item))


def _is_slow(item: pytest.Item) -> bool:
    return item.nodeid.startswith(SYSTEM_TESTS) or item.get_closest_marker("slow") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with vloop.checked():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    with vloop.checked():
        return (yield)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Hide long bytes: a test has the same name in each worker.

    Some bytes have the time in them, as gzip's have.
    """
    return argname if isinstance(val, bytes) and len(val) > ID_BYTES_MAX else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _background_threads_at_normal_priority() -> Iterator[None]:
    """Keep threads at normal priority, except in brokers as processes of their own.

    On a busy machine a thread of the lowest priority gets 1/70 of a normal one's share, and a
    virtual loop waits for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "LOWEST_PRIORITY", os.getpriority(os.PRIO_PROCESS, 0))
        yield


@pytest.fixture(scope="session")
def aws_credentials() -> Iterator[None]:
    """The AWS chain finds the local servers' credentials and nothing of the machine's."""
    ours = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in ours.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def seaweed(aws_credentials: None) -> Iterator[Seaweed]:
    with running_seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(aws_credentials: None) -> Iterator[Moto]:
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def counting_s3(aws_credentials: None) -> Iterator[RunningServer]:
    with running_counting_s3() as server:
        yield server


@pytest.fixture
def inner() -> MemoryStore:
    """An empty store in memory, to which each broker has a faulty way of its own."""
    return MemoryStore()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    """An empty store of every kind that there is."""
    opened_store: ObjectStore
    match request.param:
        case "memory":
            opened_store = MemoryStore(now_ms=1_700_000_000_000)
        case "folder":
            opened_store = FolderStore(tmp_path / "store")
        case kind:
            server = request.getfixturevalue({"moto": "moto_server"}.get(kind, kind))
            options = S3Options(endpoint_url=server.endpoint_url, region=REGION)
            opened_store = await S3Store.open(server.bucket, f"test-{next(_prefixes)}", options)
    yield opened_store
    await opened_store.close()
