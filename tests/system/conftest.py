"""Fixtures of the system tests."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.support.broker import Broker
from tests.system.rest import World

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


@pytest.fixture(scope="module")
def world(broker: Broker) -> World:
    """That broker, with what the REST dialects are tried on."""
    return World(broker)
