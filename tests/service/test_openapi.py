"""The API's own documentation against the API: requests drawn from it by schemathesis, in process.

Of every operation: no 500, and an answer of a documented status, media type, headers and shape; the
hot routes too, which are served in front of the application. `--api-examples N` draws more.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service import keyed
from tests.tools.fuzz.http_target import Served
from tidelog.service.server.app import build_app

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ANSWER_S_MAX = 240.0
KNOWN = {
    "topic_name": "t",
    "namespace": "logs",
    "partition_id": 0,
    "instance": "c",
    "consumer_id": "c",
    "broker_id": 1,
    "name": "retention.ms",
}
"""Existing names: random names would only get 404."""
KNOWN_SHARE = 0.8
EXAMPLE_SHARE = 0.4
"""Of the requests have the documentation's own example as their body, and no parameters."""
TOPICS = ("t", "flights", "delays", "audit")


class Documented:
    """A broker with something in it, and its documentation."""

    def __init__(self) -> None:
        self._served = Served(**keyed.SETTINGS)
        self._served.broker.http.headers.update(keyed.ADMIN)
        log = self._served.broker.log
        self.cluster_id = log.identity.cluster_id
        app = build_app(log)
        self.schema = schemathesis.openapi.from_dict(app.openapi())
        # The client has a key; drawn ones would meet 401 alone.
        self.schema.config.generation.update(with_security_parameters=False)
        self.operations = {
            operation.ok().label: operation.ok() for operation in self.schema.get_all_operations()
        }
        self.close = self._served.close

    def ask(self, case: Any) -> httpx.Response:
        sent = case.as_transport_kwargs(base_url="http://tide:8082")
        sent.pop("cookies", None)
        wanted = {name: value for name, value in sent.items() if value is not None}
        for name in ("params", "headers"):
            wanted[name] = dict(wanted.get(name) or {})
        if isinstance(wanted.get("data"), bytes | str):
            wanted["content"] = wanted.pop("data")  # httpx's word for it

        async def answer() -> httpx.Response:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await self._served.broker.http.request(**wanted)

        response: httpx.Response = self._served._runner.run(answer())
        return response

    def prepare(self) -> None:
        """Topics, a record, a group that has committed, and one with an instance that reads."""
        record = {"value": {"type": "JSON", "data": 1}}
        offset = {"topic_name": "t", "partition_id": 0, "offset": 1}
        committed = {
            "topics": [{"topic_name": "t", "records": [{"partition_id": 0, **record}]}],
            "consumer_groups": [{"consumer_group_id": "h", "offsets": [offset]}],
        }
        http, run = self._served.broker.http, self._served._runner.run
        for path, body in (
            *(("/admin/topics", {"topic_name": name, "partitions_count": 2}) for name in TOPICS),
            (f"/v3/clusters/{self.cluster_id}/transactions", committed),
            ("/consumers/g", {"name": "c", "format": "json", "auto.offset.reset": "earliest"}),
            ("/consumers/g/instances/c/subscription", {"topics": ["t"]}),
        ):
            run(http.post(path, json=body))


@pytest.fixture(scope="module")
def documented() -> Iterator[Documented]:
    logging.disable()
    made = Documented()
    yield made
    made.close()
    logging.disable(logging.NOTSET)


def test_every_route_answers_as_documented(
    documented: Documented, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--api-examples")
    drawn = settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    wrong: dict[str, str] = {}
    statuses: dict[str, set[int]] = {}
    for label, operation in documented.operations.items():
        documented.prepare()
        statuses[label], why = _tried(documented, operation, drawn)
        if why:
            wrong[label] = why
    assert not wrong, "\n\n".join(f"{label}: {why}" for label, why in wrong.items())
    assert len(statuses) > 60
    answered = [label for label, seen in statuses.items() if min(seen) < 400]
    refusing = [label for label in statuses if "/broker" in label]  # configs of brokers: read-only
    assert len(answered) > 0.8 * (len(statuses) - len(refusing)), "unlike those of clients"


def _tried(documented: Documented, operation: Any, drawn: settings) -> tuple[set[int], str]:
    """The statuses it answered with, and what was wrong with an answer."""
    seen: set[int] = set()
    numbers = itertools.count()

    @drawn
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        draw = random.Random(next(numbers))
        _make_likely(case, operation, documented.cluster_id, draw)
        response = documented.ask(case)
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    try:
        check()
    except BaseExceptionGroup as errors:
        return seen, "\n".join(map(str, errors.exceptions))
    except (AssertionError, TimeoutError) as error:
        return seen, str(error)
    return seen, ""


def _make_likely(case: Any, operation: Any, cluster_id: str, draw: random.Random) -> None:
    """Names that there are, and bodies that say something, in many of the examples."""
    values = {**KNOWN, "cluster_id": cluster_id, "consumer_group_id": draw.choice("ghg")}
    is_example = draw.random() < EXAMPLE_SHARE
    for name in case.path_parameters or ():
        if name in values and (is_example or draw.random() < KNOWN_SHARE):
            case.path_parameters[name] = values[name]
    if not is_example:
        return
    case.query = {}
    contents = operation.definition.raw.get("requestBody", {}).get("content", {})
    for media_type, content in contents.items():
        examples = [content.get("example"), *content.get("schema", {}).get("examples", [])]
        if bodies := [example for example in examples if example is not None]:
            case.body, case.media_type = bodies[0], media_type
