"""A cluster whose store takes 20 ms a call."""

from collections.abc import AsyncIterator

import pytest

from tests.support.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(latency=lambda _: 0.02) as cluster:
        yield cluster
