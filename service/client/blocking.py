"""Producer, Consumer, Transaction and Admin for callers without an event loop.

All objects of these classes share one daemon thread with an event loop. It starts with the first
object and ends with the last one. A call runs the coroutine of the asynchronous class in that
thread and waits for its result. Functions of the caller (`decode_value`, `on_error`) also run in
that thread, so they must not call these classes. Several threads may use one object. A child
process after a fork must not use its parent's objects.
"""

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from tidelog.service.client.admin import AsyncAdmin
from tidelog.service.client.consumer import AsyncConsumer, DeadLetters
from tidelog.service.client.errors import Closed
from tidelog.service.client.producer import AsyncProducer, Delivered
from tidelog.service.client.records import Headers, Record, encoded
from tidelog.service.client.transactions import AsyncTransaction
from tidelog.storage.core.model import TopicPartition

Result = TypeVar("Result")
Asynchronous = TypeVar("Asynchronous", AsyncProducer, AsyncConsumer, AsyncAdmin)


class _Loop:
    """The thread with the event loop, and the number of objects that use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            self._users += 1
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self.loop.run_forever, name="tidelog-client", daemon=True
                )
                self._thread.start()
            return self.loop

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self.loop is None or self._thread is None:
                return
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
            self.loop = self._thread = None


_shared = _Loop()


class _Blocking(Generic[Asynchronous]):
    """An asynchronous object and the thread in which it works, until `_end`."""

    def __init__(self, kind: type[Asynchronous], *arguments: Any, **options: Any) -> None:
        self._loop = _shared.__enter__()
        self._is_open = True
        try:
            self.asynchronous: Asynchronous = self._run(_made(kind, *arguments, **options))
        except BaseException:
            self._leave()
            raise

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._is_open:
            work.close()
            raise Closed(f"the {type(self).__name__.lower()} is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after KeyboardInterrupt, the work must not go on
            raise

    def _end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close the object by `work`, unless it is closed."""
        if self._is_open:
            try:
                self._run(work())
            finally:
                self._leave()

    def _leave(self) -> None:
        self._is_open = False
        _shared.__exit__()


async def _made(kind: type[Result], *arguments: Any, **options: Any) -> Result:
    """Make an object in the thread of the loop that it belongs to."""
    return kind(*arguments, **options)


class Transaction:
    """One transaction of a Producer: see AsyncTransaction.

    `with` commits it at the end; after an exception in the block, nothing is sent.
    """

    def __init__(self, producer: "Producer", transaction: AsyncTransaction) -> None:
        self._producer = producer
        self._transaction = transaction

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Add a record. Raises BadArgument."""
        self._transaction.send(
            topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit the offsets at which `group` continues, by (topic, partition).

        The group has no members; a member uses `commit_positions`.
        """
        self._transaction.commit_offsets(group, offsets)

    def commit_positions(self, consumer: "Consumer") -> None:
        """Commit the offsets of all records that `consumer` has delivered."""
        self._transaction.commit_positions(consumer.asynchronous)

    def commit(self) -> None:
        """Commit all records and offsets. Raises ClientError."""
        self._producer.commit(self._transaction)


class Producer(_Blocking[AsyncProducer]):
    """A producer: see AsyncProducer. `with` flushes and closes it.

    with Producer("http://127.0.0.1:8082") as producer:
        print(producer.send("flights", b"value", key=b"N14228").result().offset)
    """

    def __init__(self, servers: str, **options: Any) -> None:
        super().__init__(AsyncProducer, servers, **options)

    def __enter__(self) -> "Producer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush_s=math.inf if kind is None else 0.0)

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> "concurrent.futures.Future[Delivered]":
        """Add a record; wait only while the buffer is full.

        `result()` of the future waits for its place, or raises the ClientError that names topic,
        partition and record. The first error of a kind for each topic is also logged, for callers
        that do not look at the future.
        """
        fmt = self.asynchronous.options.format
        record = encoded(fmt, value, key, headers, partition, timestamp_ms)
        outcome: concurrent.futures.Future[Delivered] = concurrent.futures.Future()
        outcome.add_done_callback(partial(self.asynchronous.report, topic))
        self._run(self.asynchronous.put(topic, record, outcome))
        return outcome

    def flush(self) -> None:
        """Send all records; wait until each has its outcome."""
        self._run(self.asynchronous.flush())

    def transaction(self, idempotency_key: str | None = None) -> Transaction:
        """Return a transaction: records and offsets of groups that are committed together."""
        return Transaction(self, self.asynchronous.transaction(idempotency_key))

    def commit(self, transaction: AsyncTransaction) -> None:
        """Commit a transaction of this producer."""
        self._run(transaction.commit())

    def dead_letters(self, topic: str) -> DeadLetters:
        """Return an `on_error` for consumers of this process: it sends records to this topic."""
        return DeadLetters(self.asynchronous, topic)

    def close(self, flush_s: float = math.inf) -> None:
        """Flush for up to `flush_s` seconds, then end."""
        self._end(lambda: self.asynchronous.close(flush_s))


class Consumer(_Blocking[AsyncConsumer]):
    """A consumer: see AsyncConsumer. `with` commits what is done, and leaves the group.

    with Consumer("http://127.0.0.1:8082", "flights", group="enrich") as consumer:
        for record in consumer:
            print(record.offset, record.value)
    """

    def __init__(
        self, servers: str, topics: str | Iterable[str], group: str | None = None, **options: Any
    ) -> None:
        super().__init__(AsyncConsumer, servers, topics, group, **options)

    def __enter__(self) -> "Consumer":
        try:
            self._run(self.asynchronous.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(kind)

    def __iter__(self) -> "Consumer":
        return self

    def __next__(self) -> Record:
        return self._run(self.asynchronous.__anext__())

    def poll(self, timeout_s: float = 1.0) -> list[Record]:
        """Return the next records, or an empty list after `timeout_s`. Raises ClientError."""
        return self._run(self.asynchronous.poll(timeout_s))

    def poll_arrow(self, timeout_s: float = 1.0) -> Any:
        """Return the next records as a pyarrow.Table, None after `timeout_s`. Needs a group."""
        return self._run(self.asynchronous.poll_arrow(timeout_s))

    def commit(self) -> None:
        """Commit the offsets of all delivered records. Raises ClientError."""
        self._run(self.asynchronous.commit())

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Read this partition from `offset` on."""
        self._run(self.asynchronous.seek(topic, partition, offset))

    def positions(self) -> dict[TopicPartition, int]:
        """Return the next offset to read of each partition."""
        return self.asynchronous.positions()

    @property
    def skipped(self) -> int:
        """The number of records that did not decode and were passed."""
        return self.asynchronous.skipped

    def close(self) -> None:
        """Commit what was delivered (with auto_commit), and leave the group."""
        self._close(None)

    def _close(self, kind: type[BaseException] | None) -> None:
        self._end(lambda: self.asynchronous.__aexit__(kind))


class Admin(_Blocking[AsyncAdmin]):
    """Descriptions and changes of a cluster: AsyncAdmin's methods, which wait for their result.

    with Admin("http://127.0.0.1:8082") as admin:
        admin.create_topic("flights", partitions=6)
    """

    def __init__(self, servers: str, **options: Any) -> None:
        super().__init__(AsyncAdmin, servers, **options)

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end(self.asynchronous.close)

    def __getattr__(self, name: str) -> Any:
        """Return a method of AsyncAdmin that waits."""
        if name.startswith("_") or name == "asynchronous":
            raise AttributeError(name)
        method = getattr(self.asynchronous, name)

        def waiting(*arguments: Any, **options: Any) -> Any:
            return self._run(method(*arguments, **options))

        return waiting
