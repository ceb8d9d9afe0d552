"""Requests with tokens of an OIDC issuer: rights, the cache of callers, the end of a token."""

import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jwt
import pytest

from tests.service.conftest import V2, Broker, broker_on, until
from tests.service.issuer import FakeIssuer, jwk, rsa_key, running_issuer
from tests.service.keyed import (
    JSON_TYPE,
    RECORDS,
    SETTINGS,
    allow,
    assert_denied,
    assert_unknown,
    bearer,
    key_of,
)
from tests.service.test_revoked_streams import LATE, WAYS, forwarded, read, subscribe, waiting
from tidelog.service.security.authenticator import HEADER_BYTES_MAX, TOKEN_BYTES_MAX, TOKEN_ID
from tidelog.service.security.caller import Unauthenticated
from tidelog.service.security.oidc import REFRESH_S
from tidelog.service.server import service
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore

ALICE = "User:oidc-alice"
RECORDS_PATH = "/topics/t/partitions/0/records?offset=0"


@pytest.fixture
def far() -> Iterator[FakeIssuer]:
    with running_issuer() as far:
        yield far


@pytest.fixture
async def broker(far: FakeIssuer) -> AsyncIterator[Broker]:
    async with broker_on(MemoryStore(), **SETTINGS, **far.settings) as broker:
        await broker.log.topics.create("t", 1, {})
        await allow(broker.log, ALICE, "ALL")
        await allow(broker.log, ALICE, "ALL", "GROUP", "g")
        yield broker


def pass_ms(monkeypatch: pytest.MonkeyPatch, broker: Broker, ms: int) -> None:
    """Let the wall clock of the broker go on by so much."""
    now_ms = type(broker.log.clock).now_ms
    clock = broker.log.clock
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms(clock) + ms)


async def test_acls_decide_what_token_may_do(broker: Broker, far: FakeIssuer) -> None:
    alice, bob = bearer(far.token()), bearer(far.token(sub="bob"))
    http = broker.http
    made = await http.post("/topics/t", content=RECORDS, headers=alice | JSON_TYPE)
    assert made.status_code == 200, made.text
    answer = await http.get(RECORDS_PATH, headers=alice)
    assert [record["value"] for record in answer.json()] == ["MQ=="]
    denied = await http.post("/topics/t", content=RECORDS, headers=bob | JSON_TYPE)
    assert "User:oidc-bob may not WRITE" in assert_denied(denied)
    me = (await http.get("/tidelog/v1/me", headers=alice)).json()
    assert (me["principal"], me["is_super"], bool(me["expires_ms"])) == (ALICE, False, True)


async def test_token_has_no_right_of_key_with_its_name(broker: Broker, far: FakeIssuer) -> None:
    await allow(broker.log, "User:carol", "ALL")
    carol = await key_of(broker.log, "User:carol")
    assert (await broker.http.get(RECORDS_PATH, headers=carol)).status_code == 200
    token = bearer(far.token(sub="carol"))
    assert "User:oidc-carol" in assert_denied(await broker.http.get(RECORDS_PATH, headers=token))


async def test_operator_may_give_both_one_name_space(far: FakeIssuer) -> None:
    more = {"oidc_principal_prefix": "", "super_users": "User:root"}
    async with broker_on(MemoryStore(), **SETTINGS, **far.settings, **more) as broker:
        root, admin = bearer(far.token(sub="root")), bearer(far.token(sub="admin"))
        me = (await broker.http.get("/tidelog/v1/me", headers=root)).json()
        assert (me["principal"], me["is_super"]) == ("User:root", True)
        assert_unknown(await broker.http.get("/tidelog/v1/me", headers=admin))


@pytest.mark.parametrize("size", [1, HEADER_BYTES_MAX])
async def test_verified_token_is_not_verified_again(
    broker: Broker, far: FakeIssuer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    header = bearer(far.token(more="x" * size))
    assert (await broker.http.get(RECORDS_PATH, headers=header)).status_code == 200
    monkeypatch.setattr(jwt, "decode", None)
    assert (await broker.http.get(RECORDS_PATH, headers=header)).status_code == 200
    cache_keys = [key for key, *_ in broker.app._security._shown]
    assert max(len(key) for key in cache_keys) <= HEADER_BYTES_MAX
    pass_ms(monkeypatch, broker, 600_001)
    monkeypatch.undo()
    pass_ms(monkeypatch, broker, 600_001)
    answer = await broker.http.get(RECORDS_PATH, headers=header)
    assert assert_unknown(answer) == "invalid token: it has expired"
    assert answer.headers["www-authenticate"] == 'Bearer realm="tidelog", error="invalid_token"'


async def test_keys_work_beside_tokens(far: FakeIssuer) -> None:
    """An admin key with two dots is no token."""
    key = "an.administrators.key-of-many-characters"
    settings = {**SETTINGS, "admin_key": key} | far.settings
    far.answers["/jwks"] = (500, b"", {})
    async with broker_on(MemoryStore(), **settings) as broker:
        assert (await broker.http.get("/topics", headers=bearer(key))).status_code == 200
        assert len(far.asked) <= 2, "only the fetch of the keys at the start"
        assert_unknown(await broker.http.get("/topics", headers=bearer("no-key")))
        answer = await broker.http.get("/topics", headers=bearer(far.token()))
        assert answer.status_code == 503
        assert "cannot be fetched: retry" in answer.json()["message"]
        assert (await broker.http.get("/topics", headers=bearer(key))).status_code == 200


async def test_token_begins_no_session_and_is_not_longer_than_bound(
    broker: Broker, far: FakeIssuer
) -> None:
    token = far.token()
    await until(lambda: len(far.asked) == 2)  # the fetch of the keys at the start
    assert_unknown(await broker.http.post("/tidelog/v1/login", json={"key": token}))
    basic = {"authorization": f"Basic {token}"}
    assert_unknown(await broker.http.get("/topics", headers=basic))
    long = bearer(far.token(more="x" * TOKEN_BYTES_MAX))
    assert "neither Basic nor Bearer" in assert_unknown(
        await broker.http.get("/topics", headers=long)
    )
    assert len(far.asked) == 2


async def test_refused_tokens_are_audited_without_token(far: FakeIssuer, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    tokens = [far.token(aud="other"), far.token(key_id="two"), far.token(lives_s=-1), "a.b.c"]
    async with broker_on(MemoryStore(), **SETTINGS, **far.settings, audit_log=str(file)) as broker:
        for token in tokens:
            assert_unknown(await broker.http.get("/topics", headers=bearer(token)))
        failures = dict(broker.app.counters.auth_failures)
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(event["event"], event["status"], event["reason"]) for event in events] == [
        ("unauthenticated", 401, "invalid token: it is for another audience"),
        ("unauthenticated", 401, "invalid token: the issuer has no such key"),
        ("unauthenticated", 401, "invalid token: it has expired"),
        ("unauthenticated", 401, "invalid token: it is malformed"),
    ]
    assert failures == {"token": 3, "expired": 1}
    for token in tokens[:3]:
        assert not any(part in file.read_text() for part in token.split("."))


# -- the end of a token


@pytest.mark.parametrize("way", WAYS)
async def test_expired_token_ends_what_waits(
    broker: Broker, far: FakeIssuer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async with waiting(broker, read(broker, *WAYS[way], bearer(far.token()))) as task:
        pass_ms(monkeypatch, broker, 600_001)
    assert LATE not in task.result()
    assert b"40101" in task.result()
    assert b"the token has expired" in task.result()


@pytest.mark.parametrize("way", WAYS)
async def test_withdrawn_key_ends_what_waits(
    broker: Broker, far: FakeIssuer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async with waiting(broker, read(broker, *WAYS[way], bearer(far.token()))) as task:
        far.keys = [jwk("two", rsa_key(1))]
        issuer = broker.app._security._issuer
        monkeypatch.setattr(issuer, "_began_s", issuer._began_s - REFRESH_S)
        await issuer.begin_fetch()
    assert LATE not in task.result()
    assert b"40101" in task.result()


async def test_forwarded_read_ends_with_token(
    broker: Broker, far: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker that coordinates the group knows the time of the end, and not the token."""
    await subscribe(broker, bearer(far.token()) | {"content-type": V2})
    proof = (TOKEN_ID, "", broker.log.clock.now_ms() + 600_000)
    async with forwarded(broker, ALICE, proof) as reading, waiting(broker, reading) as task:
        pass_ms(monkeypatch, broker, 600_001)
    assert LATE not in task.result()
    assert b"40101" in task.result()


@pytest.mark.parametrize(
    ("principal", "ends_in_ms"),
    [(ALICE, -1), (ALICE, None), ("User:admin", 60_000)],
    ids=["expired", "without an end", "the admin"],
)
async def test_forwarded_token_without_rights_is_refused(
    broker: Broker, principal: str, ends_in_ms: int | None
) -> None:
    now_ms = broker.log.clock.now_ms()
    ends_ms = 0 if ends_in_ms is None else now_ms + ends_in_ms
    security = broker.app._security
    good = await security.of_peer(ALICE, "h", (TOKEN_ID, "", now_ms + 60_000))
    assert good.proof == (TOKEN_ID, "", now_ms + 60_000)
    with pytest.raises(Unauthenticated):
        await security.of_peer(principal, "h", (TOKEN_ID, "", ends_ms))


async def test_proof_of_token_has_its_end(broker: Broker, far: FakeIssuer) -> None:
    await broker.http.get(RECORDS_PATH, headers=bearer(far.token(exp=4_000_000_000)))
    (caller,) = broker.app._security._callers.values()
    assert caller.proof == (TOKEN_ID, "", 4_000_000_000_000)


async def test_broker_without_package_says_so_in_line(
    broker: Broker, far: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(sys.modules, "tidelog.service.security.oidc")
    settings = Settings(security="keys", **far.settings)
    with pytest.raises(LogError, match=r"oidc_issuer needs tidelog\[oidc\]: "):
        service.issuer_of(settings, broker.log, HttpCounters())
