"""Fixtures of the system tests."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.support.broker import Broker

_numbers = count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for what leaves it as it was: topics have names of their own."""
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with one partition."""
    name = f"t{next(_numbers)}"
    broker.create_topic(name)
    return name
