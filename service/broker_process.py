"""A broker as a child process: started, killed, started again on the same store and port.

Nobody else can take the port, before the first start or while the broker is dead: this process
holds a socket that is bound to it and never listens, and the broker binds beside it (SO_REUSEADDR;
connections are refused meanwhile). Where a system does not allow that, the port is the broker's
choice, read from the line that it logs. Ended by its process id, whatever happens around it.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_S = 30.0
STOP_S = 20.0
POLL_S = 0.02
PORT_TRIES = 20
LOG_SHOWN_CHARS = 3000

_LISTENING = re.compile(r"listening on http://\S+?:(\d+)(?:$|\")", re.MULTILINE)
"""In either form of log lines."""


class BrokerFailed(Exception):
    """The broker ended, or did not come up; the message has the end of its log."""


class BrokerProcess:
    """One broker, on 127.0.0.1 unless told. `settings` are those of `tidelog serve`, by field name.

    `port` and `base_url` stay the same over restarts. Not for concurrent threads.
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
        assert self.port, "a broker that was never started has no port"
        return f"http://{self.address}:{self.port}"

    @property
    def address(self) -> str:
        """Where it listens."""
        return "127.0.0.1"

    @property
    def place(self) -> Sequence[str]:
        """What its command is run by, if anything, in the same process."""
        return ()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the running, or last, process has written."""
        with open(self.log_path, "rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def start(self) -> None:
        """Returns when the broker is ready. Raises BrokerFailed."""
        tries = PORT_TRIES
        while True:
            try:
                return self._start()
            except BrokerFailed as error:
                # Only where the port could not be held: it may be some connection's, for a moment.
                tries -= 1
                if not tries or not self.port or "cannot listen on" not in str(error):
                    raise
            time.sleep(10 * POLL_S)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, closed or said."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; the exit status. Raises BrokerFailed when it does not end."""
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
        """Kill it and start it again."""
        self.kill()
        self.start()

    def _hold_port(self) -> int:
        """A port for as long as this object lives; 0 where it cannot be held."""
        if sys.platform != "linux":
            return 0  # BSD lets nobody bind beside it
        with socket.socket() as holding:
            holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holding.bind(("127.0.0.1", 0))
            port: int = holding.getsockname()[1]
            weakref.finalize(self, os.close, holding.detach())
        return port

    def _start(self) -> None:
        assert not self.is_running, "the broker is running"
        command = [sys.executable, "-m", "service.cli", "serve", "--store", self.store]
        command += ["--host", self.address, "--port", str(self.port)]
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*self.place, *command],
                env=None if self._environment is None else dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        process = self._process
        assert process is not None
        for _ in range(round(START_S / POLL_S)):
            if process.poll() is not None:
                raise BrokerFailed(f"the broker ended with {process.returncode}:\n{self._tail()}")
            found = _LISTENING.search(self.log())
            if found is not None:
                self.port = int(found[1])
                if _answers(f"{self.base_url}/ready"):
                    return
            time.sleep(POLL_S)
        raise BrokerFailed(f"the broker is not ready after {START_S:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return self.log()[-LOG_SHOWN_CHARS:]


def _answers(url: str) -> bool:
    # A proxy that the environment names has no way to 127.0.0.1 of this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=5):
            return True
    except OSError:
        return False
