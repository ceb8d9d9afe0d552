"""`Linger`: how long records may wait for their commit, in all dialects of produce."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from tests.service.conftest import V2 as V2_TYPE
from tests.service.conftest import Broker, assert_refused, until
from tidelog.service.http.media_types import JSON
from tidelog.service.routes.produce_requests import LINGER_S_MAX
from tidelog.storage.core.model import Acks
from tidelog.storage.core.topic_configs import FLUSH_MS_MAX
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.writer import Writer

pytestmark = pytest.mark.broker(topics={"t": 1})

V2 = json.dumps({"records": [{"value": "eA=="}]})
V3 = {"value": {"type": "STRING", "data": "x"}}
TRANSACTION = {"topics": [{"topic_name": "t", "records": [V3]}]}
DIALECTS: dict[str, Callable[[Broker], tuple[str, str]]] = {
    "v2": lambda broker: ("/topics/t", V2),
    "a partition": lambda broker: ("/topics/t/partitions/0", V2),
    "v3 stream": lambda broker: (f"{broker.v3}/topics/t/records", json.dumps(V3)),
    "v3 batch": lambda broker: (
        f"{broker.v3}/topics/t/records:batch",
        json.dumps({"entries": [{"id": "1", **V3}]}),
    ),
    "transaction": lambda broker: (f"{broker.v3}/transactions", json.dumps(TRANSACTION)),
}


async def produce(broker: Broker, dialect: str, linger: str | None) -> httpx.Response:
    path, body = DIALECTS[dialect](broker)
    headers = {} if linger is None else {"linger": linger}
    return await broker.http.post(path, content=body, headers=headers)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_request_has_the_class_that_its_client_gives(
    broker: Broker, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the writer obeys it: tests/storage/cluster/test_pace.py."""
    real, classes = Writer.append, list[float | None]()

    async def append(self: Writer, request: AppendRequest, acks: Acks) -> object:
        classes.append(request.linger_s)
        return await real(self, request, acks)

    monkeypatch.setattr(Writer, "append", append)
    for linger in (None, "0", "0.01"):
        answer = await produce(broker, dialect, linger)
        assert answer.is_success, answer.text
    assert classes == [None, 0.0, 0.01]


async def test_a_patient_request_goes_with_the_next_one(broker: Broker) -> None:
    patient = asyncio.create_task(produce(broker, "v2", "10"))
    await until(lambda: broker.log._log.writer.buffered_bytes > 0)
    assert not patient.done()
    seq = broker.log.state.seq
    assert (await produce(broker, "v3 stream", None)).is_success
    assert (await patient).is_success
    assert broker.log.state.seq == seq + 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_i6_a_bad_linger_is_refused_and_nothing_is_written(
    broker: Broker, dialect: str
) -> None:
    seq = broker.log.state.seq
    path, body = DIALECTS[dialect](broker)
    media_type = JSON.decode() if path.startswith("/v3") else V2_TYPE
    for linger in ("", "x", "-1", "1e1", "nan", "10.5", "10.0000001", " 1", "1_0", "9" * 200):
        answer = await broker.http.post(path, content=body, headers=[(b"linger", linger.encode())])
        message = assert_refused(answer, 400, 40002, media_type)
        assert message.startswith("Linger must be 0 to 10 seconds, like 5 or 0.25, not ")
        assert len(message) < 200
    assert broker.log.state.seq == seq


def test_a_request_may_not_ask_for_more_than_a_topic() -> None:
    assert LINGER_S_MAX * 1000 == FLUSH_MS_MAX
