"""A handler that does nothing, on the server that a broker runs on: what HTTP alone costs.

python -m tests.tools.bench.bare PORT
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from tests.support.ports import free_port

BODY = b"[]"
HEADERS = [(b"content-type", b"application/vnd.kafka.v2+json"), (b"content-length", b"2")]


async def app(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


@contextmanager
def bare_server() -> Iterator[tuple[int, int]]:
    """Its port and process id."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.tools.bench.bare", str(port)])
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/")
                break
            except httpx.TransportError:
                assert process.poll() is None, "the bare server has ended"
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
    )
