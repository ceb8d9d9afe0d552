"""Fetch sessions: a client sends and gets only changes; lost sessions cost one refused request."""

import asyncio
import random

import pytest

from tests.service.kafka.conftest import Client, Kafka, batch
from tests.service.kafka.test_fetch import _records, _wanted
from tests.service.kafka.test_produce import _produce, _request
from tidelog.service.kafka import fetch_sessions
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.fetch_sessions import FetchSession, FetchSessions, SessionRefused
from tidelog.service.kafka.messages.fetch import (
    FetchablePartitionResponse,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
)
from tidelog.service.kafka.messages.primitives import ZERO_UUID


def _in_session(session_id: int, epoch: int, *parts: tuple[int, int], **more: int) -> FetchRequest:
    request = _wanted(*parts, **more)
    request.session_id, request.session_epoch = session_id, epoch
    if not parts:
        request.topics = []
    return request


async def _ask(
    client: Client, request: FetchRequest, version: int = 11
) -> tuple[FetchResponse, dict[int, int]]:
    """Return the answer, and the number of records of each partition in it."""
    response = await client.ask(request, FetchResponse, version)
    partitions = [partition for topic in response.responses for partition in topic.partitions]
    return response, {
        partition.partition_index: len(_records(partition)) for partition in partitions
    }


async def test_answers_have_only_what_changed(kafka: Kafka) -> None:
    client = kafka.client()
    first, counts = await _ask(client, _in_session(0, 0, (0, 0), (1, 0), (2, 0)))
    assert first.session_id > 0
    assert counts == {0: 0, 1: 0, 2: 0}
    session = first.session_id
    response, counts = await _ask(client, _in_session(session, 1))
    assert (response.session_id, counts) == (session, {})
    await _produce(client, _request((1, batch(b"a", b"b"))))
    assert (await _ask(client, _in_session(session, 2)))[1] == {1: 2}
    # Without the new offset, the same records come again.
    assert (await _ask(client, _in_session(session, 3)))[1] == {1: 2}
    assert (await _ask(client, _in_session(session, 4, (1, 2))))[1] == {}
    await _produce(client, _request((0, batch(b"c"))))
    await _produce(client, _request((1, batch(b"d"))))
    assert (await _ask(client, _in_session(session, 5)))[1] == {0: 1, 1: 1}


async def test_partitions_are_forgotten_and_added(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0))))[0].session_id
    await _produce(client, _request((0, batch(b"a")), (1, batch(b"b"))))
    request = _in_session(session, 1, (1, 0))
    request.forgotten_topics_data = [ForgottenTopic(topic="t", partitions=[0, 7])]
    assert (await _ask(client, request))[1] == {1: 1}
    assert (await _ask(client, _in_session(session, 2, (0, 0))))[1] == {0: 1, 1: 1}


async def test_a_wait_in_a_session_ends_with_the_records(kafka: Kafka) -> None:
    client, other = kafka.client(), kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0), (1, 0))))[0].session_id
    waiting = asyncio.create_task(_ask(client, _in_session(session, 1, wait_ms=20_000)))
    await asyncio.sleep(0.01)
    await _produce(other, _request((1, batch(b"b"))))
    assert (await waiting)[1] == {1: 1}


async def test_errors_come_each_time_and_their_end_too(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0), (1, 0))))[0].session_id
    for epoch in (1, 2):
        response, _ = await _ask(client, _in_session(session, epoch, (0, 99)))
        (part,) = response.responses[0].partitions
        assert part.error_code == Code.OFFSET_OUT_OF_RANGE
    response, _ = await _ask(client, _in_session(session, 3, (0, 0)))
    (part,) = response.responses[0].partitions
    assert (part.error_code, part.high_watermark) == (0, 0)


async def test_the_ends_of_a_session(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0))))[0].session_id

    async def code(request: FetchRequest, version: int = 11) -> int:
        response, _ = await _ask(client, request, version)
        assert response.error_code == 0 or not response.responses
        return int(response.error_code)

    assert await code(_in_session(session, 2)) == Code.INVALID_FETCH_SESSION_EPOCH
    assert await code(_in_session(session + 1, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND
    assert await code(_in_session(session, 1), 13) == Code.FETCH_SESSION_TOPIC_ID_ERROR
    # All partitions again under the old id: a new session.
    response, counts = await _ask(client, _in_session(session, 0, (0, 0)))
    assert response.session_id not in {0, session}
    assert counts == {0: 0}
    assert await code(_in_session(session, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND
    # The client ends the session.
    ended, counts = await _ask(client, _in_session(response.session_id, -1, (0, 0)))
    assert (ended.session_id, counts) == (0, {0: 0})
    assert await code(_in_session(response.session_id, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND


# --- the sessions of a broker


def _request_of(*numbers: int, session_id: int = 0, epoch: int = 0) -> FetchRequest:
    parts = [FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1) for n in numbers]
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=1,
        session_id=session_id,
        session_epoch=epoch,
        topics=[FetchTopic(topic="t", partitions=parts)],
    )


def _begun(sessions: FetchSessions, now_s: float, *numbers: int) -> FetchSession | None:
    return sessions.begin(_request_of(*numbers), "User:a", now_s, is_by_id=False)


def test_the_bounds_of_sessions_and_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "SESSIONS_MAX", 3)
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 10)
    sessions = FetchSessions(2**31 - 2)
    opened = [_begun(sessions, 0.0, 1, 2), _begun(sessions, 50.0, 1), _begun(sessions, 60.0, 1)]
    assert [session and session.session_id for session in opened] == [2**31 - 2, 2**31 - 1, 1]
    assert _begun(sessions, 100.0, 1) is None, "no session is idle for long enough"
    assert _begun(sessions, 121.0, 1) is not None
    oldest = opened[0]
    assert oldest is not None
    request = _request_of(session_id=oldest.session_id, epoch=1)
    with pytest.raises(SessionRefused):
        sessions.open(request, "User:a", 122.0, is_by_id=False)
    assert _begun(sessions, 10_000.0, *range(11)) is None, "too many partitions for any room"
    assert len(sessions) == 0
    # A session that grows over the bound ends.
    grown = _begun(sessions, 0.0, 1)
    assert grown is not None
    request = _request_of(*range(11), session_id=grown.session_id, epoch=1)
    assert sessions.open(request, "User:a", 0.0, is_by_id=False) is grown
    assert len(sessions) == sessions._partitions == 0


def test_a_session_is_of_its_principal() -> None:
    sessions = FetchSessions(5)
    session = _begun(sessions, 0.0, 1)
    assert session is not None
    for epoch in (-1, 0):  # neither may another principal end it
        request = _request_of(1, session_id=session.session_id, epoch=epoch)
        assert sessions.open(request, "User:b", 0.0, is_by_id=False) is None
    request = _request_of(session_id=session.session_id, epoch=1)
    with pytest.raises(SessionRefused):
        sessions.open(request, "User:b", 0.0, is_by_id=False)
    assert sessions.open(request, "User:a", 0.0, is_by_id=False) is session


def test_epochs_begin_again_at_one() -> None:
    sessions = FetchSessions(5)
    session = _begun(sessions, 0.0, 1)
    assert session is not None
    session.epoch = 2**31 - 1
    for epoch in (2**31 - 1, 1):
        request = _request_of(session_id=5, epoch=epoch)
        assert sessions.open(request, "User:a", 0.0, is_by_id=False) is session


def test_a_client_with_a_session_knows_what_one_without_knows() -> None:
    """Property: partitions that an answer leaves out are as the client has them."""
    rng = random.Random(11)
    for _ in range(200):
        session = FetchSession(1, "User:a", is_by_id=False)
        session.update(_request_of(*range(4)))
        truth = dict.fromkeys(range(4), (0, 0, 0))  # error, high watermark, log start offset
        client_state = dict(truth)
        for step in range(12):
            for number in rng.sample(range(4), rng.randrange(3)):
                error = rng.choice([0, 0, 1])
                truth[number] = (
                    (error, -1, -1) if error else (0, rng.randrange(3), rng.randrange(2))
                )
            answers = {
                partition.partition: FetchablePartitionResponse(
                    partition_index=partition.partition,
                    error_code=truth[partition.partition][0],
                    high_watermark=truth[partition.partition][1],
                    log_start_offset=truth[partition.partition][2],
                    aborted_transactions=None,
                    records=[b"r"]
                    if rng.random() < 0.2 and not truth[partition.partition][0]
                    else [],
                )
                for topic in session.topics()
                for partition in topic.partitions
            }
            assert sorted(answers) == [0, 1, 2, 3]
            with_records = {n for n, answer in answers.items() if answer.records}
            topic_response = FetchableTopicResponse(
                topic="t", topic_id=ZERO_UUID, partitions=list(answers.values())
            )
            response = FetchResponse(throttle_time_ms=0, responses=[topic_response])
            session.remove_unchanged(response, is_full=step == 0)
            sent = [partition for topic in response.responses for partition in topic.partitions]
            assert with_records <= {partition.partition_index for partition in sent}
            for partition in sent:
                said = (partition.error_code, partition.high_watermark, partition.log_start_offset)
                client_state[partition.partition_index] = said
            assert client_state == truth
            order = [
                partition.partition for topic in session.topics() for partition in topic.partitions
            ]
            if with_records:
                assert set(order[-len(with_records) :]) == with_records


@pytest.mark.parametrize("version", [11, 17])
async def test_session_has_no_partition_that_is_unknown(kafka: Kafka, version: int) -> None:
    """A request of few bytes must not ask for many errors again and again."""
    client = kafka.client()
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    unknown = FetchTopic(topic="unknown", topic_id=bytes(15) + b"\1", partitions=[])
    unknown.partitions = [
        FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1) for n in range(100)
    ]

    async def ask(session: int, epoch: int, *topics: FetchTopic) -> FetchResponse:
        request = _in_session(session, epoch)
        request.topics = list(topics)
        return (await _ask(client, request, version))[0]

    response = await ask(0, 0, unknown)
    assert response.session_id == 0
    assert len(response.responses[0].partitions) == 100
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
    of_known = FetchTopic(topic="t", topic_id=topic_id, partitions=[partition])
    session = (await ask(0, 0, of_known)).session_id
    assert session > 0
    response = await ask(session, 1, unknown)
    assert len(response.responses[0].partitions) == 100
    response = await ask(session, 2)
    assert (response.error_code, response.responses) == (Code.FETCH_SESSION_ID_NOT_FOUND, [])
