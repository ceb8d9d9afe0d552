"""What a broker does per second, now and in the last half hour: for the console, of all brokers.

Every few seconds the counters are looked at, and what was added since goes into a ring: nothing on
a hot path, and bounded (I10). The brokers' rings are of the same steps of wall time, so that
whoever is asked can ask the others (service.peers) and add them up. Soft: it begins anew with the
process.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

import msgspec

from service.log_metrics import SERIES_MAX, lags
from service.telemetry import HttpCounters
from storage.histogram import SECONDS
from storage.log import Log
from storage.metered import MeteredStore

log = logging.getLogger("tidelog")

STEP_S = 5
STEPS = 360
"""Half an hour."""
RATE_STEPS = 3
"""Rates of now are of the last so many steps."""
LAGS_MAX = 500
"""Groups' topics with a history."""
ACKED = ("produce", "records", "transactions")
"""Routes whose answer is an ack."""

NAMES = (
    "records_in",
    "bytes_in",
    "records_out",
    "bytes_out",
    "requests",
    "flushes",
    "commits",
    "puts",
    "gets",
    "lists",
    "deletes",
    "cold_reads",
)
"""What is counted, in the order of a Step's `added`."""


class Step(msgspec.Struct, array_like=True):
    """What was added to the counters in one step of wall time; `acks` are counts of ack latencies
    by size class."""

    number: int
    added: list[float]
    acks: list[int]


class BrokerVitals(msgspec.Struct):
    """One broker, as it sees itself."""

    id: str
    name: str
    number: int
    address: str
    port: int
    started_ms: int
    version: str
    worker: int
    is_sequencer: bool
    sequencer: str
    wal_seq: int
    view_age_s: float
    buffered_bytes: int
    buffered_bytes_max: int
    seconds: float
    """That `recent` is of."""
    recent: Step
    steps: list[Step]


class LagHistory(msgspec.Struct):
    """How far a group was behind in each topic: one number a step, the last at `end_ms`."""

    step_ms: int
    end_ms: int
    topics: dict[str, list[int | None]]


class _Sample:
    """The counters at one moment."""

    def __init__(self, at_s: float, values: list[float], acks: list[int]) -> None:
        self.at_s = at_s
        self.values = values
        self.acks = acks

    def since(self, before: "_Sample", number: int) -> Step:
        return Step(
            number,
            [now - was for now, was in zip(self.values, before.values, strict=True)],
            [now - was for now, was in zip(self.acks, before.acks, strict=True)],
        )


Ask = Callable[[], Awaitable[Sequence[bytes]]]


async def nobody() -> Sequence[bytes]:
    """Ask the peers of a broker that has none."""
    return ()


class Vitals:
    """One broker's, and through `ask` everybody's. Owned by one event loop; `run` for ever."""

    def __init__(
        self, broker: Log, http: HttpCounters, version: str, worker: int = 0, ask: Ask = nobody
    ) -> None:
        self._log = broker
        self._http = http
        self._version = version
        self._worker = worker
        self._ask = ask
        self._samples: deque[_Sample] = deque([self._sample()], maxlen=RATE_STEPS + 1)
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._lags: dict[tuple[str, str], deque[tuple[int, int]]] = {}

    async def run(self) -> None:
        """Look at the counters at the end of every step, for ever."""
        while True:
            step_ms = STEP_S * 1000
            await asyncio.sleep((step_ms - self._log.clock.now_ms() % step_ms) / 1000)
            try:
                self.step()
            except Exception:  # the root of a task: a bug here must not end it, nor go unseen
                log.exception("a step of the vitals failed")

    def step(self) -> None:
        """One step is over."""
        number = round(self._log.clock.now_ms() / (STEP_S * 1000))
        sample = self._sample()
        self._steps.append(sample.since(self._samples[-1], number))
        self._samples.append(sample)
        self._look_at_lags(number)

    def told(self) -> bytes:
        """This broker's, for a peer."""
        return msgspec.msgpack.encode(self.own())

    async def all(self) -> list[BrokerVitals]:
        """Of every broker that answers soon, this one first."""
        others = [one for text in await self._ask() if (one := _decoded(text)) is not None]
        return [self.own(), *sorted(others, key=lambda one: one.name)]

    def own(self) -> BrokerVitals:
        log, now = self._log, self._sample()
        me, target = log.membership.me, log.sequencer.target
        writer = log.writer
        return BrokerVitals(
            id=me.id,
            name=me.name,
            number=me.number,
            address=me.address,
            port=me.port,
            started_ms=me.started_ms,
            version=self._version,
            worker=self._worker,
            is_sequencer=log.sequencer.is_first,
            sequencer=(target or me).name,
            wal_seq=log.state.seq,
            view_age_s=min(log.wal.view_age_s, 1e9),
            buffered_bytes=writer.buffered_bytes,
            buffered_bytes_max=writer.settings.buffer_bytes_max,
            seconds=now.at_s - self._samples[0].at_s,
            recent=now.since(self._samples[0], 0),
            steps=list(self._steps),
        )

    def lag_history(self, group_id: str) -> LagHistory:
        """Of the group's topics, since this broker began to look."""
        found = {topic: past for (group, topic), past in self._lags.items() if group == group_id}
        numbers = sorted({number for past in found.values() for number, _ in past})
        topics: dict[str, list[int | None]] = {}
        steps = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        for topic, past in found.items():
            behind = dict(past)
            topics[topic] = [behind.get(number) for number in steps]
        end_ms = numbers[-1] * STEP_S * 1000 if numbers else self._log.clock.now_ms()
        return LagHistory(STEP_S * 1000, end_ms, topics)

    def _look_at_lags(self, number: int) -> None:
        totals: dict[tuple[str, str], int] = {}
        for group_id, topic, _, behind in islice(lags(self._log), SERIES_MAX):
            key = (group_id, topic)
            totals[key] = totals.get(key, 0) + behind
        for key, total in totals.items():
            if key in self._lags or len(self._lags) < LAGS_MAX:
                self._lags.setdefault(key, deque(maxlen=STEPS)).append((number, total))
        for key in [key for key in self._lags if key not in totals]:
            del self._lags[key]

    def _sample(self) -> _Sample:
        log, http = self._log, self._http
        asked = log.store.counters.requests if isinstance(log.store, MeteredStore) else {}
        acks = [0] * (len(SECONDS) + 1)
        for route in ACKED:
            latency = http.latencies.get(route)
            if latency is not None:
                acks = [have + more for have, more in zip(acks, latency.counts, strict=True)]
        values: list[float] = [
            http.records_in,
            http.bytes_in,
            http.records_out,
            http.bytes_out,
            sum(http.requests.values()),
            log.writer.counters.flushes,
            log.wal.counters.entries_committed,
            asked.get("create", 0) + asked.get("put", 0),
            asked.get("get", 0),
            asked.get("list", 0),
            asked.get("delete", 0),
            log.reader.cold_reads,
        ]
        return _Sample(log.clock.boot_s(), values, acks)


def _decoded(text: bytes) -> BrokerVitals | None:
    """None for what another version says in another form: such a broker is shown as silent."""
    try:
        said = msgspec.msgpack.decode(text, type=BrokerVitals)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    sizes = {(len(step.added), len(step.acks)) for step in [said.recent, *said.steps]}
    return said if sizes == {(len(NAMES), len(SECONDS) + 1)} else None


def summed(brokers: Iterable[BrokerVitals]) -> list[Step]:
    """The steps of all brokers, added up; one without a broker's step has what the others say. But
    the newest, where one broker is over with it and another not yet: that would look like a fall.
    """
    all_steps = [broker.steps for broker in brokers if broker.steps]
    newest = max((steps[-1].number for steps in all_steps), default=0)
    end = max(min((steps[-1].number for steps in all_steps), default=0), newest - 1)
    found: dict[int, Step] = {}
    for steps in all_steps:
        for step in steps:
            if step.number > end:
                continue
            held = found.get(step.number)
            if held is None:
                found[step.number] = Step(step.number, list(step.added), list(step.acks))
            else:
                held.added = [a + b for a, b in zip(held.added, step.added, strict=True)]
                held.acks = [a + b for a, b in zip(held.acks, step.acks, strict=True)]
    return [found[number] for number in sorted(found)]


def quantile_s(counts: Sequence[int], part: float) -> float | None:
    """About the latency that `part` of them stayed below; within a size class as if evenly spread.
    None where there are none."""
    total = sum(counts)
    if not total:
        return None
    wanted, seen = part * total, 0
    low = 0.0
    for bound, count in zip(SECONDS, counts, strict=False):
        if count and seen + count >= wanted:
            return low + (bound - low) * (wanted - seen) / count
        seen += count
        low = bound
    return SECONDS[-1]
