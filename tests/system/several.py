"""Several brokers on one store, as processes, and what they say of themselves."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.broker import Broker
from tests.support.seaweed import Seaweed
from tests.system.client import Client, wait_until

QUICK = {
    "broker_heartbeat_interval_ms": 200,
    "broker_timeout_ms": 1500,
    "sequencer_timeout_ms": 500,
}
"""Of brokers that are to know each other soon, and to miss each other soon."""


@contextlib.contextmanager
def brokers(
    folder: Path,
    count: int = 3,
    *,
    store: str | None = None,
    own: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[list[Broker]]:
    """So many brokers that see each other; without `store`, on a store in the folder.

    `own` are settings that differ. With `variables`, see Broker.use.
    """
    url = (folder / "store").as_uri() if store is None else store
    with contextlib.ExitStack() as stack:
        cluster = []
        for number, name in enumerate("abcdefgh"[:count]):
            own_settings = {
                "broker_id": name,
                "hot_dir": folder / name,
                **(own[number] if own else {}),
            }
            broker = Broker(folder / name, url, **(settings | own_settings))
            if variables is not None:
                broker.use(variables)
            cluster.append(stack.enter_context(broker))
        wait_until(lambda: all(live(broker) == count for broker in cluster), "meeting")
        yield cluster


def metrics(broker: Broker) -> dict[str, float]:
    with Client(broker.base_url) as client:
        return client.metrics()


def live(broker: Broker) -> float:
    return metrics(broker)["tidelog_live_brokers"]


def sequencer_first(cluster: list[Broker]) -> list[Broker]:
    return sorted(cluster, key=lambda broker: -metrics(broker)["tidelog_is_sequencer"])


def total(cluster: list[Broker], name: str) -> float:
    return sum(metrics(broker)[f"tidelog_{name}_total"] for broker in cluster)


@contextlib.contextmanager
def stopped(process: Broker | Seaweed) -> Iterator[None]:
    """The process takes connections and bytes, and says nothing; afterwards it does it all."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)
