"""Kafka clients under faults: idempotent producers, and groups whose members commit.

A producer's records are recorded as requests of one record, so that the checkers of the REST load
also check them: each is acked at one offset, or its outcome is unknown.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import confluent_kafka as librdkafka

from tests.sim import history
from tests.support.history import Place, Request, Written
from tests.support.threads import Threads
from tests.system.client import wait_until
from tests.system.recorded import OPS_OF_ONE

__all__ = ["KafkaGroup", "KafkaProducer"]

LAST_ACKS_S = 120.0
"""Longest wait for the acks of the last records."""
QUIET: dict[str, Any] = {"log_level": 0, "logger": logging.getLogger("rdkafka")}
QUICK: dict[str, Any] = {
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.interval.ms": 2000,
    "socket.timeout.ms": 10_000,
    **QUIET,
}


class _Sent(NamedTuple):
    request: Request
    op: int
    begun_s: float


class KafkaProducer(Threads):
    """An idempotent producer of librdkafka in a thread, from `with` to `finish`. In a history, each
    producer has another `number`."""

    def __init__(
        self, addresses: str, topic: str, partitions: int, number: int, *, pause_s: float = 0.002
    ) -> None:
        super().__init__(self._run)
        self._config: dict[str, Any] = {
            "bootstrap.servers": addresses,
            "enable.idempotence": True,
            "linger.ms": 5,
        }
        self._where = (topic, partitions)
        self.number = number
        self._pause_s = pause_s
        self._history = history.Recorder(number * OPS_OF_ONE)
        self._failures: list[object] = []
        self.requests: list[Request] = []
        self.acks = 0
        self.longest_ack_s = 0.0

    @property
    def events(self) -> list[history.Event]:
        return self._history.events

    def finish(self) -> list[Request]:
        """End, after all acks; raise what went wrong. Return the requests in their order."""
        self.end()
        assert not self._failures, self._failures[:3]
        return self.requests

    def wait_for_acks(self, more: int) -> None:
        wanted = self.acks + more
        wait_until(lambda: self.acks >= wanted or bool(self._failures), f"{more} more acks")

    def _run(self) -> None:
        try:
            producer = librdkafka.Producer({**self._config, **QUICK})
            while not self._stop.is_set():
                self._send(producer)
                producer.poll(self._pause_s)
            if left := producer.flush(LAST_ACKS_S):
                self._failures.append(f"{left} records have no answer after {LAST_ACKS_S:g} s")
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._failures.append(error)

    def _send(self, producer: librdkafka.Producer) -> None:
        sent = self._begin()

        def delivered(error: object, message: Any) -> None:
            if error is not None:
                self._fail(sent, error)
            else:
                self._acked(sent, message.partition(), message.offset())

        written = sent.request.records[0]
        producer.produce(
            self._where[0], written.value, partition=written.partition, on_delivery=delivered
        )

    # -- what happens to a record

    def _begin(self) -> _Sent:
        topic, partitions = self._where
        index = len(self.requests)
        value = f'{{"id":"kafka-{self.number}/{index}"}}'
        partition = index % partitions
        request = Request([Written(value.encode(), None, partition)], producer=self.number)
        self.requests.append(request)
        sent = _Sent(request, self._history.next_op(), time.monotonic())
        written = [history.Written(topic, value, partition)]
        name = f"k{self.number}"
        self._history.add(history.Append(sent.begun_s, sent.op, name, written, is_producer=True))
        return sent

    def _acked(self, sent: _Sent, partition: int, offset: int) -> None:
        now_s = time.monotonic()
        self.longest_ack_s = max(self.longest_ack_s, now_s - sent.begun_s)
        sent.request.acks.append([Place(partition, offset)])
        self.acks += 1
        place = history.Place(self._where[0], partition, offset)
        self._history.add(history.Acked(now_s, sent.op, [place]))

    def _fail(self, sent: _Sent, error: object) -> None:
        sent.request.unknown += 1
        self._failures.append(error)
        self._history.add(history.Unknown(time.monotonic(), sent.op, str(error)))


class KafkaGroup(Threads):
    """Members of a group, each with librdkafka in a thread, from `with` to the end of the block.
    A member commits what it has read, about every 0.2 s."""

    def __init__(
        self, addresses: str, topic: str, group: str, members: int = 3, **config: Any
    ) -> None:
        super().__init__(*[self._run] * members)
        self._topic = topic
        self._config = {
            "bootstrap.servers": addresses,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": True,
            "auto.commit.interval.ms": 200,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
            "fetch.wait.max.ms": 200,
            **config,
        }
        self._lock = threading.Lock()
        self.failures: list[object] = []
        self.errors: list[str] = []
        """Errors that the application got, and after which the client went on."""
        self.read: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        """Offsets and values by partition, in the order in which the members got them."""
        self.rebalances = 0
        self.longest_gap_s = 0.0
        self._last_s: dict[int, float] = {}

    def count(self) -> int:
        return sum(len(each) for each in self.read.values())

    def wait_for(self, ends: Sequence[int]) -> None:
        """Wait until every record below the ends was read."""

        def is_all() -> bool:
            with self._lock:
                found = {number: {offset for offset, _ in r} for number, r in self.read.items()}
            return bool(self.failures) or all(
                len(found.get(number, ())) >= end for number, end in enumerate(ends)
            )

        wait_until(is_all, "the group reads all records")

    def wrong(self, log: Any) -> list[str]:
        """Return what is wrong with the records read, given the log. A record may be read again
        after a rebalance, but none is left out and none differs."""
        found = [str(each) for each in self.failures]
        for partition, records in log.items():
            values = {each.offset: each.value for each in records}
            with self._lock:
                mine = list(self.read[partition])
            found += [
                f"read {value!r} at {offset} of partition {partition}"
                for offset, value in mine
                if values.get(offset) != value
            ]
            missing = sorted(values.keys() - {offset for offset, _ in mine})
            if missing:
                found.append(f"partition {partition}: {len(missing)} not read: {missing[:5]}")
        return found

    def start_gap(self) -> None:
        """Measure `longest_gap_s` from now on: seconds between two records of a partition."""
        with self._lock:
            self.longest_gap_s = 0.0
            self._last_s = dict.fromkeys(self._last_s, time.monotonic())

    def _run(self) -> None:
        try:
            consumer = librdkafka.Consumer({**self._config, **QUICK})
            consumer.subscribe([self._topic], on_assign=self._assigned)
            while not self._stop.is_set():
                message = consumer.poll(0.1)
                if message is None:
                    continue
                if (error := message.error()) is not None:
                    if error.fatal():
                        self.failures.append(error)
                        return
                    self.errors.append(str(error))
                    continue
                now_s, partition = time.monotonic(), message.partition()
                with self._lock:
                    gap_s = now_s - self._last_s.get(partition, now_s)
                    self.longest_gap_s = max(self.longest_gap_s, gap_s)
                    self._last_s[partition] = now_s
                    self.read[partition].append((message.offset(), message.value()))
            consumer.close()
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            self.failures.append(error)

    def _assigned(self, *_: object) -> None:
        with self._lock:
            self.rebalances += 1
