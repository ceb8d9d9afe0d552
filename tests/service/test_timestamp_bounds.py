"""A record stamped a year ahead is refused in every dialect: 422, one line, nothing written."""

import json
import time

import pyarrow as pa

from tests.service.conftest import Broker, post

YEAR_MS = 365 * 86_400_000
WHY = "record 0 for topic 't' has timestamp"


async def test_each_route_refuses_a_record_of_next_year(broker: Broker, topic: str) -> None:
    ahead_ms = int(time.time() * 1000) + YEAR_MS
    v2 = await post(broker.http, [{"value": 1, "timestamp": ahead_ms}])
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"value": [b"v"], "timestamp": pa.array([ahead_ms], pa.int64())})
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    columns = await broker.http.post(
        "/topics/t",
        content=sink.getvalue().to_pybytes(),
        headers={"content-type": "application/vnd.apache.arrow.stream"},
    )
    for answer in (v2, columns):
        assert (answer.status_code, answer.json()["error_code"]) == (422, 422)
        assert answer.json()["message"].startswith(WHY)
        assert "message.timestamp.after.max.ms is 3600000" in answer.json()["message"]
    instant = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ahead_ms / 1000))
    record = {"value": {"type": "JSON", "data": 1}, "timestamp": instant}
    cluster = broker.log.identity.cluster_id
    path = f"/v3/clusters/{cluster}/topics/t/records"
    v3 = await broker.http.post(
        path, content=json.dumps(record), headers={"content-type": "application/json"}
    )
    said = v3.json()
    assert said["error_code"] == 422
    assert said["message"].startswith(WHY)
    for partition in broker.log.state.topic("t").partitions:
        assert partition.high_watermark == 0


async def test_a_topic_may_allow_it(broker: Broker, topic: str) -> None:
    configs = {"message.timestamp.after.max.ms": str(2 * YEAR_MS)}
    await broker.log.alter_topic(topic, configs)
    ahead_ms = int(time.time() * 1000) + YEAR_MS
    answer = await post(broker.http, [{"value": 1, "timestamp": ahead_ms}])
    assert answer.status_code == 200
