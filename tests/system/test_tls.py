"""TLS of real brokers: for clients, for the command line, and between brokers."""

import base64
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.broker import Broker, error_line, tidelog, until
from tests.support.certificates import Authority
from tests.system.several import QUICK, brokers, live, sequencer_first, total

JSON = "application/vnd.kafka.json.v2+json"
V2 = {"content-type": "application/vnd.kafka.v2+json"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def broker(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    pair = authority.pair("clients")
    folder = tmp_path_factory.mktemp("tls")
    admin_key = folder / "admin"
    admin_key.touch(mode=0o600)
    admin_key.write_text("k" * 30)
    with Broker(
        folder,
        tls_cert_file=pair.cert,
        tls_key_file=pair.key,
        security="keys",
        admin_key=f"@{admin_key}",
    ) as running:
        yield running


def test_records_by_http_and_by_the_command_line(broker: Broker, authority: Authority) -> None:
    variables = {"TIDELOG_URL": broker.base_url, "TIDELOG_KEY": "k" * 30}
    trusting = variables | {"TIDELOG_CA_FILE": str(authority.ca)}
    assert broker.base_url.startswith("https://")
    tidelog("topics", "create", "t", **trusting)
    tidelog("--ca-file", str(authority.ca), "produce", "t", stdin="one\n", **variables)
    headers = {"authorization": f"Bearer {'k' * 30}"}
    context = ssl.create_default_context(cafile=str(authority.ca))
    with httpx.Client(base_url=broker.base_url, verify=context, headers=headers) as client:
        body = '{"records":[{"value":"two"}]}'
        client.post("/topics/t", content=body, headers={"content-type": JSON}).raise_for_status()
        answer = client.post("/consumers/g", content=b'{"name":"i"}', headers=V2).json()
        assert answer["base_uri"].startswith(f"{broker.base_url}/consumers/g")
        text = client.get("/metrics").text
        assert 'tidelog_certificate_seconds{port="clients"}' in text
    process = tidelog("consume", "t", "-f", "text", **trusting)
    assert b"one" in process.stdout
    assert b"two" in process.stdout
    refused = tidelog("topics", "list", status=None, **variables)
    assert "certificate is not accepted" in error_line(refused)
    assert "--ca-file" in error_line(refused)
    plain = variables | {"TIDELOG_URL": broker.base_url.replace("https", "http")}
    assert "use https://" in error_line(tidelog("topics", "list", status=None, **plain))
    assert "/nowhere: no such file" in error_line(
        tidelog("--ca-file", "/nowhere", "topics", "list", status=2, **variables)
    )


def test_the_cookie_of_a_session_is_for_https_only(broker: Broker, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.ca))
    answer = httpx.post(
        f"{broker.base_url}/tidelog/v1/login", verify=context, json={"key": "k" * 30}
    )
    assert "Secure" in answer.headers["set-cookie"], answer.text


def test_a_broker_with_files_that_cannot_be_used_does_not_start(
    authority: Authority, tmp_path: Path
) -> None:
    pair, other = authority.pair("one"), authority.pair("two")
    files = ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(other.key)]
    store = tmp_path / "store"
    process = tidelog("serve", "--port", "0", "--store", str(store), *files, status=1)
    assert "the key does not fit the certificate" in process.stderr.decode()
    assert not store.exists()


def test_brokers_hand_over_drafts_and_requests_of_groups(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.pair("peers")
    settings = QUICK | {
        "peer_tls": True,
        "tls_ca_file": authority.ca,
        "peer_tls_cert_file": pair.cert,
        "peer_tls_key_file": pair.key,
    }
    with brokers(tmp_path, 2, **settings) as cluster:
        assert all("peers    https://" in peer.log() for peer in cluster)
        first, second = sequencer_first(cluster)
        first.create_topic("t")
        until(lambda: _produced(second, 1))
        old_count = total([second], "handovers")
        for _ in range(5):
            assert _produced(second, 1)
        assert total([second], "handovers") > old_count
        # One of the brokers coordinates the group; a request to the other one is forwarded.
        answer = httpx.post(f"{first.base_url}/consumers/g", json={"name": "i", "format": "json"})
        answer.raise_for_status()
        path = f"/consumers/g/instances/{answer.json()['instance_id']}"
        for peer in cluster:
            url = f"{peer.base_url}{path}/subscription"
            httpx.post(url, json={"topics": ["t"]}, headers=V2).raise_for_status()
            accept = {"accept": JSON}
            httpx.get(f"{peer.base_url}{path}/records", headers=accept).raise_for_status()
        assert [live(peer) for peer in cluster] == [2, 2]


def _produced(broker: Broker, records: int) -> bool:
    value = base64.b64encode(b"value").decode()
    body = {"records": [{"value": value}] * records}
    headers = {"content-type": "application/vnd.kafka.binary.v2+json"}
    return httpx.post(f"{broker.base_url}/topics/t", json=body, headers=headers).is_success
