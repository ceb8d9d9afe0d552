"""A broker process of our own, and the command line: what the system tests run against.

with Broker(tmp_path) as broker:        # `tidelog serve` on file://tmp_path/store, ready
    broker.cli("topics", "create", "t") # the CLI as a process of its own, with this broker's URL
    broker.kill()                       # SIGKILL
    broker.start()                      # again: the same store, the same port, the same base_url
    broker.stop()                       # SIGTERM; its exit status
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import httpx

from deploy.demo.broker_process import BrokerFailed, BrokerProcess
from tests.support import fork_server, tuned_cli

__all__ = ["Broker", "BrokerFailed"]

CLI_S = 240.0
WAIT_S_MAX = 240.0
DRAIN_MS = 1000
"""Shorter than the default: tests stop brokers to which they have idle connections."""

CAN_FORK = sys.platform == "linux"
AT_START = ("PYTHON", "LANG", "LC_")
"""Beginnings of the variables that an interpreter reads at its start alone."""

Tuning = Mapping[str, Mapping[str, float]]
"""Values of the log that are no settings: see tests/support/tuned_cli.py."""


class Broker(BrokerProcess):
    """A broker on a store in `folder` (or on any other), with settings by field name.

    Started and ended by `with`, or by hand. Its log, `log()`, is in the folder. `tuning` has values
    of the log that are no settings, see `tuned_cli`. It is forked by a process that has its modules
    (tests/support/fork_server.py), unless `is_fresh`: then it is a new interpreter.
    """

    def __init__(
        self,
        folder: Path,
        store: str | None = None,
        *,
        tuning: Tuning | None = None,
        is_fresh: bool = False,
        **settings: object,
    ) -> None:
        self._tuning = tuning
        self._is_fresh = is_fresh or not CAN_FORK
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        url = (folder / "store").as_uri() if store is None else store
        settings = {"drain_ms": DRAIN_MS, **settings}
        super().__init__(url, folder / "broker.log", settings, environment())

    @property
    def program(self) -> Sequence[str]:
        return _program(self._tuning)

    def use(self, variables: Mapping[str, str] | None = None) -> None:
        """Run as a new interpreter with these variables from the next start on.

        Without variables, run as this version.
        """
        self._is_fresh = variables is not None or not CAN_FORK
        self._environment = environment(**(variables or {}))

    def _spawn(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        if self._is_fresh:
            return super()._spawn(command, log)
        with open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            forked = fork_server.Forked(command, streams, self._environment or {}, self._tuning)
        return cast("subprocess.Popen[bytes]", forked)

    def cli(
        self, *arguments: str, stdin: str | bytes = b"", status: int | None = 0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `tidelog` against this broker; see `tidelog`."""
        return tidelog(*arguments, stdin=stdin, status=status, TIDELOG_URL=self.base_url)

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        """A topic; configs with underscores for dots."""
        body: dict[str, Any] = {
            "topic_name": name,
            "partitions_count": partitions,
            "configs": {key.replace("_", "."): value for key, value in configs.items()},
        }
        httpx.post(f"{self.base_url}/admin/topics", json=body).raise_for_status()

    def records(self, topic: str, *options: str) -> list[Any]:
        """All records, keys and values as text, as `consume --json` prints them."""
        return lines_of(self.cli("consume", topic, "--json", "-f", "text", *options))

    def high_watermark(self, topic: str, partition: int = 0) -> int:
        path = f"/topics/{topic}/partitions/{partition}/offsets"
        end: int = httpx.get(f"{self.base_url}{path}").raise_for_status().json()["end_offset"]
        return end


def _program(tuning: Tuning | None) -> Sequence[str]:
    if not tuning:
        return (sys.executable, "-m", "tidelog.service.cli")
    return (sys.executable, "-P", tuned_cli.__file__, json.dumps(tuning))


def tidelog(
    *arguments: str,
    stdin: str | bytes = b"",
    status: int | None = 0,
    tuning: Tuning | None = None,
    is_fresh: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run `tidelog` to its end; assert its exit status unless that is None.

    `tuning`, `is_fresh`: see Broker.

    Whatever went wrong, stderr is one line and no traceback.
    """
    stdin_bytes = stdin.encode() if isinstance(stdin, str) else stdin
    ours = environment(**variables)
    if is_fresh or not CAN_FORK or any(name.startswith(AT_START) for name in variables):
        process = subprocess.run(
            [*_program(tuning), *arguments],
            input=stdin_bytes,
            capture_output=True,
            timeout=CLI_S,
            env=ours,
            check=False,
        )
    else:
        process = fork_server.run(arguments, stdin_bytes, ours, tuning, CLI_S)
    if status is not None:
        assert process.returncode == status, f"{arguments}: {process.returncode}\n{_said(process)}"
    return process


def error_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """The one line that a command which failed has said; asserts that it is one."""
    lines = process.stderr.decode().splitlines()
    assert len(lines) == 1, _said(process)
    assert lines[0].startswith("tidelog: "), _said(process)
    return lines[0].removeprefix("tidelog: ")


class Server(Protocol):
    """A broker, or what a test serves in its place."""

    @property
    def base_url(self) -> str: ...


@contextmanager
def running(server: Server, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`tidelog` as a process that goes on, all its streams pipes; ended by its id."""
    with subprocess.Popen(
        [sys.executable, "-m", "tidelog.service.cli", *arguments],
        env=environment(TIDELOG_URL=server.base_url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def json_of(process: subprocess.CompletedProcess[bytes]) -> Any:
    """Parse the output of a command with `--json`."""
    return json.loads(process.stdout)


def lines_of(process: subprocess.CompletedProcess[bytes]) -> list[Any]:
    """Parse the output of `consume --json`."""
    return [json.loads(line) for line in process.stdout.splitlines()]


def until(is_done: Callable[[], bool], seconds: float = WAIT_S_MAX) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def environment(**variables: str) -> dict[str, str]:
    """The environment without what would change our processes, and with `variables`."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TIDELOG_")
        and not name.lower().endswith("_proxy")
        and name != "PYTHONDONTWRITEBYTECODE"  # else each process compiles the modules again
    }
    return ours | {"PYTHONWARNINGS": "error::ResourceWarning"} | variables


def _said(process: subprocess.CompletedProcess[bytes]) -> str:
    return (process.stdout[-2000:] + process.stderr[-2000:]).decode(errors="replace")
