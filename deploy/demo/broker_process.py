"""A broker as a child process that a test or demo starts, kills and restarts.

The store and the port stay the same. This process reserves the port: it holds a socket that is
bound to the port and never listens, and the broker binds the same port (SO_REUSEADDR). Without a
running broker, connections are refused. On systems other than Linux, the broker chooses the port,
and this process reads it from the log. The broker is killed by its process id.
"""

import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

BROKER_START_S = 240.0  # 1.5 s of CPU; a busy machine takes 30 s
STOP_S = 40.0
POLL_S = 0.02
PORT_TRIES = 20
LOG_SHOWN_CHARS = 3000

_LISTENING = re.compile(r"listening on https?://\S+?:(\d+)(?:$|\")", re.MULTILINE)
"""Matches the text and the JSON form of the log line."""


class BrokerFailed(Exception):
    """The broker ended or did not become ready; the message has the end of its log."""


class BrokerProcess:
    """One broker process on 127.0.0.1. `settings` are those of `tidelog serve`, by field name.

    `port` and `base_url` stay the same over restarts. Not thread-safe.
    """

    def __init__(
        self,
        store: str,
        log_path: Path,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store
        self.log_path = log_path
        self.settings = dict(settings or {})
        self.port = self._hold_port()
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def base_url(self) -> str:
        assert self.port, "the broker has no port before its first start"
        return f"{'https' if self._certificate else 'http'}://{self.address}:{self.port}"

    @property
    def _certificate(self) -> str:
        """Return the file of the broker's certificate; empty without TLS."""
        return str(self.settings.get("tls_cert_file", ""))

    @property
    def address(self) -> str:
        """Return the address on which the broker listens."""
        return "127.0.0.1"

    @property
    def place(self) -> Sequence[str]:
        """Return a wrapper before the command, such as `ip netns exec NAME`.

        It must keep the process id.
        """
        return ()

    @property
    def program(self) -> Sequence[str]:
        """Return the words that run the command line."""
        return (sys.executable, "-m", "tidelog.service.cli")

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return the log of the running process, or of the last one."""
        with open(self.log_path, "rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def start(self) -> None:
        """Start the broker; return when it is ready. Raises BrokerFailed."""
        tries = PORT_TRIES
        while True:
            try:
                return self._start()
            except BrokerFailed as error:
                # The port may belong to another connection for a moment: try again.
                tries -= 1
                if not tries or not self.port or "cannot listen on" not in str(error):
                    raise
            time.sleep(10 * POLL_S)

    def kill(self) -> None:
        """Send SIGKILL: the broker flushes and closes nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Send SIGTERM; return the exit status. Raises BrokerFailed if the process does not end."""
        assert self._process is not None, "the broker is not running"
        self._process.terminate()
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokerFailed(
                f"the broker did not end within {STOP_S:.0f} s:\n{self._tail()}"
            ) from None
        self._process = None
        return status

    def restart(self) -> None:
        """Kill and start the broker."""
        self.kill()
        self.start()

    def _hold_port(self) -> int:
        """Reserve a port for the lifetime of this object; 0 on systems that cannot."""
        if sys.platform != "linux":
            return 0  # BSD allows no second bind
        with socket.socket() as holding:
            holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holding.bind(("127.0.0.1", 0))
            port: int = holding.getsockname()[1]
            weakref.finalize(self, os.close, holding.detach())
        return port

    def _start(self) -> None:
        assert not self.is_running, "the broker is running"
        command = ["serve", "--store", self.store]
        command += ["--host", self.address, "--port", str(self.port)]
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = self._spawn(command, log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _spawn(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process with these arguments of the command line; it writes to `log`."""
        return subprocess.Popen(
            [*self.place, *self.program, *command],
            env=None if self._environment is None else dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def _wait_until_ready(self) -> None:
        process = self._process
        assert process is not None
        for _ in range(round(BROKER_START_S / POLL_S)):
            if process.poll() is not None:
                raise BrokerFailed(f"the broker ended with {process.returncode}:\n{self._tail()}")
            match = _LISTENING.search(self.log())
            if match is not None:
                self.port = int(match[1])
                if _answers(f"{self.base_url}/ready", self._certificate):
                    return
            time.sleep(POLL_S)
        raise BrokerFailed(f"the broker is not ready after {BROKER_START_S:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return self.log()[-LOG_SHOWN_CHARS:]


def _answers(url: str, certificate: str) -> bool:
    # Bypass a proxy of the environment: it cannot reach 127.0.0.1 of this machine.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate:
        context = ssl.create_default_context(cafile=certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        handlers.append(urllib.request.HTTPSHandler(context=context))
    direct = urllib.request.build_opener(*handlers)
    try:
        with direct.open(url, timeout=5):
            return True
    except OSError:
        return False
