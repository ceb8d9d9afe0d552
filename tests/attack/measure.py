"""Measures during an attack: the broker's memory, its slowest answer, the requests of a neighbour,
which is another client."""

import http.client
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.threads import Threads
from tests.support.tls_client import client_context

if TYPE_CHECKING:
    from tests.attack.brokers import AttackedBroker

MIB = 1 << 20
VICTIM = "t"
"""The name of the topic that attacks write to and read."""
HOLD_S = 10.0
"""How long an attack keeps its silent connections open, at scale 1."""
Attack = Callable[[Any], str]
"""Attacks a broker (AttackedBroker or SecuredBroker); returns its answers as a text."""
PEAK_MIB_MAX = 1024
GROWTH_MIB_MAX = 300
STALL_CPU_S_MAX = 0.25
"""CPU time of the thread of the event loop, while one request for /healthy waits. It does not
depend on the speed of the machine's other work, as the time of the answer does."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
NEIGHBOUR = "neighbour"
EACH_S = {"memory": 0.02, "stall": 0.01, NEIGHBOUR: 0.05}
TIMEOUT_S = 60.0
"""Timeout of a request of a probe. It is long, because a busy machine is slow without an attack
too."""
TYPE = {"content-type": "application/vnd.kafka.json.v2+json"}
Request = tuple[str, str, bytes | None, dict[str, str]]
HEALTH: Sequence[Request] = [("GET", "/healthy", None, {})]
RECORD: Sequence[Request] = [
    ("POST", f"/topics/{NEIGHBOUR}", b'{"records":[{"value":1}]}', TYPE),
    ("GET", f"/topics/{NEIGHBOUR}/partitions/0/records?offset=0&max_bytes=1", None, {}),
]


def scaled(count: int, scale: float, least: int) -> int:
    """Return the count at this scale of an attack, but at least `least`."""
    return max(int(count * scale), least)


class Result(NamedTuple):
    """The measures of one attack: MiB of memory, the slowest answers in seconds, and the numbers of
    successful and failed rounds of the neighbour."""

    attack: str
    answers: str
    before_mib: int
    peak_mib: int
    after_mib: int
    stall_s: float
    done: int
    failed: int
    slowest_s: float
    is_alive: bool
    faults: tuple[str, ...] = ()
    bugs: tuple[str, ...] = ()
    """Lines of the log about errors that no handler expects."""
    stall_cpu_s: float = 0.0

    @property
    def why_failed(self) -> str:
        """Return the limit that the broker exceeded; empty if it withstood the attack."""
        if not self.is_alive:
            return "the broker ended"
        if self.bugs:
            return f"a bug: {self.bugs[0]}"
        if self.peak_mib > PEAK_MIB_MAX:
            return f"memory above {PEAK_MIB_MAX} MiB"
        if self.peak_mib - self.before_mib > GROWTH_MIB_MAX:
            return f"memory rose by more than {GROWTH_MIB_MAX} MiB"
        if self.stall_cpu_s > STALL_CPU_S_MAX:
            return f"/healthy waited for {self.stall_cpu_s:.2f} s of CPU"
        if "FAILED" in self.answers:
            return "another tenant failed"
        return f"the neighbour failed: {self.faults[0]}" if self.failed else ""


class _Probe:
    """A thread with a connection of its own, which sends the same requests again and again."""

    def __init__(self, broker: "AttackedBroker", name: str, requests: Sequence[Request]) -> None:
        principal = broker.neighbour
        rights = {} if principal is None else principal.headers
        self._broker, self._name = broker, name
        self._requests = [
            (method, path, body, headers | rights) for method, path, body, headers in requests
        ]
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []
        """CPU time of the event loop's thread in each round."""
        self.faults: list[str] = []

    def _connection(self) -> http.client.HTTPConnection:
        address, port = self._broker.address, self._broker.port
        if self._broker.base_url.startswith("https"):
            context = client_context()
            return http.client.HTTPSConnection(address, port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)

    def run(self, end: threading.Event) -> None:
        connection: http.client.HTTPConnection | None = None
        while not end.is_set():
            began_s, began_cpu_s = time.perf_counter(), loop_cpu_s(self._broker.pid)
            try:
                if connection is None:
                    connection = self._connection()
                for request in self._requests:
                    connection.request(*request)
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status != 200:
                        self.faults.append(f"{request[0]} {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                self.faults.append(repr(error))
                connection = None
            self.times_s.append(time.perf_counter() - began_s)
            self.cpu_s.append(loop_cpu_s(self._broker.pid) - began_cpu_s)
            end.wait(EACH_S[self._name])
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
    """Return the CPU time of the process's first thread, which runs the event loop; 0 if it has
    ended."""
    with suppress(OSError):
        # The name of the thread, which may have blanks, is in brackets.
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0


def measured(broker: "AttackedBroker", name: str, attack: Attack, rest_s: float) -> Result:
    """Run the attack while the probes run; then give the broker `rest_s` to free memory. The attack
    returns its answers as a text for the table."""
    health, neighbour = _Probe(broker, "stall", HEALTH), _Probe(broker, NEIGHBOUR, RECORD)
    peaks, logged = [before := resident_mib(broker.pid)], len(broker.log())

    end = threading.Event()

    def watch() -> None:
        while not end.wait(EACH_S["memory"]):
            peaks.append(resident_mib(broker.pid))

    works = [partial(each, end) for each in (health.run, neighbour.run)]
    with Threads(watch, *works, stop=end):
        try:
            answers = attack(broker)
        except OSError as error:  # of a connection: the broker may have ended
            answers = repr(error)
        time.sleep(rest_s)
    after = resident_mib(broker.pid)
    return Result(
        name,
        answers,
        before,
        max(peaks),
        after,
        max(health.times_s, default=0.0),
        len(neighbour.times_s) - len(neighbour.faults),
        len(neighbour.faults),
        max(neighbour.times_s, default=0.0),
        after > 0,
        tuple(neighbour.faults),
        bugs_in(broker.log()[logged:]),
        max(health.cpu_s, default=0.0),
    )


def bugs_in(log: str) -> tuple[str, ...]:
    """Return the lines of a broker's log about errors that no handler expects."""
    return tuple(line for line in log.splitlines() if " bug in " in line or "Traceback" in line)
