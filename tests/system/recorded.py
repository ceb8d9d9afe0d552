"""Clients that record requests and answers, for the simulator's checker.

It is tests.sim.checker.
"""

import abc
import random
import time
from collections.abc import Sequence

from tests.sim import history
from tests.support.history import Log, Request
from tests.support.threads import Threads
from tests.system.client import AnswerLost, Balanced, Client, Form, NotSent, NotServed

OPS_OF_ONE = 10**9
"""Numbers of requests: no two clients have the same."""
ANSWER_S = 5.0
RETRY_S = 0.05
PAUSE_S = 0.02
"""Of a reader after its answer: else it takes all that it gets of a core."""
BACK = 500
"""How many records a witness goes back at most, before it follows again."""


class Recorded(Balanced):
    """One client, for one thread; `number` is its own among all of a history."""

    def __init__(self, base_urls: Sequence[str], number: int) -> None:
        super().__init__(base_urls, ANSWER_S)
        self.name = f"c{number}"
        self.history = history.Recorder(number * OPS_OF_ONE)

    def send(
        self,
        topic: str,
        request: Request,
        *,
        acks: str = "all",
        key: str | None = None,
        form: Form = Form.JSON,
    ) -> int:
        records = [
            history.Written(
                topic, record.value.decode(), record.partition, record.key and record.key.decode()
            )
            for record in request.records
        ]
        op = self.history.next_op()
        self.history.add(history.Append(time.monotonic(), op, self.name, records, key))
        old_counts = (len(request.acks), request.acks_without_offsets, request.refusals)
        status = super().send(topic, request, acks=acks, key=key, form=form)
        now_s = time.monotonic()
        answer: history.Outcome = history.Unknown(now_s, op, f"status {status}")
        if len(request.acks) > old_counts[0]:
            places = [history.Place(topic, *place) for place in request.acks[-1]]
            answer = history.Acked(now_s, op, places)
        elif request.acks_without_offsets > old_counts[1]:
            answer = history.Acked(now_s, op)
        elif request.refusals > old_counts[2]:
            answer = history.Refused(now_s, op, f"status {status}")
        self.history.add(answer)
        return status

    def follow(self, topic: str, partition: int, offset: int, *, stream: str) -> history.Fetched:
        """One fetch; raises NotSent, AnswerLost, NotServed."""
        op = self.history.next_op()
        request = history.Fetch(
            time.monotonic(), op, self.name, topic, partition, offset, stream=stream
        )
        self.history.add(request)
        try:
            table, ends = self.fetch(topic, partition, offset, 20_000)
        except (NotSent, AnswerLost, NotServed) as error:
            self.history.add(history.Unknown(time.monotonic(), op, str(error)))
            raise
        offsets, values = (table.column(name).to_pylist() for name in ("offset", "value"))
        texts = [str(value, "utf-8") for value in values]
        records = list(map(history.Read, offsets, texts))
        answer = history.Fetched(time.monotonic(), op, records, *ends)
        self.history.add(answer)
        return answer


class Watching(Threads, abc.ABC):
    """Reads in a thread, from `with` to the end of the block; `failures` is what was wrong."""

    def __init__(self, client: Client) -> None:
        super().__init__(self._run)
        self._client = client
        self.failures: list[str] = []

    @abc.abstractmethod
    def _read(self) -> None:
        """The next of it; may raise NotSent, AnswerLost, NotServed, and is called again then."""

    def _run(self) -> None:
        with self._client:
            while not self._stop.is_set():
                try:
                    self._read()
                    self._stop.wait(PAUSE_S)
                except (NotSent, AnswerLost, NotServed):
                    self._stop.wait(RETRY_S)
                except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
                    self.failures.append(repr(error))
                    return


class Witness(Watching):
    """Follows a partition at any broker, now and then again from a bit before."""

    def __init__(self, base_urls: Sequence[str], topic: str, partition: int, number: int) -> None:
        self._recorded = Recorded(base_urls, number)
        super().__init__(self._recorded)
        self._where = (topic, partition)
        self._random = random.Random(number)
        self._offset = self._streams = 0

    @property
    def events(self) -> list[history.Event]:
        return self._recorded.history.events

    def _read(self) -> None:
        client = self._recorded
        client.turn()
        if self._random.random() < 0.02:
            self._offset = max(0, self._offset - self._random.randrange(BACK))
            self._streams += 1
        stream = f"{client.name}/{self._streams}"
        told = client.follow(*self._where, self._offset, stream=stream)
        self._offset = told.next_offset
        if not told.records:
            self._stop.wait(RETRY_S)


def history_of(
    topic: str, events: Sequence[Sequence[history.Event]], log: Log
) -> list[history.Event]:
    """All that happened to a topic, and what is there in the end."""
    now_s = time.monotonic()
    finals: list[history.Event] = [
        history.Final(
            now_s,
            topic,
            number,
            0,
            [history.Read(read.offset, str(read.value or b"", "utf-8")) for read in records],
        )
        for number, records in log.items()
    ]
    creation = history.Topic(0.0, topic, len(log))
    return [creation, *(event for of_one in events for event in of_one), *finals]
