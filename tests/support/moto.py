"""moto's S3 in a thread: quick, honest about 412, never 409 or 503.

Its create-if-absent looks first and stores afterwards, so requests are answered one at a time here:
it is evidence for the contract, none for races.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import boto3
from moto.server import ThreadedMotoServer

from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class Moto(NamedTuple):
    """A running server and a bucket in it. Any credentials do."""

    endpoint_url: str
    bucket: str


@contextmanager
def running_moto(
    bucket: str = "tidelog", on_request: Callable[["WSGIEnvironment"], object] = lambda _: None
) -> Iterator[Moto]:
    """Run an S3 that shares buckets, objects and policies with the others of this process.

    So a test that puts a policy takes a bucket of its own. `on_request` gets each request before
    moto; it may read the body, if it puts one back.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _one_at_a_time(server, on_request)
        host, port = server.get_host_and_port()
        endpoint_url = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        client.create_bucket(Bucket=bucket)
        client.close()
        yield Moto(endpoint_url, bucket)
    finally:
        server.stop()


def _one_at_a_time(
    server: ThreadedMotoServer, on_request: Callable[["WSGIEnvironment"], object]
) -> None:
    assert server._server is not None
    app, lock = server._server.app, threading.Lock()

    def serialised(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        with lock:
            on_request(environ)
            return app(environ, start_response)

    server._server.app = serialised
