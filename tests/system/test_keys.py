"""Two real brokers on one store with security on: keys made at one work at the other.

Brokers hand over and forward as ever, and a secret is nowhere but where it was shown.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.service.keyed import bearer
from tests.support.broker import Broker, error_line, json_of, lines_of, tidelog, until

pytestmark = pytest.mark.xdist_group("keys")  # the two brokers are started once

ADMIN_KEY = "an-administrators-key-of-many-characters"
JSON = "application/vnd.kafka.json.v2+json"
V2 = {"content-type": "application/vnd.kafka.v2+json"}
QUICK = {
    "security": "keys",
    "broker_heartbeat_interval_ms": 100,
    "broker_timeout_ms": 3000,
    "poll_interval_ms": 200,
}


class Pair(NamedTuple):
    """Two brokers that know each other."""

    one: Broker
    two: Broker

    def cli(self, *arguments: str, key: str = ADMIN_KEY, number: int = 0, **options: Any) -> Any:
        """A command at a broker, with a key."""
        url = self[number].base_url
        return tidelog(*arguments, TIDELOG_URL=url, TIDELOG_KEY=key, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("keys")
    key_file = folder / "admin.key"
    key_file.write_text(f"{ADMIN_KEY}\n")
    key_file.chmod(0o600)
    store = (folder / "store").as_uri()
    with ExitStack() as stack:
        brokers = [
            stack.enter_context(
                Broker(
                    folder / name,
                    store,
                    is_fresh=True,  # a test reads its command line
                    broker_id=name,
                    admin_key=f"@{key_file}",
                    **QUICK,
                )
            )
            for name in ("one", "two")
        ]
        pair = Pair(*brokers)
        for broker in pair:
            until(lambda broker=broker: metric(broker, "tidelog_live_brokers") == 2)  # type: ignore[misc]
        pair.cli("topics", "create", "t", "--partitions", "2")
        yield pair


def metric(broker: Broker, name: str) -> float:
    text = httpx.get(f"{broker.base_url}/metrics", headers=bearer(ADMIN_KEY)).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1])


def asked(broker: Broker, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> Any:
    """Return the broker's answer to a request with the key."""
    url = f"{broker.base_url}{path}"
    answer = httpx.request(method, url, json=body, headers=bearer(key)).raise_for_status()
    return answer.json() if answer.content else None


def key_for(pair: Pair, principal: str, *rights: tuple[str, str, str]) -> str:
    """A key made at the first broker; its owner may do this, as said at the second."""
    created_key = asked(pair.one, "POST", "/tidelog/v1/keys", {"principal": f"User:{principal}"})
    data = [
        {
            "resource_type": kind,
            "resource_name": name,
            "pattern_type": "PREFIXED",
            "principal": f"User:{principal}",
            "host": "*",
            "operation": operation,
            "permission": "ALLOW",
        }
        for operation, kind, name in rights
    ]
    cluster = asked(pair.two, "GET", "/v3/clusters")["data"][0]["cluster_id"]
    if data:
        asked(pair.two, "POST", f"/v3/clusters/{cluster}/acls:batch", {"data": data})
    return str(created_key["secret"])


def produce(broker: Broker, key: str, value: str) -> httpx.Response:
    headers = bearer(key) | {"content-type": JSON}
    body = {"records": [{"value": value, "partition": 0}]}
    return httpx.post(f"{broker.base_url}/topics/t", json=body, headers=headers, timeout=20)


def test_a_key_made_at_one_broker_opens_the_other_until_it_is_deleted(pair: Pair) -> None:
    created_key = json_of(pair.cli("keys", "create", "alice", "--json"))
    secret = created_key["secret"]
    pair.cli("acls", "add", "alice", "-o", "read", "-o", "WRITE", "--topic", "t", number=1)
    for number in (0, 1):
        pair.cli("produce", "t", "-p", "0", key=secret, number=number, stdin=f"from {number}\n")
    read = pair.cli("consume", "t", "--json", "-f", "text", key=secret, number=1)
    assert [record["value"] for record in lines_of(read)] == ["from 0", "from 1"]
    refused = pair.cli("topics", "create", "u", key=secret, status=1)
    assert error_line(refused) == "not authorized: User:alice may not CREATE topic 'u'"
    listed = json_of(pair.cli("keys", "list", "--json", number=1))
    assert secret not in json.dumps(listed)
    assert created_key["key_id"] in [key["key_id"] for key in listed]
    pair.cli("keys", "delete", created_key["key_id"], "--yes")
    until(lambda: httpx.get(f"{pair.two.base_url}/topics", headers=bearer(secret)).is_client_error)
    unknown = error_line(pair.cli("topics", "list", key=secret, number=1, status=1))
    assert unknown.startswith("invalid credentials")
    assert secret not in unknown


def test_a_new_key_in_a_file_of_its_own(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "bob.key"
    old_umask = os.umask(0o022)
    try:
        process = pair.cli("keys", "create", "bob", "--out", str(file), "--json")
    finally:
        os.umask(old_umask)
    secret = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret not in process.stdout.decode()
    assert json_of(process)["file"] == str(file)
    pair.cli("--key-file", str(file), "topics", "list", key="")
    refusal = pair.cli("keys", "create", "bob", "--out", str(file), status=2)
    assert "exists already" in error_line(refusal)
    assert file.read_text().strip() == secret
    pair.cli("keys", "create", "bob", "--out", str(tmp_path / "none"), key=secret, status=1)
    assert not (tmp_path / "none").exists(), "the broker has refused"
    shown = pair.cli("keys", "create", "bob", "--out", str(tmp_path / "third"))
    assert b"its secret is in" in shown.stdout
    assert len(json_of(pair.cli("keys", "list", "--json"))) == 2


def test_upkeep_of_a_topic_with_a_key_and_without_the_store(pair: Pair) -> None:
    """The commands know only the broker's URL and the key: no store, no rights on one."""
    pair.cli("topics", "create", "kept", "-p", "1", "-c", "cleanup.policy=compact")
    may = key_for(
        pair,
        "keeper",
        *[(operation, "TOPIC", "kept") for operation in ("ALTER", "DELETE", "WRITE")],
    )
    reader = key_for(pair, "looker", ("DESCRIBE", "TOPIC", "kept"))
    for value in range(3):
        pair.cli(
            "produce", "kept", "--key-separator", "=", key=may, stdin=f"k={value}\nl={value}\n"
        )
    assert json_of(pair.cli("seal", "kept", "--json", key=may))["sealed_records"] == 6

    there = ("--server", pair.two.base_url)
    deletion = ("delete-records", "kept", "0:2", *there)
    named = "not authorized: User:looker may not {} topic 'kept'"
    assert error_line(pair.cli(*deletion, key=reader, status=1)) == named.format("DELETE")
    assert "dry run" in pair.cli(*deletion, key=may).stdout.decode()
    moved = {"topic": "kept", "partition": 0, "was": 0, "log_start_offset": 2}
    for options, is_dry, was in (((), True, 0), (("--yes",), False, 0), (("--yes",), False, 2)):
        answer = json_of(pair.cli(*deletion, "--json", *options, key=may))
        assert answer == {"is_dry": is_dry, "moved": [{**moved, "was": was}]}
    for wrong, why in (("0:7", "2 to 6"), ("3:0", "partition 3")):
        process = pair.cli("delete-records", "kept", wrong, *there, key=may, status=None)
        assert process.returncode in {1, 4}
        assert why in error_line(process)
    process = pair.cli(*deletion, "--store", "x", key=may, status=2)
    assert "exclude each other" in error_line(process)

    compaction = ("compact", "kept", "--force", *there)
    assert error_line(pair.cli(*compaction, key=reader, status=1)) == named.format("ALTER")
    due = json_of(pair.cli(*compaction, "--json", key=may))
    assert [row["what"] for row in due["compacted"]] == ["compact"]
    assert due["compacted"][0]["rows_after"] == -1
    process = pair.cli(*compaction, "--yes", key=may).stdout.decode()
    assert "with 2 rows" in process
    assert lines_of(pair.cli("consume", "kept", "--json", key=ADMIN_KEY))
    # The other broker has them.
    jobs = json_of(pair.cli("compactions", "--json", key=reader, number=0))
    assert [(job["state"], job["is_dry_run"], job["broker"]) for job in jobs] == [
        ("done", False, "two"),
        ("done", True, "two"),
    ]
    assert "kept" in pair.cli("compactions", key=may, number=1).stdout.decode()
    stranger = key_for(pair, "stranger")
    assert json_of(pair.cli("compactions", "--json", key=stranger)) == []
    pair.cli("topics", "delete", "kept", "--yes")


def test_without_a_key_a_command_says_what_is_missing(pair: Pair) -> None:
    process = tidelog("topics", "list", TIDELOG_URL=pair.one.base_url, status=1)
    assert "authentication required" in error_line(process)
    assert "TIDELOG_KEY" in error_line(process)
    file = pair.one.folder / "key"
    file.write_text(ADMIN_KEY)
    file.chmod(0o600)
    variables = {"TIDELOG_URL": pair.one.base_url}
    listed = tidelog("--key-file", str(file), "topics", "list", "--json", **variables)
    assert [topic["name"] for topic in json_of(listed)] == ["t"]
    absent = tidelog("--key-file", "/nowhere", "topics", "list", status=2, **variables)
    assert "cannot read /nowhere" in error_line(absent)


def test_brokers_hand_over_and_strangers_do_not(pair: Pair) -> None:
    key = key_for(pair, "bob", ("WRITE", "TOPIC", "t"))
    old_count = sum(metric(broker, "tidelog_handovers_total") for broker in pair)

    def is_handed_over() -> bool:
        assert all(produce(broker, key, "x").status_code == 200 for broker in pair)
        return sum(metric(broker, "tidelog_handovers_total") for broker in pair) > old_count

    until(is_handed_over)
    for path in Path(pair.one.folder.parent, "store", "brokers").glob("*.json"):
        peer = json.loads(path.read_text())
        for route in ("drafts", "entries", "group-requests", "group-confirmations", "metrics"):
            for header in ({}, bearer(ADMIN_KEY), bearer(key)):
                answer = httpx.post(f"{peer['address']}/peers/v1/{route}", headers=header)
                assert answer.status_code == 401, (route, header)


def test_any_broker_serves_an_instance_of_an_authorized_principal(pair: Pair) -> None:
    groups = [f"g{number}" for number in range(4)]  # some of each coordinator, by their names
    key = key_for(pair, "carol", ("READ", "GROUP", "g"), ("READ", "TOPIC", "t"))
    assert produce(pair.one, ADMIN_KEY, "for groups").status_code == 200
    headers = V2 | bearer(key) | {"accept": JSON.replace(".json.", ".text.")}
    other = V2 | bearer(key_for(pair, "dave"))
    first_url, second_url = pair.one.base_url, pair.two.base_url
    for group in groups:
        body = {"name": "c", "format": "text", "auto.offset.reset": "earliest"}
        httpx.post(f"{first_url}/consumers/{group}", json=body, headers=headers).raise_for_status()
        path = f"/consumers/{group}/instances/c"
        topics = {"topics": ["t"]}
        for url in (first_url, second_url):
            answer = httpx.post(f"{url}{path}/subscription", json=topics, headers=headers)
            assert answer.status_code == 204, answer.text
            assert httpx.get(f"{url}{path}/records", headers=other).status_code == 403
        read: list[Any] = []
        for url in (second_url, first_url, second_url):
            answer = httpx.get(f"{url}{path}/records?timeout=100", headers=headers, timeout=20)
            read += answer.raise_for_status().json()
        assert '"for groups"' in [record["value"] for record in read]
    pair.cli("acls", "remove", "--principal", "carol", "--yes")
    until(lambda: httpx.get(f"{second_url}{path}/records", headers=headers).status_code == 403)
    again = pair.cli("acls", "remove", "--principal", "carol", "--yes")
    assert b"no ACL matches User:carol: nothing was removed" in again.stderr


def test_quotas_hold_on_each_broker(pair: Pair) -> None:
    key = key_for(pair, "eve", ("WRITE", "TOPIC", "t"))
    pair.cli("quotas", "set", "eve", "--producer-byte-rate", "10", number=1)
    listed = json_of(pair.cli("quotas", "list", "--json"))
    quotas = [{name: quota[name] for name in quota if quota[name] is not None} for quota in listed]
    assert {"principal": "User:eve", "producer_byte_rate": 10} in quotas
    for broker in pair:
        until(lambda broker=broker: produce(broker, key, "x" * 500).status_code == 429)  # type: ignore[misc]
        answer = produce(broker, key, "x")
        assert (answer.status_code, answer.json()["error_code"]) == (429, 42901)
        assert int(answer.headers["retry-after"]) >= 1
    pair.cli("quotas", "remove", "eve")
    until(lambda: produce(pair.two, key, "x").status_code == 200)


def test_no_secret_is_in_a_log_a_command_line_or_the_store(pair: Pair) -> None:
    key = key_for(pair, "frank")
    assert asked(pair.one, "GET", "/topics", key=key) == []
    secrets = [key.encode(), ADMIN_KEY.encode()]
    texts = [broker.log().encode() for broker in pair]
    texts += [Path(f"/proc/{broker.pid}/cmdline").read_bytes() for broker in pair]
    store = Path(pair.one.folder.parent, "store")
    texts += [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    assert len(texts) > 6
    assert not any(secret in text for secret in secrets for text in texts)
