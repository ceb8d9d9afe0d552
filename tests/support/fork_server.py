"""`tidelog` as a process of its own, without the CPU of its imports.

An interpreter needs 0.3 to 1.4 s of CPU until it has imported what a command or a broker needs.
Therefore one process of each test process imports all of it once, and forks a child for each
command. A child has its own id, streams, environment, signals, limits, exit status and end of the
interpreter. It does not have: a command line of its own in /proc, and what the interpreter reads at
its start (variables PYTHON*, the locale). A test of these uses a new interpreter.

The server ends when the test process does, because its socket is closed then. Linux only.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 2**17
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
"""A child has those of the test process. Else it inherits what the server had at its start."""
NUMBER_BYTES = 8
"""Of a process id, and of a status, in the pipe from the server."""
AT_FIRST_USE = (
    "anyio._backends._asyncio",
    "encodings.idna",
    "httpcore",
    "rich.console",
    "rich.table",
    "tidelog.compaction.scrub",
    "typer._adapters",
    "uvicorn.lifespan.off",
)
"""Modules that commands import when they use them: two thirds of the CPU of a short command."""

_lock = threading.Lock()
_servers: list[socket.socket] = []


class Forked:
    """A process; it has those methods of subprocess.Popen that the tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        streams: Sequence[int],
        environment: Mapping[str, str],
        tuning: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """`streams` are the files that become stdin, stdout and stderr; `tuning`: see tuned_cli."""
        self.returncode: int | None = None
        self._status, status = os.pipe()
        weakref.finalize(self, os.close, self._status)
        limits = [(which, *resource.getrlimit(which)) for which in LIMITS]
        parts = [list(arguments), os.getcwd(), dict(environment), limits, tuning]
        request = json.dumps(parts).encode()
        assert len(request) < REQUEST_BYTES_MAX
        try:
            socket.send_fds(_server(environment), [request], [*streams, status])
        finally:
            os.close(status)
        answer = os.read(self._status, NUMBER_BYTES)
        assert answer, "the fork server has ended"
        self.pid = int.from_bytes(answer, "little")

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the status, as subprocess does: below 0, it is a signal."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("tidelog", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        ready = select.poll()  # unlike select, it takes any number of a file
        ready.register(self._status, select.POLLIN)
        if self.returncode is None and ready.poll(None if timeout is None else timeout * 1000):
            answer = os.read(self._status, NUMBER_BYTES)
            assert answer, "the fork server has ended"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
        return self.returncode


def run(
    arguments: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    tuning: Mapping[str, Mapping[str, float]] | None,
    timeout: float,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end; its streams are pipes, as with subprocess.run."""
    pipes = [os.pipe() for _ in range(3)]
    (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
    try:
        process = Forked(arguments, (their_in, their_out, their_err), environment, tuning)
    finally:
        for fd in (their_in, their_out, their_err):
            os.close(fd)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(_write, our_in, stdin)
        out, err = pool.submit(_read, our_out), pool.submit(_read, our_err)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, status, out.result(), err.result())


def _write(fd: int, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb") as file:
        file.write(content)  # a command need not read all of its input


def _read(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def _server(environment: Mapping[str, str]) -> socket.socket:
    """Return the socket to the server of this process; start it before its first use."""
    with _lock:
        if not _servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    cwd=ROOT,
                    env=dict(environment),  # for variables that the interpreter reads
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            _servers.append(ours)
            atexit.register(process.wait)
            atexit.register(ours.close)
        return _servers[0]


# -- the server


def _serve(control: socket.socket) -> list[Any] | None:
    """Fork a child for each request. Returns the request in the child, None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the id, the pipe for the status
    while True:
        for ready in select.select([control.fileno(), *children], [], [])[0]:
            if ready in children:
                pid, status = children.pop(ready)
                _, code = os.waitpid(pid, 0)
                _tell(status, code)
                os.close(ready)
                os.close(status)
                continue
            message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                for pidfd, (_, status) in children.items():
                    os.close(pidfd)
                    os.close(status)
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                for fd in fds:
                    os.close(fd)
                request: list[Any] = json.loads(message)
                return request
            _tell(fds[3], pid)
            children[os.pidfd_open(pid)] = pid, fds[3]
            for fd in fds[:3]:
                os.close(fd)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test did not wait for it
        os.write(pipe, number.to_bytes(NUMBER_BYTES, "little"))


def _opened(number: int, mode: str, like: Any) -> Any:
    """Return a stream as the interpreter opens it at its start."""
    raw = open(number, mode + "b", buffering=-1, closefd=False)  # noqa: SIM115
    return like.__class__(
        raw,
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def _main() -> int:
    from tests.support import tuned_cli
    from tidelog.compaction import compact
    from tidelog.service.cli import main
    from tidelog.service.server import serve
    from tidelog.storage.store import s3

    del compact, serve, s3  # imported for the children
    main.loaded()
    for name in AT_FIRST_USE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child shares the pages of objects that no collection visits
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = _serve(control)
    if request is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, folder, environment, limits, tuning = request
    for which, soft, hard in limits:
        resource.setrlimit(which, (soft, hard))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.stdin = _opened(0, "r", sys.stdin)
    sys.stdout = _opened(1, "w", sys.stdout)
    sys.stderr = _opened(2, "w", sys.stderr)
    if tuning:
        tuned_cli.tune(tuning)
    return main.main()


if __name__ == "__main__":
    sys.exit(_main())
