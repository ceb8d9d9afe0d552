"""Two real brokers that accept the tokens of an issuer in this process.

The command line, a group that the other broker coordinates, a stream that ends with its token.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.service.issuer import FakeIssuer, jwk, rsa_key, running_issuer
from tests.service.keyed import bearer
from tests.support.broker import Broker, error_line, lines_of, until
from tests.system.several import QUICK
from tests.system.test_keys import ADMIN_KEY, JSON, V2, Pair, metric

pytestmark = pytest.mark.xdist_group("oidc")  # the two brokers are started once

ALICE = "oidc-alice"


@pytest.fixture(scope="module")
def far() -> Iterator[FakeIssuer]:
    with running_issuer() as far:
        yield far


@pytest.fixture(scope="module")
def pair(far: FakeIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("oidc")
    key_file = folder / "admin.key"
    key_file.write_text(f"{ADMIN_KEY}\n")
    key_file.chmod(0o600)
    settings = {**QUICK, "security": "keys", "admin_key": f"@{key_file}", **far.settings}
    store = (folder / "store").as_uri()
    with ExitStack() as stack:
        pair = Pair(
            *(
                stack.enter_context(Broker(folder / name, store, broker_id=name, **settings))
                for name in ("one", "two")
            )
        )
        for broker in pair:
            until(lambda broker=broker: metric(broker, "tidelog_live_brokers") == 2)  # type: ignore[misc]
        pair.cli("topics", "create", "t")
        pair.cli("acls", "add", ALICE, "-o", "read", "-o", "WRITE", "--topic", "t")
        pair.cli("acls", "add", ALICE, "-o", "read", "--group", "g", "--prefixed")
        yield pair


def test_the_command_line_sends_a_token_as_a_key(pair: Pair, far: FakeIssuer) -> None:
    token = far.token()
    for number in (0, 1):
        pair.cli("produce", "t", key=token, number=number, stdin=f"from {number}\n")
    read = pair.cli("consume", "t", "--json", "-f", "text", key=token, number=1)
    assert [record["value"] for record in lines_of(read)] == ["from 0", "from 1"]
    refused = pair.cli("topics", "create", "u", key=token, status=1)
    message = "not authorized: User:oidc-alice may not CREATE topic 'u'"
    assert error_line(refused) == message


def test_a_group_at_the_other_broker_reads_until_the_token_expires(
    pair: Pair, far: FakeIssuer
) -> None:
    """Some of the groups have the other broker as their coordinator."""
    headers = bearer(far.token()) | V2
    accept = {"accept": "application/vnd.kafka.binary.v2+json"}
    url = pair.one.base_url
    paths = [f"{url}/consumers/g{number}" for number in range(4)]
    for path in paths:
        body = {"name": "i", "format": "binary", "auto.offset.reset": "earliest"}
        httpx.post(path, json=body, headers=headers).raise_for_status()
        instance_path = f"{path}/instances/i"
        httpx.post(
            f"{instance_path}/subscription", json={"topics": ["t"]}, headers=headers
        ).raise_for_status()
    records = [f"{path}/instances/i/records?timeout=1000" for path in paths]
    short = bearer(far.token(lives_s=20)) | accept
    for read in records:
        assert httpx.get(read, headers=short, timeout=60).status_code == 200
    for read in records:
        until(lambda read=read: httpx.get(read, headers=short, timeout=60).status_code == 401)  # type: ignore[misc]


def test_a_stream_ends_with_its_token(pair: Pair, far: FakeIssuer) -> None:
    headers = bearer(far.token(lives_s=10)) | {"accept": "text/event-stream"}
    url = f"{pair.two.base_url}/topics/t/partitions/0/records?offset=latest"
    with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        last = [line for line in answer.iter_lines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error_code"] == 40101


def test_the_issuer_may_change_its_key(pair: Pair, far: FakeIssuer) -> None:
    far.keys.append(jwk("two", rsa_key(1)))
    headers = bearer(far.token(key=rsa_key(1), key_id="two")) | {"content-type": JSON}
    body = {"records": [{"value": 1}]}
    url = f"{pair.one.base_url}/topics/t"
    until(lambda: httpx.post(url, json=body, headers=headers).status_code == 200)


def test_no_log_has_a_token(pair: Pair, far: FakeIssuer) -> None:
    token = far.token(aud="other")
    url = f"{pair.one.base_url}/topics"
    assert httpx.get(url, headers=bearer(token)).status_code == 401
    text = Path(pair.one.folder / "broker.log").read_text()
    assert "it is for another audience" in text
    assert not any(part in text for part in token.split("."))
