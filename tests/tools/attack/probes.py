"""The probes of a broker during an attack: its memory, the answers of /healthy, and a neighbour.

They run in a process of their own (`python -m tests.tools.attack.probes`), because an attack may
hold the interpreter's lock of its process for seconds. A probe there would stand still and count
the CPU time of many requests as one step of the broker. For each attack, the process reads a
Target as a line of JSON from stdin, prints a line when each probe has its first answer, reads an
empty line at the end of the attack, and prints the Readings.
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.threads import Threads
from tests.support.tls_client import client_context

NEIGHBOUR = "neighbour"
MEMORY_EACH_S, STALL_EACH_S, NEIGHBOUR_EACH_S = 0.02, 0.01, 0.05
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TIMEOUT_S = 60.0
"""Timeout of a request of a probe. It is long, because a busy machine is slow without an attack
too."""
TYPE = {"content-type": "application/vnd.kafka.json.v2+json"}
Request = tuple[str, str, bytes | None, dict[str, str]]
HEALTH: Sequence[Request] = [("GET", "/healthy", None, {})]
BEGUN = "begun"
RECORD: Sequence[Request] = [
    ("POST", f"/topics/{NEIGHBOUR}", b'{"records":[{"value":1}]}', TYPE),
    ("GET", f"/topics/{NEIGHBOUR}/partitions/0/records?offset=0&max_bytes=1", None, {}),
]


class Target(NamedTuple):
    """The broker, and the headers with the neighbour's rights."""

    pid: int
    address: str
    port: int
    is_tls: bool
    rights: dict[str, str]


class Readings(NamedTuple):
    """The results of the probes: memory in MiB, requests for /healthy, the neighbour's rounds.

    Of /healthy the slowest request, the most CPU time of the event loop's thread during one, and
    the faults; of the neighbour also its faults and its slowest round.
    """

    peak_mib: int
    stall_s: float
    stall_cpu_s: float
    health_faults: tuple[str, ...]
    rounds: int
    faults: tuple[str, ...]
    slowest_s: float


class _Probe:
    """A thread with a connection of its own, which sends the same requests again and again.

    Unless they prove a principal, the broker may close the connection while it is idle.
    """

    def __init__(
        self, target: Target, requests: Sequence[Request], each_s: float, *, is_proved: bool
    ) -> None:
        self._target, self._each_s, self._is_proved = target, each_s, is_proved
        self._requests = [
            (method, path, body, headers | target.rights)
            for method, path, body, headers in requests
        ]
        self.has_begun = threading.Event()
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []
        """CPU time of the event loop's thread in each round."""
        self.faults: list[str] = []

    def _connection(self) -> http.client.HTTPConnection:
        address, port = self._target.address, self._target.port
        if self._target.is_tls:
            context = client_context()
            return http.client.HTTPSConnection(address, port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)

    def run(self, end: threading.Event) -> None:
        try:
            self._run(end)
        finally:
            self.has_begun.set()

    def _run(self, end: threading.Event) -> None:
        connection: http.client.HTTPConnection | None = None
        while not end.is_set():
            began_s, began_cpu_s = time.perf_counter(), loop_cpu_s(self._target.pid)
            was_idle = connection is not None
            try:
                if connection is None:
                    connection = self._connection()
                for request in self._requests:
                    connection.request(*request)
                    with connection.getresponse() as answer:
                        answer.read()
                    if answer.status != http.client.OK:
                        self.faults.append(f"{request[0]} {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                if self._is_proved or not (was_idle and isinstance(error, ConnectionError)):
                    self.faults.append(repr(error))
                connection = None
            self.times_s.append(time.perf_counter() - began_s)
            self.cpu_s.append(loop_cpu_s(self._target.pid) - began_cpu_s)
            self.has_begun.set()
            end.wait(self._each_s)
        if connection is not None:
            connection.close()


def resident_mib(pid: int) -> int:
    """Return the resident memory of the process in MiB; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) // 1024
    return 0


def loop_cpu_s(pid: int) -> float:
    """Return the CPU time of the process's first thread, the event loop's; 0 if it has ended."""
    with suppress(OSError):
        # The name of the thread, which may have blanks, is in brackets.
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0


class Prober:
    """The process of the probes, for one attack after another."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begin(self, target: Target) -> None:
        """Probe the broker. Return when each probe has its first answer."""
        line_of_probes = self._exchange(json.dumps(target))
        assert line_of_probes == BEGUN, f"the process of the probes said {line_of_probes!r}"

    def end(self) -> Readings:
        """End the probes."""
        return Readings(*json.loads(self._exchange("")))

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(line, file=self._process.stdin, flush=True)
            if line_of_probes := self._process.stdout.readline().strip():
                return line_of_probes
        except BaseException:  # half an exchange: the next one would get its answer
            self._process.kill()
            raise
        raise RuntimeError(f"the process of the probes ended: {self._process.wait()}")


@contextmanager
def prober() -> Iterator[Prober]:
    """Run the process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tools.attack.probes"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Prober(process)


def _probe(target: Target, until: Callable[[], object], begun: Callable[[], None]) -> Readings:
    """Probe until the function `until` returns. Call `begun` after the first answers."""
    health = _Probe(target, HEALTH, STALL_EACH_S, is_proved=False)
    neighbour = _Probe(target, RECORD, NEIGHBOUR_EACH_S, is_proved=True)
    peaks = [resident_mib(target.pid)]
    end = threading.Event()

    def watch() -> None:
        while not end.wait(MEMORY_EACH_S):
            peaks.append(resident_mib(target.pid))

    with Threads(watch, *(partial(probe.run, end) for probe in (health, neighbour)), stop=end):
        for probe in (health, neighbour):
            probe.has_begun.wait()
        begun()
        until()
    return Readings(
        max(peaks),
        max(health.times_s),
        max(health.cpu_s),
        tuple(health.faults),
        len(neighbour.times_s),
        tuple(neighbour.faults),
        max(neighbour.times_s),
    )


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        target = Target(*json.loads(line))
        readings = _probe(target, sys.stdin.readline, partial(print, BEGUN, flush=True))
        print(json.dumps(readings), flush=True)


if __name__ == "__main__":
    main()
