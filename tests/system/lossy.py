"""A way to a server on which answers, and requests, get lost: connections break in the middle."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Self
from urllib.parse import urlsplit

BLOCK = 65_536


class LossyProxy:
    """TCP from a port of ours to `url`.

    `answers_lost` and `requests_lost` are the shares of blocks in either direction at which a
    connection breaks, and may be changed at any time.
    """

    def __init__(self, url: str, seed: int) -> None:
        upstream = urlsplit(url)
        self._upstream = (upstream.hostname, upstream.port)
        self._random = random.Random(seed)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.answers_lost = 0.0
        self.requests_lost = 0.0

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._listening)
        for connection in list(self._open):
            _end(connection)
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def losing(self, *, answers: float, requests: float) -> Iterator[None]:
        self.answers_lost, self.requests_lost = answers, requests
        try:
            yield
        finally:
            self.answers_lost = self.requests_lost = 0.0

    def _start(self, target: object, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(self._upstream)
                except OSError:  # the broker is not there
                    _end(near)
                    continue
                self._open |= {near, far}
                self._start(self._pump, near, far, "requests_lost")
                self._start(self._pump, far, near, "answers_lost")

    def _pump(self, source: socket.socket, sink: socket.socket, share: str) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(BLOCK):
                if self._random.random() < getattr(self, share):
                    break
                sink.sendall(block)
        for connection in (source, sink):
            self._open.discard(connection)
            _end(connection)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
