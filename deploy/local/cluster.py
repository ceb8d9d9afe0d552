"""A cluster on this machine, without Docker: an S3 server, brokers, a balancer. `make cluster`.

    python -m deploy.local.cluster [--brokers 3] [--store URL] [--port 8080]

The log is in SeaweedFS, or in the store of `--store`. The balancer is nginx or haproxy: one of them
must be installed. Each part is a child process. At the end, also after an error, this process ends
them by their ids, in reverse order. Then the data in SeaweedFS is gone. All ports are on 127.0.0.1.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from deploy.demo.broker_process import BrokerProcess
from deploy.local.balancer import balancer
from tests.support.seaweed import CREDENTIALS, REGION, running_seaweed


class Store(NamedTuple):
    """Location of the log, with the settings and the environment that reach it."""

    url: str
    settings: Mapping[str, object] = {}
    environment: Mapping[str, str] = {}


@contextlib.contextmanager
def s3_store() -> Iterator[Store]:
    """Run a SeaweedFS server with a bucket; yield the store in it."""
    with running_seaweed() as server:
        yield Store(
            f"s3://{server.bucket}/cluster",
            {"s3_endpoint": server.endpoint_url, "s3_region": REGION},
            CREDENTIALS,
        )


@contextlib.contextmanager
def brokers(
    count: int,
    store: Store,
    folder: Path,
    own_settings: Sequence[Mapping[str, object]] = (),
    **settings: object,
) -> Iterator[list[BrokerProcess]]:
    """Start `count` brokers of one cluster; yield them when all are ready.

    `own_settings` are those of each broker, in order, beside `settings` of all.

    Those that still run at the end are killed.
    """
    names = [f"broker-{number}" for number in range(1, count + 1)]
    with contextlib.ExitStack() as stack:
        processes = [
            BrokerProcess(
                store.url,
                folder / f"{name}.log",
                {"broker_id": name, "hot_dir": folder / name, **store.settings, **settings, **own},
                {**os.environ, **store.environment},
            )
            for name, own in zip(names, own_settings or [{}] * count, strict=True)
        ]
        for broker in processes:
            stack.callback(broker.kill)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(BrokerProcess.start, processes))
        yield processes


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--brokers", type=int, default=3, help="number of brokers (3)")
    parser.add_argument("--store", default="", help="URL of a store; empty: start SeaweedFS")
    parser.add_argument("--port", type=int, default=8080, help="port of the balancer (8080)")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-cluster-")))
        store = Store(arguments.store)
        if not store.url:
            console.print("starting SeaweedFS ...")
            store = stack.enter_context(s3_store())
            console.print(f"store      {store.url} at {store.settings['s3_endpoint']}")
        console.print(f"starting {arguments.brokers} brokers ...")
        running = stack.enter_context(brokers(arguments.brokers, store, folder))
        for broker in running:
            console.print(f"broker     {broker.base_url}   log {broker.log_path}")
        try:
            ports = [broker.port for broker in running]
            port = stack.enter_context(balancer(folder, ports, arguments.port))
            console.print(f"balancer   http://127.0.0.1:{port}   docs at /docs")
        except FileNotFoundError as error:
            console.print(f"no balancer: {error} (apt install nginx-light); use the brokers' ports")
        console.print("Ctrl-C stops the cluster")
        ended.wait()
        console.print("stopping ...")
        for broker in running:
            if broker.is_running:
                broker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
