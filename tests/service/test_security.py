"""Authentication: keys in headers and cookies, on any broker, until they are revoked."""

import asyncio
import json
import logging
import os

import httpx
import pytest

from tests.service.conftest import Broker
from tests.service.keyed import (
    ADMIN,
    ADMIN_KEY,
    CONSOLE,
    JSON_TYPE,
    RECORDS,
    SETTINGS,
    allow,
    assert_denied,
    assert_unknown,
    basic,
    bearer,
    key_of,
    refill_nothing,
    secured,
)
from tidelog.service.operations import acls_keys_quotas
from tidelog.service.operations.rights import FETCH
from tidelog.service.security import session_cookie
from tidelog.service.security.authenticator import REFRESHES_PER_S
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings, client_key, load
from tidelog.storage.cluster.secret import cluster_secret
from tidelog.storage.core.acls import TEXT_BYTES_MAX
from tidelog.storage.core.actions import DeleteKey, SetQuotas
from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore

pytestmark = pytest.mark.broker(topics={"t": 1}, records=[b"1"], **SETTINGS)


async def me(broker: Broker, headers: dict[str, str]) -> str:
    answer = await broker.http.get("/tidelog/v1/me", headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["principal"])


async def made(broker: Broker, **body: object) -> dict[str, str]:
    """A key by the route for it."""
    answer = await broker.http.post("/tidelog/v1/keys", json=body, headers=ADMIN)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    said: dict[str, str] = answer.json()
    return said


async def test_spellings_of_credential_are_one_caller(broker: Broker) -> None:
    secret = (await made(broker, principal="User:alice"))["secret"]
    assert len(secret) == 46
    before = len(broker.app._security._callers)
    for scheme in ("Bearer ", "bearer  ", "Bearer  ", "bEARER ", "bearer "):
        for header in ({"authorization": f"{scheme}{secret} "}, basic("alice", secret)):
            assert await me(broker, header) == "User:alice"
            assert await me(broker, header) == "User:alice"  # now from memory
    assert len(broker.app._security._callers) == before + 1
    assert await me(broker, basic("admin", ADMIN_KEY)) == "User:admin"


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("", "malformed"),
        ("Basic", "malformed"),
        ("Basic !!!", "malformed"),
        ("Basic YWxpY2U=", "malformed"),
        ("Digest username=alice", "malformed"),
        ("Bearer " + "x" * 2000, "malformed"),
        ("Bearer", "unknown"),
        ("Bearer wrong", "unknown"),
        ("Bearer é\xff", "unknown"),
        (basic("alice", "wrong")["authorization"], "unknown"),
        (basic("alice", ADMIN_KEY)["authorization"], "unknown"),
        (basic("", ADMIN_KEY)["authorization"], "unknown"),
    ],
)
async def test_what_is_no_key_is_refused_and_counted(
    broker: Broker, header: str, kind: str
) -> None:
    sent = [("authorization", header.encode("latin-1"))]
    for path in ("/topics", "/topics/t/partitions/0/records", "/v3/clusters"):
        message = assert_unknown(await broker.http.get(path, headers=sent))
        assert ADMIN_KEY not in message
        assert "wrong" not in message
    text = (await broker.http.get("/metrics", headers=ADMIN)).text
    assert f'tidelog_auth_failures_total{{kind="{kind}"}} 3.0' in text
    assert ADMIN_KEY not in text


async def test_key_that_has_expired_is_none(broker: Broker) -> None:
    now_ms = broker.log.clock.now_ms()
    over = await key_of(broker.log, "User:alice", expires_ms=now_ms - 1)
    assert "expired" in assert_unknown(await broker.http.get("/topics", headers=over))
    header = await key_of(broker.log, "User:alice", expires_ms=now_ms + 3_600_000)
    assert await me(broker, header) == "User:alice"
    security = broker.app._security
    for caller in security._callers.values():  # an hour later
        assert caller.credential is not None
        caller.credential = caller.credential._replace(expires_ms=now_ms - 1)
        assert not caller.is_valid
        assert not caller.may(FETCH, "t")


async def test_repeated_creation_leaves_one_key_with_known_secret(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ADMIN | {"idempotency-key": '"4711"'}
    body = {"principal": "User:alice", "note": "nightly"}

    async def create(**changed: object) -> httpx.Response:
        return await broker.http.post("/tidelog/v1/keys", json=body | changed, headers=named)

    first, second = (await create()).json(), (await create()).json()
    assert first["key_id"] == second["key_id"]
    assert first["secret"] != second["secret"]
    header = bearer(second["secret"])
    assert_unknown(await broker.http.get("/topics", headers=bearer(first["secret"])))
    assert await me(broker, header) == "User:alice"
    assert [*broker.log.state.access.keys] == [second["key_id"]]
    for changed in ({"principal": "User:bob"}, {"note": ""}, {"ttl_s": 60}):
        refused = await create(**changed)
        assert (refused.status_code, refused.json()["error_code"]) == (422, 422)
    assert await me(broker, header) == "User:alice"
    monkeypatch.setattr(acls_keys_quotas, "REPEAT_MS_MAX", -600_000)
    assert "minutes ago" in (await create()).text
    assert await me(broker, header) == "User:alice"


async def test_key_is_listed_without_its_secret_and_ends_when_it_is_deleted(broker: Broker) -> None:
    key = await made(broker, principal="User:alice", note="nightly", ttl_s=60)
    header = bearer(key["secret"])
    (shown,) = (await broker.http.get("/tidelog/v1/keys", headers=ADMIN)).json()["data"]
    assert shown == {name: value for name, value in key.items() if name != "secret"}
    assert (shown["principal"], shown["note"], shown["is_expired"]) == (
        "User:alice",
        "nightly",
        False,
    )
    assert await me(broker, header) == "User:alice"
    deletion = await broker.http.delete(f"/tidelog/v1/keys/{key['key_id']}", headers=ADMIN)
    assert deletion.status_code == 204
    assert_unknown(await broker.http.get("/topics", headers=header))
    again = await broker.http.delete(f"/tidelog/v1/keys/{key['key_id']}", headers=ADMIN)
    assert again.status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"principal": "alice"},
        {"principal": "User:*"},
        {"principal": "User:a", "note": "n" * 300},
        {"principal": "User:a", "ttl_s": 0},
        {"principal": "User:\ud800"},
        {"principal": "User:a", "secret": "mine"},
        {},
    ],
)
async def test_key_that_cannot_be(broker: Broker, body: dict[str, object]) -> None:
    content = json.dumps(body)  # a lone surrogate as it may be sent
    answer = await broker.http.post("/tidelog/v1/keys", content=content, headers=ADMIN)
    assert answer.status_code in (400, 422), answer.text
    assert not broker.log.state.access.keys


async def test_no_secret_is_in_store_or_in_log_line(
    broker: Broker, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = (await made(broker, principal="User:alice"))["secret"]
    await me(broker, basic("alice", secret))
    assert_unknown(await broker.http.get("/topics", headers=basic("bob", secret)))
    assert "User:admin created key" in caplog.text
    await broker.log._log.wal.checkpoint()
    bodies = [await store.get(info.key) async for info in store.list("")]
    assert len(bodies) > 3
    assert not any(secret.encode() in body or ADMIN_KEY.encode() in body for body in bodies)
    assert secret not in caplog.text
    assert ADMIN_KEY not in caplog.text
    assert ADMIN_KEY not in repr(Settings(security="keys", admin_key=ADMIN_KEY))


async def test_i3_what_one_broker_has_acked_others_know(broker: Broker, other: Broker) -> None:
    header = await key_of(broker.log, "User:alice")
    assert await me(other, header) == "User:alice"
    records = "/topics/t/partitions/0/records"
    assert_denied(await other.http.get(records, headers=header))
    await allow(broker.log, "User:alice", "READ")
    assert (await other.http.get(records, headers=header)).status_code == 200
    (key_id,) = broker.log.state.access.keys
    await broker.log.access.change(DeleteKey(key_id))
    await other.log._log.wal.refresh()  # by its poll, or a peer that tells of it
    assert_unknown(await other.http.get(records, headers=header))


async def test_bad_keys_cost_no_memory_and_few_looks_at_store(broker: Broker) -> None:
    security = broker.app._security
    await me(broker, ADMIN)
    before, remembered = broker.log._log.wal.counters.gets, len(security._callers)
    began_s = broker.log.clock.boot_s()
    for number in range(200):
        header = bearer(f"guess-{number}")
        assert (await broker.http.get("/topics", headers=header)).status_code == 401
    took_s = broker.log.clock.boot_s() - began_s
    assert len(security._callers) == remembered
    assert broker.log._log.wal.counters.gets - before <= REFRESHES_PER_S * (took_s + 2) * 2


async def test_what_is_remembered_has_bound(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.service.security.authenticator.CALLERS_MAX", 3)
    monkeypatch.setattr("tidelog.service.security.authenticator.DECISIONS_MAX", 3)
    security = broker.app._security
    for number in range(10):
        header = await key_of(broker.log, f"User:u{number}")
        assert await me(broker, header) == f"User:u{number}"
        assert len(security._callers) <= 3
    for number in range(10):
        assert_denied(await broker.http.get(f"/topics/t{number}", headers=header))
    assert all(len(caller._decisions) <= 3 for caller in security._callers.values())


async def test_decision_about_longer_name_than_resource_has_is_not_cached(broker: Broker) -> None:
    header = await key_of(broker.log, "User:alice")
    security = broker.app._security
    for size in (TEXT_BYTES_MAX, TEXT_BYTES_MAX + 1, 60_000):
        assert_denied(await broker.http.get(f"/topics/{'x' * size}", headers=header))
    (caller,) = (
        caller for caller in security._callers.values() if caller.principal == "User:alice"
    )
    assert {len(name) for _, name in caller._decisions} == {TEXT_BYTES_MAX}


async def test_decisions_of_all_callers_have_bound(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 10_000
    monkeypatch.setattr("tidelog.service.security.authenticator.DECISION_BYTES_MAX", bound)
    security = broker.app._security
    for number in range(10):
        header = await key_of(broker.log, f"User:u{number}")
        for topic in range(10):
            name = f"{topic}".rjust(TEXT_BYTES_MAX, "x")
            assert_denied(await broker.http.get(f"/topics/{name}", headers=header))
            names = [
                name for caller in security._callers.values() for *_, name in caller._decisions
            ]
            assert names
            assert sum(map(len, names)) < bound


# -- the console's session


async def login(broker: Broker, secret: str, **headers: str) -> httpx.Response:
    return await broker.http.post("/tidelog/v1/login", json={"key": secret}, headers=headers)


def cookie_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.headers["set-cookie"].partition(";")[0])


async def test_any_broker_accepts_cookie_of_login(broker: Broker, other: Broker) -> None:
    answer = await login(broker, ADMIN_KEY)
    attributes = answer.headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes
    assert "secure" not in attributes.replace("tidelog", "")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["is_super"]
    assert ADMIN_KEY not in answer.text + attributes
    cookie = {"cookie": f"other=1; {cookie_of(answer)}"}
    for receiver in (broker, other):
        assert await me(receiver, cookie) == "User:admin"
        assert (await receiver.http.get("/topics", headers=cookie)).json() == ["t"]


async def test_cookie_over_tls_says_so(broker: Broker) -> None:
    answer = await login(broker, ADMIN_KEY, **{"x-forwarded-proto": "https"})
    assert "; secure" in answer.headers["set-cookie"].lower()


async def test_cookie_alone_changes_nothing(broker: Broker) -> None:
    cookie = {"cookie": cookie_of(await login(broker, ADMIN_KEY))} | JSON_TYPE
    for headers in (cookie, cookie | {"sec-fetch-site": "same-site"}):
        assert_denied(await broker.http.post("/topics/t", content=RECORDS, headers=headers))
    done = await broker.http.post("/topics/t", content=RECORDS, headers=cookie | CONSOLE)
    assert done.status_code == 200
    foreign = cookie | CONSOLE | {"sec-fetch-site": "cross-site"}
    assert_denied(await broker.http.post("/topics/t", content=RECORDS, headers=foreign))


async def test_session_ends_with_its_key_and_when_it_is_forged(broker: Broker) -> None:
    key = await made(broker, principal="User:alice")
    value = cookie_of(await login(broker, key["secret"]))
    assert await me(broker, {"cookie": value}) == "User:alice"
    name, _, session = value.partition("=")
    version, key_id, its_id, expires, mac = session.split(".")
    other = cookie_of(await login(broker, key["secret"])).split(".")[2]
    for forged in (
        f"{name}={version}.admin.{its_id}.{expires}.{mac}",
        f"{name}={version}.{key_id}.{other}.{expires}.{mac}",
        f"{name}={version}.{key_id}..{expires}.{mac}",
        f"{name}={version}.{key_id}.{its_id}.{int(expires) + 1}.{mac}",
        f"{name}={version}.{key_id}.{its_id}.{expires}.{mac[:-1]}",
        f"{name}={version}.{key_id}.{its_id}.{'9' * 400}.{mac}",
        f"{name}=v3.{key_id}.{its_id}.{expires}.{mac}",
        f"{name}=v1.{key_id}.{expires}.{mac}",
        f"{name}=",
        f"{name}=é",
    ):
        headers = [("cookie", forged.encode("latin-1"))]
        assert_unknown(await broker.http.get("/topics", headers=headers))
    await broker.log.access.change(DeleteKey(key["key_id"]))
    answer = await broker.http.get("/topics", headers={"cookie": value} | CONSOLE)
    assert_unknown(answer)
    assert answer.headers["www-authenticate"].startswith("Bearer")  # no dialogue of the browser's


async def test_another_administrators_key_ends_sessions_of_first(store: MemoryStore) -> None:
    async with secured(store) as broker:
        cookie = {"cookie": cookie_of(await login(broker, ADMIN_KEY))}
        assert await me(broker, cookie) == "User:admin"
    async with secured(store, admin_key="b" * 30) as broker:
        assert_unknown(await broker.http.get("/topics", headers=cookie))


async def test_sessions_of_principal_are_bounded(broker: Broker) -> None:
    """The oldest ends; a session that another principal began does not count."""
    alice = await made(broker, principal="User:alice")
    bob = await made(broker, principal="User:bob")
    his = {"cookie": cookie_of(await login(broker, bob["secret"]))}
    hers = [
        {"cookie": cookie_of(await login(broker, alice["secret"]))}
        for _ in range(session_cookie.SESSIONS_MAX + 2)
    ]
    assert len(broker.log.state.access.keys) == 2 + 1 + session_cookie.SESSIONS_MAX
    for number, cookie in enumerate(hers):
        answer = await broker.http.get("/tidelog/v1/me", headers=cookie)
        assert answer.status_code == (401 if number < 2 else 200)
    assert await me(broker, his) == "User:bob"


async def test_parallel_logins_begin_no_more_sessions(broker: Broker) -> None:
    alice = await made(broker, principal="User:alice")
    logins = [login(broker, alice["secret"]) for _ in range(2 * session_cookie.SESSIONS_MAX)]
    cookies = {cookie_of(answer) for answer in await asyncio.gather(*logins)}
    assert len(cookies) == len(logins)
    assert len(broker.log.state.access.keys) == 1 + session_cookie.SESSIONS_MAX


@pytest.mark.parametrize("quota", ["request_rate", "mutation_rate"])
async def test_logins_count_for_rates_of_their_principal(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, quota: str
) -> None:
    alice, bob = [await made(broker, principal=f"User:{name}") for name in ("alice", "bob")]
    await broker.log.access.change(SetQuotas("User:alice", {quota: 1.0}))
    refill_nothing(monkeypatch)
    answers = [await login(broker, alice["secret"]) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert quota in answers[-1].json()["message"]
    cookie_of(await login(broker, bob["secret"]))


async def test_logout_ends_one_session_on_all_brokers(broker: Broker, other: Broker) -> None:
    first = {"cookie": cookie_of(await login(broker, ADMIN_KEY))}
    second = {"cookie": cookie_of(await login(broker, ADMIN_KEY))}
    for receiver in (broker, other):
        assert await me(receiver, first) == "User:admin"
        receiver.http.cookies.clear()
    assert_denied(await broker.http.post("/tidelog/v1/logout", headers=first))
    logout = await broker.http.post("/tidelog/v1/logout", headers=first | CONSOLE)
    assert logout.status_code == 204
    await other.log.refresh()
    for receiver in (broker, other):
        assert_unknown(await receiver.http.get("/topics", headers=first))
        assert await me(receiver, second) == "User:admin"


async def test_logging_in_and_out(broker: Broker) -> None:
    refused = await login(broker, "nonsense")
    assert_unknown(refused)
    assert "set-cookie" not in refused.headers
    out = await broker.http.post("/tidelog/v1/logout")
    assert "max-age=0" in out.headers["set-cookie"].lower()


async def test_only_browsers_are_redirected_to_login(broker: Broker) -> None:
    browser = await broker.http.get("/", headers={"accept": "text/html,*/*"})
    assert (browser.status_code, browser.headers["location"]) == (307, "ui/")
    assert_unknown(await broker.http.get("/"))
    page = await broker.http.get("/ui/index.html")
    assert page.status_code == 200


# -- switched on and off


@pytest.mark.broker(security="off", admin_key="")
async def test_off_is_as_it_always_was(broker: Broker, store: MemoryStore) -> None:
    for header in ({}, {"authorization": "Basic no-base64"}):
        assert (await broker.http.get("/topics", headers=header)).json() == ["t"]
        answer = await broker.http.post("/topics/t", content=RECORDS, headers=JSON_TYPE | header)
        assert answer.status_code == 200
    assert (await broker.http.get("/tidelog/v1/me")).json()["security"] == "off"
    for path in ("keys", "quotas"):
        answer = await broker.http.get(f"/tidelog/v1/{path}")
        assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
    keys = [info.key async for info in store.list("")]
    assert "secret.json" not in keys


async def test_clusters_secret_is_drawn_once(store: MemoryStore) -> None:
    clock = SystemClock()
    secrets = await asyncio.gather(*(cluster_secret(store, clock) for _ in range(5)))
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 32
    await store.delete(["secret.json"])
    assert await cluster_secret(store, clock) != secrets[0]
    await store.delete(["secret.json"])
    await store.create("secret.json", [b'{"format":1,"secret":"00"}'])
    with pytest.raises(StoreUnfit, match=r"secret\.json"):
        await cluster_secret(store, clock)


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({"security": "keys", "admin_key": ADMIN_KEY}, {}, "flags are visible to all users"),
        ({"security": "keys", "admin_key": "@/nowhere"}, {}, "admin_key: cannot read /nowhere"),
        ({"security": "keys"}, {"TIDELOG_ADMIN_KEY": "short"}, "admin_key has 5 characters"),
        ({"security": "keys", "super_users": "alice"}, {}, "super_users: 'alice' does not have"),
        ({"security": "keys", "super_users": "User:*"}, {}, "super_users: 'User:*' does not have"),
        ({"super_users": "User:alice"}, {}, "need security=keys"),
        ({"security": "on"}, {}, "security: 'on' is none of off, keys"),
    ],
)
def test_settings_that_cannot_be(
    flags: dict[str, str], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(BadSettings) as caught:
        load(flags, environment)
    assert words in str(caught.value)
    assert ADMIN_KEY not in str(caught.value)


def test_secret_comes_from_file_or_variable(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"{tmp_path}/key"
    with open(file, "w", encoding="utf-8") as out:
        out.write(f"{ADMIN_KEY}\n")
    os.chmod(file, 0o600)
    on = {"security": "keys", "super_users": "User:alice; User:bob"}
    settings = load(on | {"admin_key": f"@{file}"}, {})
    assert settings.admin_key == ADMIN_KEY
    assert settings.super_user_names == ["User:alice", "User:bob"]
    for text in (ADMIN_KEY, f"@{file}"):
        assert load(on, {"TIDELOG_ADMIN_KEY": text, "TIDELOG_KEY": "x"}).admin_key == ADMIN_KEY
        monkeypatch.setenv("TIDELOG_KEY", text)
        assert client_key() == ADMIN_KEY
