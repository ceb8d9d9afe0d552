"""Bodies without records: each route takes small ones, and refuses larger ones unparsed."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.conftest import V2, Broker, send
from tests.service.keyed import SETTINGS, key_of
from tidelog.service.formats import consumers
from tidelog.service.formats.json_in import InvalidBody
from tidelog.service.http.body_limit import BodyLimit, values_bound
from tidelog.service.http.errors import VALIDATION_ERRORS_MAX
from tidelog.service.http.route import V3, Route
from tidelog.service.routes import consumers_v2_routes
from tidelog.service.routes.groups_v3 import OFFSETS_MAX
from tidelog.service.server.app import _APP_ROUTES
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES
from tidelog.storage.core.topic_configs import PARTITIONS_MAX
from tidelog.storage.state.access import ACLS_AT_ONCE_MAX
from tidelog.storage.state.group_members import GROUP_PARTITIONS_MAX, GROUP_TOPICS_MAX

BYTES_MAX = 3 << 20
VALUES_MAX = 110_000
MANY = 1_000
ERRORS_MAX = 20
"""A body of one object, or one item of a list, has less fields."""
PARSED = [
    (route, api_route.body_field)
    for route, api_route in _APP_ROUTES
    if api_route.body_field is not None
]
"""The routes whose bodies FastAPI parses."""
WITH_BODY: list[tuple[str, str, Route]] = [
    (route.method, path, route) for route, _ in PARSED for path in route.paths
] + [
    (route.method, path, route)
    for route in HOT_ROUTES
    for path in route.paths
    if route in consumers_v2_routes.ROUTES and (route.method == "POST" or path.endswith("/offsets"))
]


pytestmark = pytest.mark.broker(topics={"t": 1})


def url_of(path: str, cluster: str) -> str:
    for name in ("topic_name", "name", "consumer_group_id", "instance", "principal", "broker_id"):
        path = path.replace(f"{{{name}}}", "t")
    return path.replace("{cluster_id}", cluster)


def assert_status(answer: httpx.Response, status: int) -> None:
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (status, status), said


def limit_of(route: Route) -> BodyLimit:
    assert route.body is not None
    return route.body


def test_only_routes_of_records_have_no_limit_of_their_own() -> None:
    unlimited = [
        path for route in (*HOT_ROUTES, *APP_ROUTES) if route.body is None for path in route.paths
    ]
    assert unlimited == [
        "/topics/{topic_name}",
        "/topics/{topic_name}/partitions/{partition_id}",
        *(
            f"{mount}/clusters/{{cluster_id}}/{path}"
            for path in (
                "topics/{topic_name}/records",
                "topics/{topic_name}/records:batch",
                "transactions",
            )
            for mount in V3.mounts
        ),
    ]


async def test_each_route_refuses_body_above_its_small_limit(broker: Broker) -> None:
    for method, path, route in WITH_BODY:
        limit = limit_of(route)
        assert limit.bytes_max <= BYTES_MAX, path
        assert limit.values_max <= VALUES_MAX, path
        url = url_of(path, broker.log.identity.cluster_id)
        headers = {"content-type": V2 if path.startswith("/consumers") else "application/json"}
        large = b" " * (limit.bytes_max + 1)
        answer = await broker.http.request(method, url, content=large, headers=headers)
        assert_status(answer, 413)
        assert f"{len(large)} bytes or more is over the limit of {limit.bytes_max}" in answer.text
        answer = await broker.http.request(
            method,
            url,
            content=gzip.compress(large),
            headers={**headers, "content-encoding": "gzip"},
        )
        assert_status(answer, 413)
        assert f"unpacks to more than {limit.bytes_max} bytes" in answer.text
        many = b"[" + b"1," * (limit.values_max - 1) + b"1]"
        answer = await broker.http.request(method, url, content=many, headers=headers)
        assert_status(answer, 413)
        assert f"the limit of this route is {limit.values_max}" in answer.text, path


@pytest.mark.parametrize("depth", [90, 900, 3_900])
async def test_deep_body_is_refused(broker: Broker, depth: int) -> None:
    for method, path, _ in WITH_BODY:
        url = url_of(path, broker.log.identity.cluster_id)
        headers = {"content-type": V2 if path.startswith("/consumers") else "application/json"}
        for body in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            answer = await broker.http.request(method, url, content=body, headers=headers)
            assert answer.status_code in (400, 404, 413, 422), (path, answer.text)


def hostile(fields: list[str]) -> Iterator[Any]:
    """Bodies of many items of which each is invalid."""
    numbered: dict[str, Any] = {str(number): {} for number in range(MANY)}
    yield numbered
    yield [{}] * MANY
    values: list[Any] = [
        numbered,
        [{}] * MANY,
        [numbered] * MANY,
        [[{}] * MANY],
        {"0": [{}] * MANY},
    ]
    for field in fields:
        yield from ({field: value} for value in values)


def test_pydantic_makes_few_errors_for_body() -> None:
    assert PARSED
    for route, field in PARSED:
        assert field is not None
        model: Any = field.field_info.annotation
        for body in hostile(list(model.model_fields)):
            _, errors = field.validate(body, {}, loc=("body",))
            assert len(errors) <= ERRORS_MAX, (route.path, len(errors))


@pytest.mark.broker(**SETTINGS)
async def test_login_without_key_reads_four_kib(broker: Broker) -> None:
    body = b"{" + b",".join(b'"%d":1' % number for number in range(380_000)) + b"}"
    answer = await broker.http.post("/tidelog/v1/login", content=body)
    assert_status(answer, 413)
    few = json.dumps({str(number): 1 for number in range(90)})
    answer = await send(broker.http, few, "application/json", "/tidelog/v1/login")
    assert_status(answer, 422)
    assert answer.text.count("Unrecognized field") == VALIDATION_ERRORS_MAX


@pytest.mark.broker(topics={"t": 1}, **SETTINGS)
async def test_rights_are_checked_before_body(broker: Broker) -> None:
    headers = await key_of(broker.log, "User:stranger")
    for method, path, route in WITH_BODY:
        if not hasattr(route.access, "operation"):
            continue
        url = url_of(path, broker.log.identity.cluster_id)
        large = b" " * (limit_of(route).bytes_max + 1)
        answer = await broker.http.request(method, url, content=large, headers=headers)
        assert answer.status_code == 403, (path, answer.text)


@pytest.mark.broker(**SETTINGS)
async def test_new_topic_of_stranger_is_refused_before_it_is_parsed(broker: Broker) -> None:
    headers = await key_of(broker.log, "User:stranger")
    url = f"{broker.v3}/topics"
    body = b'{"topic_name":"q","configs":[' + b",".join([b"{}"] * 1_380_000) + b"]}"
    packed = {**headers, "content-encoding": "gzip", "content-type": "application/json"}
    answer = await broker.http.post(url, content=gzip.compress(body), headers=packed)
    assert_status(answer, 413)


NAME = "a-topic-with-a-name-of-forty-characters-"
OFFSET = 10**13
ACL = {
    "resource_type": "TRANSACTIONAL_ID",
    "resource_name": NAME,
    "pattern_type": "PREFIXED",
    "principal": f"User:{NAME}",
    "host": "255.255.255.255",
    "operation": "IDEMPOTENT_WRITE",
    "permission": "ALLOW",
}
PARTITION = {"topic": NAME, "partition": GROUP_PARTITIONS_MAX}
MEMBER_OFFSET = {**PARTITION, "offset": OFFSET, "metadata": ""}
V3_OFFSET = {"topic_name": NAME, "partition_id": PARTITIONS_MAX, "offset": OFFSET}
LARGEST: dict[str, Any] = {
    "/v3/clusters/{cluster_id}/topics": {
        "topic_name": NAME,
        "replicas_assignments": {number: [1001, 1002, 1003] for number in range(PARTITIONS_MAX)},
    },
    "/v3/clusters/{cluster_id}/acls:batch": {"data": [ACL] * ACLS_AT_ONCE_MAX},
    "/v3/clusters/{cluster_id}/consumer-groups/{consumer_group_id}/offsets:reset": {
        "to": "OFFSETS",
        "offsets": [V3_OFFSET] * OFFSETS_MAX,
    },
    "/tidelog/v1/topics/{topic_name}/records:delete": {
        "partitions": [{"partition_id": PARTITIONS_MAX, "offset": OFFSET}] * PARTITIONS_MAX
    },
    "subscription": {"topics": ["x" * 249] * GROUP_TOPICS_MAX},
    "assignments": {"partitions": [PARTITION] * GROUP_PARTITIONS_MAX},
    "positions": {"offsets": [MEMBER_OFFSET] * GROUP_PARTITIONS_MAX},
    "positions/beginning": {"partitions": [PARTITION] * GROUP_PARTITIONS_MAX},
    "positions/end": {"partitions": [PARTITION] * GROUP_PARTITIONS_MAX},
    "offsets": {"offsets": [MEMBER_OFFSET] * GROUP_PARTITIONS_MAX},
}
"""The largest request of each route that lists something. A path without a slash is below an
instance."""


@pytest.mark.parametrize("path", LARGEST)
def test_largest_legal_request_is_below_limit(path: str) -> None:
    if not path.startswith("/"):
        path = f"/consumers/{{consumer_group_id}}/instances/{{instance}}/{path}"
    (limit,) = (
        limit_of(route)
        for method, route_path, route in WITH_BODY
        if route_path == path and method == "POST"
    )
    body = json.dumps(LARGEST[path.rpartition("{instance}/")[2]]).encode()
    assert len(body) <= limit.bytes_max
    assert values_bound(body) <= limit.values_max


async def test_topic_with_assignment_of_each_partition_is_created(broker: Broker) -> None:
    url = f"{broker.v3}/topics"
    body = LARGEST["/v3/clusters/{cluster_id}/topics"] | {"validate_only": True}
    answer = await broker.http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["partitions_count"] == PARTITIONS_MAX


def test_member_names_as_many_partitions_as_group_shares() -> None:
    for count, is_refused in ((GROUP_PARTITIONS_MAX, False), (GROUP_PARTITIONS_MAX + 1, True)):
        parts = {"partitions": [{"topic": "t", "partition": 0}] * count}
        offsets = {"offsets": [{"topic": "t", "partition": 0, "offset": 0}] * count}
        for decode, body in (
            (consumers.decode_partitions, parts),
            (lambda content: consumers.decode_commit(content, ""), offsets),
            (consumers.decode_positions, offsets),
        ):
            content = json.dumps(body).encode()
            if is_refused:
                with pytest.raises(InvalidBody, match=str(GROUP_PARTITIONS_MAX)):
                    decode(content)
            else:
                decode(content)


@pytest.mark.parametrize(
    "body",
    ["", "1", '"a"', "{}", "[]", "[[],{}]", '{"a":1}', '{"a":[1,2],"b":{"c":[{}]}}', "[[[[1]]]]"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_values_are_not_more_than_their_bound(body: str, encoding: str) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value
        return 1 + (sum(map(count, inner)) if isinstance(value, dict | list) else 0)

    assert values_bound(body.encode(encoding)) >= (count(json.loads(body)) if body else 0)
