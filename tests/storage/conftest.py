"""Async tests of storage run in virtual time."""

import pytest

from tests.support.vloop import VIRTUAL_TIME


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return VIRTUAL_TIME
