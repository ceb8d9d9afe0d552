"""Fetch sessions (KIP-227): a consumer's requests and answers have only changes.

A session has the partitions of a consumer, in the memory of one broker only. If it is lost, the
broker refuses its id, and the client sends all its partitions again. So a session needs no store,
and may be evicted at any time.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.fetch import (
    FetchablePartitionResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)

SESSIONS_MAX = 1_000
"""As Kafka's `max.incremental.fetch.session.cache.slots`."""
PARTITIONS_MAX = 200_000
"""Bound of the partitions of all sessions, of ~400 bytes each."""
IDLE_S = 120.0
"""A session without requests for this time may be removed for a new one, as in Kafka."""
BEGIN_EPOCH, NO_SESSION_EPOCH = 0, -1
_INT32_MAX = 2**31 - 1


class SessionRefused(Exception):
    """The request is of a session that this broker does not have, or has at another epoch."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class _Name(NamedTuple):
    """A partition, by the names that a request uses."""

    topic: str
    topic_id: bytes
    partition: int


class _SessionPartition:
    """A partition of a session: how the client asks for it, and what the last answer said."""

    __slots__ = ("ends", "request")

    def __init__(self, requested: FetchPartition) -> None:
        self.request = requested
        self.ends: tuple[int, int, int] | None = None
        """High watermark, last stable offset and log start of the last answer without an error."""

    def take(self, answer: FetchablePartitionResponse) -> bool:
        """Note an answer. Return whether the client must get it."""
        old_ends = self.ends
        self.ends = answer.high_watermark, answer.last_stable_offset, answer.log_start_offset
        if answer.error_code:
            self.ends = None  # the client gets the next answer without an error, too
            return True
        has_records = answer.records is not None and any(map(len, answer.records))
        return has_records or old_ends != self.ends


class FetchSession:
    """The partitions of one consumer, in the order in which they are read."""

    def __init__(self, session_id: int, principal: str, *, is_by_id: bool) -> None:
        self.session_id = session_id
        self.principal = principal
        self.is_by_id = is_by_id
        """Whether requests name topics by id. All requests of a session must be alike in this."""
        self.epoch = 1
        self.used_s = 0.0
        self._by_name: OrderedDict[_Name, _SessionPartition] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def update(self, request: FetchRequest) -> None:
        """Take over the changes of a request."""
        for forgotten in request.forgotten_topics_data:
            for number in forgotten.partitions:
                self._by_name.pop(_Name(forgotten.topic, forgotten.topic_id, number), None)
        for name, requested in _partitions(request.topics):
            partition = self._by_name.get(name)
            if partition is None:
                self._by_name[name] = _SessionPartition(requested)
            else:
                partition.request = requested

    def topics(self) -> list[FetchTopic]:
        """Return the partitions to read. A topic may be there more than once."""
        topics: list[FetchTopic] = []
        for name, partition in self._by_name.items():
            last = topics[-1] if topics else None
            if last is None or (last.topic, last.topic_id) != name[:2]:
                last = FetchTopic(topic=name.topic, topic_id=name.topic_id, partitions=[])
                topics.append(last)
            last.partitions.append(partition.request)
        return topics

    def remove_unchanged(self, response: FetchResponse, *, is_full: bool) -> None:
        """Store the answers in the session.

        Unless `is_full`, remove the answers that the client has. The next request reads a partition
        with records last, so that the other partitions get room in an answer.
        """
        for topic in response.responses:
            changed = []
            for answer in topic.partitions:
                name = _Name(topic.topic, topic.topic_id, answer.partition_index)
                partition = self._by_name.get(name)
                if partition is None or partition.take(answer) or is_full:
                    changed.append(answer)
                if partition is not None and answer.records:
                    self._by_name.move_to_end(name)
            topic.partitions = changed
        response.responses = [topic for topic in response.responses if topic.partitions]
        response.session_id = self.session_id


class FetchSessions:
    """The sessions of one broker."""

    def __init__(self, first_id: int) -> None:
        """Start with a `first_id` that differs from that of other processes.

        A client may send a session id that it got before a restart of the broker.
        """
        self._next_id = first_id
        self._sessions: OrderedDict[int, FetchSession] = (
            OrderedDict()
        )  # the least recently used first
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, request: FetchRequest, principal: str, now_s: float, *, is_by_id: bool
    ) -> FetchSession | None:
        """Return the session that an incremental request continues, with the request's changes.

        If the request is not incremental, end the session whose id it has, and return None. Raises
        SessionRefused.
        """
        session = self._sessions.get(request.session_id)
        if session is not None and session.principal != principal:
            session = None
        if request.session_epoch in {BEGIN_EPOCH, NO_SESSION_EPOCH} or not request.session_id:
            if session is not None:
                self.end(session)
            return None
        if session is None:
            raise SessionRefused(Code.FETCH_SESSION_ID_NOT_FOUND)
        if request.session_epoch != session.epoch:
            raise SessionRefused(Code.INVALID_FETCH_SESSION_EPOCH)
        if session.is_by_id != is_by_id:
            raise SessionRefused(Code.FETCH_SESSION_TOPIC_ID_ERROR)
        session.epoch = session.epoch % _INT32_MAX + 1
        session.used_s = now_s
        self._sessions.move_to_end(session.session_id)
        self._partitions -= len(session)
        session.update(request)
        self._partitions += len(session)
        if self._partitions > PARTITIONS_MAX:
            self.end(session)  # this request is answered; the next one is refused
        return session

    def begin(
        self, request: FetchRequest, principal: str, now_s: float, *, is_by_id: bool
    ) -> FetchSession | None:
        """Return a new session with the partitions of a request that asks for one.

        Return None if the request does not ask, or if there is no room.
        """
        if request.session_epoch != BEGIN_EPOCH:
            return None
        session = FetchSession(self._next_id, principal, is_by_id=is_by_id)
        session.update(request)
        session.used_s = now_s
        if not self._has_room(len(session), now_s):
            return None
        self._next_id = self._next_id % _INT32_MAX + 1
        self._sessions[session.session_id] = session
        self._partitions += len(session)
        return session

    def _has_room(self, partitions: int, now_s: float) -> bool:
        """Remove idle sessions until there is room for one more."""
        while len(self._sessions) >= SESSIONS_MAX or self._partitions + partitions > PARTITIONS_MAX:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now_s - oldest.used_s < IDLE_S:
                return False
            self.end(oldest)
        return True

    def end(self, session: FetchSession) -> None:
        """Forget a session: the next request of the client is refused."""
        if self._sessions.pop(session.session_id, None) is not None:
            self._partitions -= len(session)


def _partitions(topics: list[FetchTopic]) -> Iterator[tuple[_Name, FetchPartition]]:
    for topic in topics:
        for requested in topic.partitions:
            yield _Name(topic.topic, topic.topic_id, requested.partition), requested
