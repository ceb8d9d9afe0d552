"""Faults of brokers and of their connections to the store, one after the other, by a seed."""

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from deploy.demo.broker_process import BrokerFailed
from tests.support.broker import Broker, environment
from tests.system.client import AnswerLost, NotSent
from tests.system.fault_proxy import FaultProxy, Faults
from tests.system.several import sequencer_first, stopped

MIXED = Faults(slowed=0.2, refused=0.1, denied=0.05, unanswered=0.05, halved=0.05)
UNANSWERED = Faults(denied=0.15, unanswered=0.15)
THROTTLED = Faults(refused=0.6)
SLOW = Faults(slowed=1.0, slow_s=1.0)
FILE_GRACE_MS = 5000
"""Longer than any read of these tests takes."""
VIEW_AGE_S = 2.0
YOUNG = {
    "wal_view_age_max_ms": round(1000 * VIEW_AGE_S),
    "wal_retention_ms": 10_000,
    "file_grace_ms": FILE_GRACE_MS,
    "test_bounds": True,
}
OFTEN = {
    "poll_interval_ms": 200,
    "retention_check_interval_ms": 1000,
    "merge_after_ms": 2000,
    "merge_cpu_percent": 20,
    "tuning": {
        "wal": {"checkpoint_entries": 50, "checkpoint_interval_s": 0.0},
        "sealer": {"check_interval_s": 0.2},
    },
}


START_AGAIN = "start this broker again"
STARTS_S = 180.0
"""Time for which a broker that asks for it is started again. It asks if its view, which may be 2 s
old here, expires while it recovers its hot log."""


def _supervise(broker: Broker) -> None:
    """Start a broker, again if it asks for it, as its supervisor does."""
    until_s = time.monotonic() + STARTS_S
    while True:
        try:
            return broker.start()
        except BrokerFailed as failure:
            if START_AGAIN not in str(failure) or time.monotonic() > until_s:
                raise


class Nemesis:
    """Every broker lives again, and every way is open, when a step has ended."""

    def __init__(
        self,
        brokers: Sequence[Broker],
        ways: Sequence[FaultProxy],
        peers: Sequence[FaultProxy],
        *,
        view_age_s: float,
        seed: int,
        variables: Mapping[str, str],
    ) -> None:
        """`ways` lead from a broker to the store, `peers` from the others to a broker.

        `variables` are the environment of `tidelog maintain`.
        """
        self._brokers = brokers
        self._ways = ways
        self._peers = peers
        self._view_age_s = view_age_s
        self._variables = variables
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._deeds: tuple[Callable[[], None], ...] = (
            self._kill,
            self._kill_several,
            self._terminate,
            self._stop_for_a_moment,
            self._stop_for_longer_than_a_view_may_be_old,
            self._faults_for_one,
            self._faults_for_all,
            self._silence_for_one,
            self._silence_for_all,
            self._faults_between_brokers,
            self._cut_between_brokers,
            self._maintain,
            self._maintain_and_kill,
        )
        self._next: list[Callable[[], None]] = []

    def step(self) -> None:
        """Each deed comes once before any comes again."""
        if not self._next:
            self._next = self._draw.sample(self._deeds, len(self._deeds))
        self._do(self._next.pop())

    def _do(self, deed: Callable[[], None]) -> None:
        self.counts[deed.__name__.strip("_").replace("_", " ")] += 1
        deed()

    def _victim(self) -> Broker:
        """Every second time the one that matters most."""
        if self._draw.random() < 0.5:
            with contextlib.suppress(NotSent, AnswerLost):
                return sequencer_first(list(self._brokers))[0]
        return self._draw.choice(self._brokers)

    def _wait(self, low_s: float, high_s: float) -> None:
        time.sleep(self._draw.uniform(low_s, high_s))

    def _kill(self) -> None:
        victim = self._victim()
        victim.kill()
        self._wait(0.0, 2.0)
        _supervise(victim)

    def _kill_several(self) -> None:
        victims = self._draw.sample(self._brokers, 2)
        for victim in victims:
            victim.kill()
            self._wait(0.0, 0.3)
        for victim in victims:
            _supervise(victim)

    def _terminate(self) -> None:
        victim = self._victim()
        status = victim.stop()
        assert status == 0, victim.log()[-3000:]
        _supervise(victim)

    def _stop_for_a_moment(self) -> None:
        with stopped(self._victim()):
            self._wait(0.1, 1.0)

    def _stop_for_longer_than_a_view_may_be_old(self) -> None:
        with stopped(self._victim()):
            self._wait(1.1 * self._view_age_s, 1.5 * self._view_age_s)

    def _faults_for_one(self) -> None:
        way = self._draw.choice(self._ways)
        with way.having(self._draw.choice((MIXED, UNANSWERED, THROTTLED, SLOW))):
            self._wait(0.5, 3.0)

    def _faults_for_all(self) -> None:
        faults = self._draw.choice((MIXED, UNANSWERED))
        with contextlib.ExitStack() as stack:
            for way in self._ways:
                stack.enter_context(way.having(faults))
            self._wait(0.5, 3.0)

    def _silence_for_one(self) -> None:
        with self._draw.choice(self._ways).silent():
            self._wait(0.5, 1.5 * self._view_age_s)

    def _silence_for_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for way in self._ways:
                stack.enter_context(way.silent())
            self._wait(0.5, 2.0)

    def _faults_between_brokers(self) -> None:
        with contextlib.ExitStack() as stack:
            for way in self._peers:
                stack.enter_context(way.having(self._draw.choice((MIXED, UNANSWERED, SLOW))))
            self._wait(0.5, 3.0)

    def _cut_between_brokers(self) -> None:
        """Let one get no message from the others for longer than their timeout.

        All of them reach the store.
        """
        with self._draw.choice(self._peers).silent():
            self._wait(1.0, 4.0)

    def _maintain(self) -> None:
        with self._maintaining() as process:
            errors = process.communicate()[1].decode()
            assert process.returncode == 0, errors[-3000:]

    def _maintain_and_kill(self) -> None:
        with self._maintaining() as process:
            self._wait(0.7, 2.0)  # it takes that long to start
            process.kill()

    def _maintaining(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tidelog.service.cli", "maintain", "--yes"]
        command += ["--store", self._brokers[0].store]
        return subprocess.Popen(
            command,
            env=environment(**self._variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
