"""Producers and readers in threads, for as long as brokers are killed and tails are sealed.

Producers send one request after the other, each retried under its key until it is acked. A few are
given up after an attempt of unknown outcome, so that logs with unknown requests are met. The
outcome of every attempt is recorded for `tests.support.history`.
"""

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tests.sim.history import Event
from tests.support.history import Request, Written
from tests.support.threads import Threads
from tests.system.client import (
    WAIT_S_MAX,
    Client,
    Form,
    wait_until,
)
from tests.system.recorded import RETRY_S, Recorded, Watching

GIVE_UP_SHARE = 0.2
MANY_RECORDS_SHARE = 0.1
RECORDS_MANY = 100


class Mix(NamedTuple):
    """The content of a load.

    `acks` are drawn for each request; `first` is the number of its first producer, for loads that
    run side by side. Producers pause after each request: what a load meets takes seconds, and all
    its requests are checked. Without keys, a request of unknown outcome is not sent again. If
    brokers are cloned, what was acked with acks=1 may come after later requests.
    """

    topic: str
    partitions: int
    producers: int = 4
    acks: tuple[str, ...] = ("all",)
    pad_bytes: int = 40
    pause_s: float = 0.01
    first: int = 0
    is_keyed: bool = True
    is_cloned: bool = False


class Sent(NamedTuple):
    """A request with what is needed to send it again."""

    request: Request
    key: str | None
    form: Form


class Load(Threads):
    """Runs from `with` to the end of the block, or `finish`.

    Drawn from a seed; threads and processes are not, so a run cannot be repeated to the step.
    """

    def __init__(self, base_url: str | Sequence[str], mix: Mix, seed: int) -> None:
        """Several URLs are brokers behind a balancer: a retry goes to another of them.

        The results of each are in `events`, too.
        """
        self._base_url = base_url
        self.events: list[list[Event]] = []
        self._mix = mix
        self._sent: list[list[Sent]] = [[] for _ in range(mix.producers)]
        self._failures: list[BaseException] = []
        super().__init__(
            *(
                partial(self._run, number, random.Random(f"{seed}/{mix.first + number}"))
                for number in range(mix.producers)
            )
        )

    def finish(self) -> list[Sent]:
        """Let each producer have its last answer; all that was sent, a producer's in order."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * WAIT_S_MAX)
            assert not thread.is_alive(), "a producer hangs"
        assert not self._failures, self._failures
        return [sent for of_one in self._sent for sent in of_one]

    def waiting(self) -> list[Request]:
        """The newest request of each producer without an ack: only these may be sent again."""
        newest = [of_one[-1].request for of_one in self._sent if of_one]
        return [request for request in newest if not request.is_acked]

    def sent(self) -> list[Request]:
        """All requests so far."""
        return [sent.request for of_one in self._sent for sent in list(of_one)]

    def acked(self) -> int:
        """Requests acked so far."""
        return sum(sent.request.is_acked for of_one in self._sent for sent in list(of_one))

    def wait_for_acks(self, count: int) -> None:
        goal = self.acked() + count
        wait_until(lambda: self.acked() >= goal or bool(self._failures), f"{count} more acks")

    def _run(self, producer: int, draw: random.Random) -> None:
        try:
            with self._client(producer) as client:
                while not self._stop.is_set():
                    self._send_next(client, producer, draw)
                    self._stop.wait(self._mix.pause_s)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._failures.append(error)

    def _client(self, producer: int) -> Client:
        if isinstance(self._base_url, str):
            return Client(self._base_url)
        start = producer % len(self._base_url)
        turned = [*self._base_url[start:], *self._base_url[:start]]
        client = Recorded(turned, self._mix.first + producer)
        self.events.append(client.history.events)
        return client

    def _send_next(self, client: Client, producer: int, draw: random.Random) -> None:
        mix, number = self._mix, len(self._sent[producer])
        form, name = draw.choice(list(Form)), mix.first + producer
        records = self._records(name, number, form, draw)
        request = Request(records, is_keyed=mix.is_keyed, producer=name)
        key = f"{mix.topic}-{name}-{number}" if mix.is_keyed else None
        sent = Sent(request, key, form)
        self._sent[producer].append(sent)
        acks = draw.choice(mix.acks)
        gives_up = draw.random() < GIVE_UP_SHARE or not mix.is_keyed
        deadline = time.monotonic() + WAIT_S_MAX
        while not request.is_acked:
            client.send(mix.topic, request, acks=acks, key=sent.key, form=form)
            if request.is_acked or (gives_up and request.unknown):
                break
            if self._stop.is_set() and time.monotonic() > deadline:
                break
            time.sleep(RETRY_S)
        request.is_acked_in_turn = bool(request.acks if mix.is_cloned else request.is_acked)

    def _records(
        self, producer: int, number: int, form: Form, draw: random.Random
    ) -> list[Written]:
        many = draw.random() < MANY_RECORDS_SHARE
        count = RECORDS_MANY if many else draw.randrange(1, 6)
        is_placed = form is Form.ARROW or draw.random() < 0.3
        pad = "x" * draw.randrange(self._mix.pad_bytes)
        records = []
        for index in range(count):
            value = f'{{"id":"{producer}/{number}/{index}","pad":"{pad}"}}'.encode()
            key = b'"k%d"' % draw.randrange(50) if draw.random() < 0.5 else None
            partition = draw.randrange(self._mix.partitions) if is_placed else None
            records.append(Written(value, key, partition))
        return records


class Reading(Watching):
    """Reads a partition from its begin to its end, again and again, in small pages.

    Any offset that is not the next one is a failure.
    """

    def __init__(self, base_url: str, topic: str, partition: int) -> None:
        super().__init__(Client(base_url))
        self._where = (topic, partition)

    def _read(self) -> None:
        offset = 0
        while not self._stop.is_set():
            page, next_offset = self._client.read_page(*self._where, offset, bytes_max=20_000)
            offsets = [read.offset for read in page]
            if offsets != list(range(offset, next_offset)):
                self.failures.append(
                    f"asked for {offset}, got {offsets}, then to go on at {next_offset}"
                )
            offset = next_offset
            if not page:
                return
