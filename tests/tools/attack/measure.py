"""An attack and its limits: the broker's memory, its slowest answer, a neighbour's requests.

The neighbour is another client.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.tools.attack.probes import Prober, Target, resident_mib

if TYPE_CHECKING:
    from tests.tools.attack.brokers import AttackedBroker

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


def scaled(count: int, scale: float, least: int) -> int:
    """Return the count at this scale of an attack, but at least `least`."""
    return max(int(count * scale), least)


class Result(NamedTuple):
    """The measures of one attack: MiB of memory, slowest answers (s), the neighbour's rounds.

    Rounds are successful or failed.
    """

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
    """Of the neighbour, and of the requests for /healthy."""
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


def measured(
    broker: "AttackedBroker", prober: Prober, name: str, attack: Attack, rest_s: float
) -> Result:
    """Run the attack while the probes run; then give the broker `rest_s` to free memory.

    The attack returns its answers as a text for the table.
    """
    rights = {} if broker.neighbour is None else broker.neighbour.headers
    is_tls = broker.base_url.startswith("https")
    old_mib, logged = resident_mib(broker.pid), len(broker.log())
    prober.begin(Target(broker.pid, broker.address, broker.port, is_tls, rights))
    try:
        answers = attack(broker)
    except OSError as error:  # of a connection: the broker may have ended
        answers = repr(error)
    finally:
        time.sleep(rest_s)
        readings = prober.end()
    new_mib = resident_mib(broker.pid)
    health_faults = [f"/healthy: {fault}" for fault in readings.health_faults]
    faults = (*readings.faults, *health_faults)
    return Result(
        name,
        answers,
        old_mib,
        readings.peak_mib,
        new_mib,
        readings.stall_s,
        readings.rounds - len(readings.faults),
        len(faults),
        readings.slowest_s,
        new_mib > 0,
        faults,
        bugs_in(broker.log()[logged:]),
        readings.stall_cpu_s,
    )


def bugs_in(log: str) -> tuple[str, ...]:
    """Return the lines of a broker's log about errors that no handler expects."""
    return tuple(line for line in log.splitlines() if " bug in " in line or "Traceback" in line)
