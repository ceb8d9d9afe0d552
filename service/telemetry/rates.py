"""Rates per second for the console: of this broker and its peers, now and in the last half hour.

Also the history of the groups' lags.

Every STEP_S, a task reads the counters and appends the difference to a ring buffer. So requests do
no work for the rates, and the memory of the rates is bounded (I10). The steps of all brokers end at
the same wall-clock times. So one broker can request the rings of the others (service.peers) and add
them up. The rings are in memory only: they are empty after a restart. A broker remembers the last
answers of the others for REMEMBERED_S, so that the past of the cluster stays when one of them ends.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from tidelog.service.telemetry.broker_health import BrokerSigns, SignSampler
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.metrics import Telemetry
from tidelog.storage.broker import Broker
from tidelog.storage.core.histogram import SECONDS
from tidelog.storage.runtime.tasks import surviving

log = logging.getLogger("tidelog")

STEP_S = 5
STEPS = 360
"""Half an hour of steps."""
LOOKS_A_STEP = 1
"""Maximum sealed records that a step reads for lags in seconds (`lag_times`): at most two GETs."""
REMEMBERED_S = 3600.0
"""How long a broker remembers the last answer of another one."""
REMEMBERED_MAX = 32
"""Remembered answers, of about 0.3 MB each."""
ASKED_STEPS = 12
"""Steps between two requests for the rates of the others, if no client causes them."""
RATE_STEPS = 3
"""A current rate is the average of the last RATE_STEPS steps."""

PRODUCE = "Produce"
"""The API of Kafka's protocol whose latency is an ack latency."""
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
"""The counters, in the order of a Step's `added`."""


class Step(msgspec.Struct, array_like=True):
    """The increments of the counters in one step of wall time.

    `acks` are ack latencies: a count for each bucket of SECONDS.
    """

    number: int
    added: list[float]
    acks: list[int]


class BrokerRates(msgspec.Struct):
    """The rates and the state of one broker, as it reports them to its peers."""

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
    """Length of the period of `recent`."""
    recent: Step
    steps: list[Step]
    signs: BrokerSigns | None = None
    """None from a broker of an older version."""


class AbsentBroker(NamedTuple):
    """A broker that answered within the last REMEMBERED_S, and does not answer now."""

    rates: BrokerRates
    answered_s: float
    """The time of its last answer, by the clock `boot_s`."""


class LagHistory(msgspec.Struct):
    """The lag of a group in each topic: one value per step. The last value is at `end_ms`."""

    step_ms: int
    end_ms: int
    topics: dict[str, list[int | None]]


class _Sample:
    """The counters at one moment."""

    def __init__(self, at_s: float, values: list[float], acks: list[int]) -> None:
        self.at_s = at_s
        self.values = values
        self.acks = acks

    def since(self, old_sample: "_Sample", number: int) -> Step:
        return Step(
            number,
            [now - was for now, was in zip(self.values, old_sample.values, strict=True)],
            [now - was for now, was in zip(self.acks, old_sample.acks, strict=True)],
        )


Answer = TypeVar("Answer")
Ask = Callable[[], Awaitable[Sequence[bytes]]]


def answers(texts: Iterable[bytes], kind: type[Answer]) -> Iterator[Answer]:
    """Decode the answers of peers.

    Omit those that have the format of another version, as if these brokers had not answered.
    """
    for text in texts:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield msgspec.msgpack.decode(text, type=kind)


async def no_answers() -> Sequence[bytes]:
    """Return no answers: the default of a broker without peers."""
    return ()


class RateSampler:
    """The sampler of the rates of one broker.

    It reads the rates of the broker's peers through `ask`. Owned by one event loop. `run` does not
    end by itself.
    """

    def __init__(
        self,
        broker: Broker,
        http: HttpCounters,
        version: str,
        worker: int = 0,
        ask: Ask = no_answers,
        *,
        ack_labels: Collection[str],
        telemetry: Telemetry | None = None,
    ) -> None:
        """`ack_labels` are the labels of the routes whose latency is the ack latency."""
        self._telemetry = telemetry or Telemetry(broker, http, version)
        self.lags = self._telemetry.lags
        self._signs = SignSampler(broker)
        self._ack_labels = ack_labels
        self._broker = broker
        self._http = http
        self._version = version
        self._worker = worker
        self._ask = ask
        self._samples: deque[_Sample] = deque([self._sample()], maxlen=RATE_STEPS + 1)
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._lags: dict[tuple[str, str], deque[tuple[int, int]]] = {}
        self._remembered: dict[str, AbsentBroker] = {}
        """The last answers of other brokers, by id, the oldest answer first."""

    async def run(self) -> None:
        """Record a step at the end of each STEP_S, until cancelled."""
        for count in itertools.count(1):
            step_ms = STEP_S * 1000
            await asyncio.sleep((step_ms - self._broker.clock.now_ms() % step_ms) / 1000)
            with surviving(log, "a step of the rates"):
                await self.lags.refresh()
                self.step()
                if count % ASKED_STEPS == 0:
                    await self._others()
                await self._telemetry.shares.step()
                await self.lags.look(LOOKS_A_STEP)
                await self._telemetry.maintenance.stored(self._broker).refresh()

    def step(self) -> None:
        number = round(self._broker.clock.now_ms() / (STEP_S * 1000))
        sample = self._sample()
        self._steps.append(sample.since(self._samples[-1], number))
        self._samples.append(sample)
        self._signs.step()
        self._look_at_lags(number)

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self.own())

    async def all(self) -> list[BrokerRates]:
        """Return the rates of every broker that answers in time, this one first."""
        other_rates = await self._others()
        return [self.own(), *other_rates]

    async def _others(self) -> list[BrokerRates]:
        """Return the rates of the other brokers that answer in time, by name; remember them."""
        texts = await self._ask()
        other_rates = [rates for rates in answers(texts, BrokerRates) if _has_our_counters(rates)]
        self._remember(other_rates)
        return sorted(other_rates, key=lambda rates: rates.name)

    def _remember(self, other_rates: Iterable[BrokerRates]) -> None:
        now_s, remembered = self._broker.clock.boot_s(), self._remembered
        for rates in other_rates:
            remembered.pop(rates.id, None)
            remembered[rates.id] = AbsentBroker(rates, now_s)
        while remembered:
            oldest = next(iter(remembered.values()))
            if oldest.answered_s >= now_s - REMEMBERED_S and len(remembered) <= REMEMBERED_MAX:
                break
            del remembered[oldest.rates.id]

    def absent(self, all_rates: Iterable[BrokerRates]) -> list[AbsentBroker]:
        """Return the brokers that are not among `all_rates`, the result of `all`."""
        ids = {rates.id for rates in all_rates}
        return [broker for broker in self._remembered.values() if broker.rates.id not in ids]

    def own(self) -> BrokerRates:
        now, stats = self._sample(), self._broker.stats()
        me, _, sequencer, _ = members = self._broker.cluster.members()
        return BrokerRates(
            id=me.id,
            name=me.name,
            number=me.number,
            address=me.address,
            port=me.port,
            started_ms=me.started_ms,
            version=self._version,
            worker=self._worker,
            is_sequencer=members.is_sequencer,
            sequencer=sequencer.name,
            wal_seq=self._broker.state.seq,
            view_age_s=min(stats.view_age_s, 1e9),
            buffered_bytes=stats.buffered_bytes,
            buffered_bytes_max=stats.buffered_bytes_max,
            seconds=now.at_s - self._samples[0].at_s,
            recent=now.since(self._samples[0], 0),
            steps=list(self._steps),
            signs=self._signs.own(
                self._http.admission.connections,
                self._telemetry.maintenance.results,
                maintains=self._telemetry.maintenance.is_running,
            ),
        )

    def lag_history(self, group_id: str) -> LagHistory:
        """Return the lag of the group in each topic, in the last STEPS steps.

        There are fewer if this broker started later.
        """
        past_by_topic = {
            topic: past for (group, topic), past in self._lags.items() if group == group_id
        }
        numbers = sorted({number for past in past_by_topic.values() for number, _ in past})
        topics: dict[str, list[int | None]] = {}
        steps = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        for topic, past in past_by_topic.items():
            behind = dict(past)
            topics[topic] = [behind.get(number) for number in steps]
        end_ms = numbers[-1] * STEP_S * 1000 if numbers else self._broker.clock.now_ms()
        return LagHistory(STEP_S * 1000, end_ms, topics)

    def _look_at_lags(self, number: int) -> None:
        """Add the newest lags to the histories.

        In a cluster with very many committed offsets, the newest lags may be older than a step
        (LagTotals).
        """
        totals = self.lags.topics
        for key, total in totals.items():
            self._lags.setdefault(key, deque(maxlen=STEPS)).append((number, total))
        for key in [key for key in self._lags if key not in totals]:
            del self._lags[key]

    def _sample(self) -> _Sample:
        http, stats = self._http, self._broker.stats()
        requests = {} if stats.store is None else stats.store.by_verb()
        acks = [0] * (len(SECONDS) + 1)
        latencies = [http.latencies.get(route) for route in self._ack_labels]
        for latency in (*latencies, http.kafka.latencies.get(PRODUCE)):
            if latency is not None:
                acks = [have + added for have, added in zip(acks, latency.counts, strict=True)]
        by_kafka = sum(sum(latency.counts) for latency in http.kafka.latencies.values())
        values: list[float] = [
            http.total("records_in"),
            http.total("bytes_in"),
            http.total("records_out"),
            http.total("bytes_out"),
            sum(http.requests.values()) + by_kafka,
            stats.writer.flushes,
            stats.wal.entries_committed,
            requests.get("create", 0) + requests.get("put", 0),
            requests.get("get", 0),
            requests.get("list", 0),
            requests.get("delete", 0),
            stats.cold_reads,
        ]
        return _Sample(self._broker.clock.boot_s(), values, acks)


def _has_our_counters(rates: BrokerRates) -> bool:
    """Whether the rates have the counters of this version.

    The console shows a broker of another version without rates.
    """
    sizes = {(len(step.added), len(step.acks)) for step in [rates.recent, *rates.steps]}
    return sizes == {(len(NAMES), len(SECONDS) + 1)}


def summed(brokers: Iterable[BrokerRates]) -> list[Step]:
    """Sum the steps of all brokers.

    A broker that does not have a step adds nothing to this step. Omit the newest step unless all
    brokers have it, because its partial sum would look like a drop of the rate.
    """
    all_steps = [broker.steps for broker in brokers if broker.steps]
    newest = max((steps[-1].number for steps in all_steps), default=0)
    end = max(min((steps[-1].number for steps in all_steps), default=0), newest - 1)
    sums: dict[int, Step] = {}
    for steps in all_steps:
        for step in steps:
            if step.number > end:
                continue
            step_sum = sums.get(step.number)
            if step_sum is None:
                sums[step.number] = Step(step.number, list(step.added), list(step.acks))
            else:
                step_sum.added = [a + b for a, b in zip(step_sum.added, step.added, strict=True)]
                step_sum.acks = [a + b for a, b in zip(step_sum.acks, step.acks, strict=True)]
    return [sums[number] for number in sorted(sums)]


def quantile_s(counts: Sequence[int], part: float) -> float | None:
    """Estimate the quantile `part` of latencies by linear interpolation within a bucket.

    If there are no latencies, return None.
    """
    total = sum(counts)
    if not total:
        return None
    target, count_below = part * total, 0
    low = 0.0
    for bound, count in zip(SECONDS, counts, strict=False):
        if count and count_below + count >= target:
            return low + (bound - low) * (target - count_below) / count
        count_below += count
        low = bound
    return SECONDS[-1]
