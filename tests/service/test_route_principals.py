"""Every route with every kind of principal: what it may follows from the declared access alone.

Routes and their access come from the table of the router. A route whose handler checks by itself
has a row in BY_HANDLER: a new one without a row fails.
"""

import pytest

from tests.service.conftest import Broker
from tests.service.keyed import (
    ADMIN,
    SETTINGS,
    allow,
    assert_denied,
    assert_unknown,
    key_of,
    secured,
)
from tests.service.test_rights import DECLARED, asked, routes
from tests.support.vloop import run
from tidelog.service.http.media_types import ARROW, EVENT_STREAM, JSON_V2_TYPES, NDJSON
from tidelog.service.http.route import Permission, RouteAccess
from tidelog.service.routes import keys
from tidelog.service.security.authenticator import READING
from tidelog.storage.core.acls import CLUSTER, DESCRIBE, GROUP, OPERATIONS_OF, READ, TOPIC, WRITE
from tidelog.storage.core.actions import DeleteKey
from tidelog.storage.store.memory import MemoryStore

GRANTS: dict[str, set[tuple[str, str]]] = {
    "nothing": set(),
    "reader": {(READ, TOPIC), (READ, GROUP)},
    "writer": {(WRITE, TOPIC)},
    "describer": {(DESCRIBE, TOPIC), (DESCRIBE, GROUP), (DESCRIBE, CLUSTER)},
}
"""Operations on topic t, group g and the cluster."""
IMPLIED = {READ: {DESCRIBE}, WRITE: {DESCRIBE}}
CLUSTER_ID = "/clusters/{cluster_id}"
BY_HANDLER: dict[tuple[str, str], set[str]] = {
    ("POST", f"{CLUSTER_ID}/transactions"): {"writer"},
    ("POST", f"{CLUSTER_ID}/topics"): set(),
    ("POST", "/admin/topics"): set(),
    **{
        ("GET", path): set(GRANTS)  # each sees a part of the list
        for path in (
            "/topics",
            "/tidelog/v1/topics",
            "/tidelog/v1/groups",
            "/tidelog/v1/compactions",
            f"{CLUSTER_ID}/topics",
            f"{CLUSTER_ID}/topics/-/configs",
            f"{CLUSTER_ID}/brokers/{{broker_id}}/partition-replicas",
            f"{CLUSTER_ID}/consumer-groups",
        )
    },
}
"""The principals that are not refused."""
ACCEPTS = (
    *JSON_V2_TYPES,
    b"application/vnd.kafka.binary.v2+json",
    b"application/vnd.kafka.json.v2+json",
    ARROW,
    NDJSON,
    EVENT_STREAM,
    b"text/html, image/png",
)


pytestmark = pytest.mark.broker(topics={"t": 1}, records=[b"1"], **SETTINGS)


def may(who: str, method: str, route: str) -> bool:
    access = DECLARED[method, route].access
    if access is RouteAccess.CHECKED_BY_HANDLER:
        return who in BY_HANDLER[method, route]
    if not isinstance(access, Permission):
        return True
    granted = {
        (implied, resource_type)
        for operation, resource_type in GRANTS[who]
        for implied in {operation, *IMPLIED.get(operation, ())}
    }
    return (access.operation, access.resource_type) in granted


def test_each_route_whose_handler_checks_has_a_row() -> None:
    by_handler = {
        key for key, route in DECLARED.items() if route.access is RouteAccess.CHECKED_BY_HANDLER
    }
    assert by_handler == BY_HANDLER.keys()
    named = {operation for grants in GRANTS.values() for operation, _ in grants}
    assert named <= {operation for kind in OPERATIONS_OF.values() for operation in kind}


@pytest.mark.parametrize("who", GRANTS)
async def test_a_principal_gets_what_it_was_granted_and_no_more(broker: Broker, who: str) -> None:
    header = await key_of(broker.log, f"User:{who}")
    names = {TOPIC: "t", GROUP: "g", CLUSTER: "kafka-cluster"}
    for operation, resource_type in GRANTS[who]:
        await allow(broker.log, f"User:{who}", operation, resource_type, names[resource_type])
    allowed = 0
    for method, route in routes(broker):
        answer = await asked(broker, method, route, header)
        if not may(who, method, route):
            assert_denied(answer)
            continue
        allowed += 1
        assert answer.status_code not in (401, 403, 500), (method, route, answer.text)
    assert 20 < allowed < len(DECLARED)


@pytest.mark.parametrize("kind", ["no", "wrong", "malformed", "revoked"])
async def test_without_a_valid_key_only_public_routes_answer(broker: Broker, kind: str) -> None:
    header = await key_of(broker.log, "User:bob")
    await allow(broker.log, "User:bob", "ALL", "TOPIC", "*")
    if kind == "revoked":
        assert (await broker.http.get("/topics/t", headers=header)).status_code == 200
        (key_id,) = broker.log.state.access.keys
        await broker.log.change_access(DeleteKey(key_id))
    elif kind == "no":
        header = {}
    else:
        header = {"authorization": "Bearer of-nothing" if kind == "wrong" else "Digest x"}
    before = broker.log.state.encode()
    for method, route in routes(broker):
        answer = await asked(broker, method, route, header)
        if DECLARED[method, route].access is not RouteAccess.PUBLIC:
            assert_unknown(answer)
        elif DECLARED[method, route].label == "health":
            assert answer.status_code == 200, (method, route)
        else:
            assert answer.status_code != 500, (method, route, answer.text)
    assert broker.log.state.encode() == before


def test_a_wrong_login_takes_a_second_and_a_right_one_does_not() -> None:
    async def main() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        async with secured(MemoryStore()) as broker:
            for key, status, least_s in (
                ("w" * 40, 401, keys.WRONG_LOGIN_S),
                (ADMIN["authorization"].removeprefix("Bearer "), 200, 0.0),
            ):
                started_s = loop.time()
                answer = await broker.http.post("/tidelog/v1/login", json={"key": key})
                assert answer.status_code == status
                assert least_s <= loop.time() - started_s < least_s + keys.WRONG_LOGIN_S

    run(main)


def changes(broker: Broker) -> list[tuple[str, str, bytes]]:
    """Every route that changes something, with every type of an Accept."""
    changing = [(method, route) for method, route in routes(broker) if method not in READING]
    assert len(changing) > 40
    return [(method, route, accept) for method, route in changing for accept in ACCEPTS]


async def test_a_change_whose_answer_is_not_wanted_changes_nothing(broker: Broker) -> None:
    """A type that only other routes have is refused, too."""
    headers = ADMIN | {"content-type": "application/json"}
    made = await broker.http.post("/consumers/g", content=b'{"name":"g"}', headers=headers)
    assert made.status_code == 200, made.text
    before = broker.log.state.encode()
    for method, route, accept in changes(broker):
        if accept not in DECLARED[method, route].dialect.served:
            answer = await asked(broker, method, route, ADMIN | {"accept": accept.decode()})
            assert (answer.status_code, answer.json()["error_code"]) == (406, 40601), (
                method,
                route,
                accept,
            )
    assert broker.log.state.encode() == before


async def test_a_change_whose_answer_is_wanted_is_served(broker: Broker) -> None:
    for method, route, accept in changes(broker):
        if accept in DECLARED[method, route].dialect.served:
            answer = await asked(broker, method, route, ADMIN | {"accept": accept.decode()})
            assert answer.status_code not in (406, 500), (method, route, accept)


def test_the_documented_types_of_changes_are_served() -> None:
    for (method, _), route in DECLARED.items():
        contents = [content for answer in route.doc.answers.values() for content in answer.contents]
        types = {kind for content in contents for kind in content.media_types}
        assert method in READING or types <= set(route.dialect.served), route.path
