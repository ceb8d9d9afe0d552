"""Kafka clients under faults: producers, and groups whose members commit.

A producer's records are recorded as requests of one record, so that the checkers of the REST load
also check them: each is acked at one offset, or its outcome is unknown.
"""

import logging
import math
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

FLUSH_S = 0.5
LAST_ACKS_S = 120.0
"""Longest wait for the acks of the last records."""
RESENDS_MAX = 100
"""Of a record by a client that is not idempotent, about which its application learns nothing."""
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
    """A producer of librdkafka in a thread, from `with` to `finish`.

    In a history, each producer has another `number`.

    With `is_forgiving`, an error is an unknown outcome and no failure, and a client that cannot go
    on is replaced by a new one, which asks for a new producer id. So is each client after `life_s`.
    One that is not idempotent sends a record again when a connection breaks, whatever `retries` is.
    """

    def __init__(
        self,
        addresses: str,
        topic: str,
        partitions: int,
        number: int,
        *,
        pause_s: float = 0.005,
        is_idempotent: bool = True,
        is_forgiving: bool = False,
        life_s: float = math.inf,
    ) -> None:
        super().__init__(self._run)
        self._config: dict[str, Any] = {
            "bootstrap.servers": addresses,
            "enable.idempotence": is_idempotent,
            "linger.ms": 5,
            "error_cb": self._error,
        }
        if not is_idempotent:
            self._config["acks"] = "all"
        self._is_idempotent = is_idempotent
        self._is_forgiving = is_forgiving
        self._life_s = life_s
        self._is_dead = False
        self._born_s = 0.0
        self.clients = 0
        self.ended_lives: list[tuple[float, float]] = []
        """When clients that could not go on began and ended."""
        self._where = (topic, partitions)
        self.number = number
        self._pause_s = pause_s
        self._history = history.Recorder(number * OPS_OF_ONE)
        self._failures: list[object] = []
        self.requests: list[Request] = []
        self._waiting: dict[int, Request] = {}
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

    def waiting(self) -> list[Request]:
        """Requests without an answer: only these may still be sent again."""
        return list(self._waiting.values())

    def wait_for_acks(self, count: int) -> None:
        goal = self.acks + count
        wait_until(lambda: self.acks >= goal or bool(self._failures), f"{count} more acks")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._live(time.monotonic() + self._life_s)
                except (librdkafka.KafkaException, SystemError) as error:
                    if not (self._is_forgiving and _is_fatal(error)):
                        raise
                    self._end_dead()
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._failures.append(error)

    def _live(self, until_s: float) -> None:
        producer = librdkafka.Producer({**self._config, **QUICK})
        self.clients += 1
        self._born_s = time.monotonic()
        self._is_dead = False
        while not (self._stop.is_set() or self._is_dead or time.monotonic() > until_s):
            self._send(producer)
            producer.poll(self._pause_s)
        last_s = time.monotonic() + LAST_ACKS_S
        while (unanswered := producer.flush(FLUSH_S)) and time.monotonic() < last_s:
            if self._is_dead:
                break
        if self._is_dead:  # librdkafka then keeps its records until they are too old
            producer.purge()
            producer.flush(LAST_ACKS_S)
            self._end_dead()
        elif (
            unanswered
        ):  # not the length of the producer, which counts its errors and log lines too
            self._failures.append(f"{unanswered} records have no answer after {LAST_ACKS_S:g} s")

    def _end_dead(self) -> None:
        """Note a client that could not go on. Nothing is known of its last records."""
        self.ended_lives.append((self._born_s, time.monotonic()))
        for request in self._waiting.values():
            request.unknown += 1
        self._waiting.clear()

    def _error(self, error: librdkafka.KafkaError) -> None:
        if error.fatal() and self._is_forgiving:
            self._is_dead = True

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
        records = [Written(value.encode(), None, partition)]
        request = Request(records, is_keyed=self._is_idempotent, producer=self.number)
        if not self._is_idempotent:
            request.unknown = RESENDS_MAX
        self.requests.append(request)
        sent = _Sent(request, self._history.next_op(), time.monotonic())
        self._waiting[sent.op] = request
        written = [history.Written(topic, value, partition)]
        name = f"k{self.number}"
        self._history.add(history.Append(sent.begun_s, sent.op, name, written, is_producer=True))
        return sent

    def _acked(self, sent: _Sent, partition: int, offset: int | None) -> None:
        """`offset` is None for a record that was sent again, and that the broker had already."""
        now_s = time.monotonic()
        self._waiting.pop(sent.op, None)
        self.longest_ack_s = max(self.longest_ack_s, now_s - sent.begun_s)
        self.acks += 1
        if offset is None:
            sent.request.acks_without_offsets += 1
            self._history.add(history.Unknown(now_s, sent.op, "acked without its offset"))
            return
        sent.request.acks.append([Place(partition, offset)])
        place = history.Place(self._where[0], partition, offset)
        self._history.add(history.Acked(now_s, sent.op, [place]))

    def _fail(self, sent: _Sent, error: object) -> None:
        self._waiting.pop(sent.op, None)
        sent.request.unknown += 1
        if not self._is_forgiving:
            self._failures.append(error)
        self._history.add(history.Unknown(time.monotonic(), sent.op, str(error)))


def _is_fatal(error: Exception) -> bool:
    """Whether a producer cannot go on.

    confluent-kafka may call back with its own error set, and then Python raises SystemError.
    """
    if isinstance(error, SystemError):
        return True
    cause: librdkafka.KafkaError = error.args[0]
    return bool(cause.fatal() or cause.code() == librdkafka.KafkaError._FATAL)


class KafkaGroup(Threads):
    """Members of a group, each with librdkafka in a thread, from `with` to the end of the block.

    A member commits what it has read, about every 0.2 s.
    """

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
        self.resets = 0
        """How often each partition may have become shorter: its members then may go back once."""
        self.failures: list[object] = []
        self.errors: list[str] = []
        """Errors that the application got, and after which the client went on."""
        self.read: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        """Offsets and values by partition, in the order in which the members got them."""
        self.rebalances = 0
        self.longest_gap_s = 0.0
        self._last_s: dict[int, float] = {}

    def count(self) -> int:
        return sum(len(records) for records in self.read.values())

    def wait_for(self, ends: Sequence[int]) -> None:
        """Wait until every record below the ends was read."""

        def is_all() -> bool:
            with self._lock:
                offsets = {number: {offset for offset, _ in r} for number, r in self.read.items()}
            return bool(self.failures) or all(
                len(offsets.get(number, ())) >= end for number, end in enumerate(ends)
            )

        wait_until(is_all, "the group reads all records")

    def wrong(self, log: Any) -> list[str]:
        """Return what is wrong with the records read, given the log.

        A record may be read again after a rebalance, but none is left out and none differs.
        """
        problems = [str(failure) for failure in self.failures]
        for partition, records in log.items():
            values = {record.offset: record.value for record in records}
            with self._lock:
                mine = list(self.read[partition])
            problems += [
                f"read {value!r} at {offset} of partition {partition}"
                for offset, value in mine
                if values.get(offset) != value
            ]
            missing = sorted(values.keys() - {offset for offset, _ in mine})
            if missing:
                problems.append(f"partition {partition}: {len(missing)} not read: {missing[:5]}")
        return problems

    def start_gap(self) -> None:
        """Measure `longest_gap_s` from now on: seconds between two records of a partition."""
        with self._lock:
            self.longest_gap_s = 0.0
            self._last_s = dict.fromkeys(self._last_s, time.monotonic())

    def _run(self) -> None:
        try:
            consumer = librdkafka.Consumer({**self._config, **QUICK})
            order = _Order()

            def assigned(*_: object) -> None:
                order.newest.clear()
                self._assigned()

            consumer.subscribe([self._topic], on_assign=assigned)
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
                if old_offset := order.going_back(partition, message.offset(), self.resets):
                    self.failures.append(f"{partition}: {message.offset()} after {old_offset}")
                with self._lock:
                    gap_s = now_s - self._last_s.get(partition, now_s)
                    self.longest_gap_s = max(self.longest_gap_s, gap_s)
                    self._last_s[partition] = now_s
                    self.read[partition].append((message.offset(), message.value()))
            consumer.close()
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            self.failures.append(error)

    def _assigned(self) -> None:
        with self._lock:
            self.rebalances += 1


class _Order:
    """The newest offset of each partition that a member has got since its assignment."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self._resets: dict[int, int] = {}

    def going_back(self, partition: int, offset: int, resets: int) -> str:
        """Take note of the offset. Return the one before if no reset explains that it is higher."""
        old_offset = self.newest.get(partition, -1)
        self.newest[partition] = offset
        if offset > old_offset or self._resets.get(partition, 0) < resets:
            if offset <= old_offset:
                self._resets[partition] = resets
            return ""
        return str(old_offset)
