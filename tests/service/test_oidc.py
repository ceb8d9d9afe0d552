"""Tokens of an OIDC issuer: which are accepted, whose keys, and how often the issuer is asked."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from tests.service.issuer import AUDIENCE, FakeIssuer, jwk, key_for, rsa_key, running_issuer
from tests.support.clock import ManualClock
from tidelog.service.security import oidc
from tidelog.service.security.caller import Unauthenticated
from tidelog.service.security.oidc import FETCH_EACH_S, KEPT_S, REFRESH_S, Issuer
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import Unavailable

CLOCK_MS = 1_700_000_000_000
NOW_S = CLOCK_MS // 1000


class Case:
    """A broker's side of the issuer, on a clock that the test holds."""

    def __init__(self, far: FakeIssuer, **more: Any) -> None:
        self.far = far
        self.clock = ManualClock(start_ms=CLOCK_MS)
        self.failures: Counter[str] = Counter()
        settings = Settings(security="keys", **{**far.settings, **more})
        self.issuer = Issuer(settings, self.clock, self.failures)

    def token(self, **more: Any) -> str:
        return self.far.token(**{"now_s": NOW_S, **more})

    async def verify(self, token: str) -> oidc.Token:
        return await self.issuer.verify(token.encode())

    async def fetch(self) -> None:
        """Wait for the fetch that is due."""
        fetching = self.issuer.begin_fetch()
        if fetching is not None:
            await fetching

    async def refusal(self, token: str) -> str:
        with pytest.raises(Unauthenticated) as raised:
            await self.verify(token)
        text = str(raised.value)
        for part in token.split("."):
            assert not part or part not in text
        assert raised.value.headers["WWW-Authenticate"].endswith('error="invalid_token"')
        return text


@pytest.fixture
def far() -> Iterator[FakeIssuer]:
    with running_issuer() as far:
        yield far


@pytest.fixture
def case(far: FakeIssuer) -> Case:
    return Case(far)


async def test_token_proves_its_principal_until_it_expires(case: Case) -> None:
    token = await case.verify(case.token())
    assert token[:2] == ("User:oidc-alice", CLOCK_MS + 600_000)
    assert case.issuer.trusts(token.thumbprint)
    assert case.far.asked == [oidc.DISCOVERY, "/jwks"]


@pytest.mark.parametrize("algorithm", sorted(oidc.ALLOWED))
async def test_each_allowed_algorithm_is_verified(case: Case, algorithm: str) -> None:
    key = key_for(algorithm)
    case.far.keys = [jwk("k", key)]
    token = case.token(algorithm=algorithm, key_id="k")
    assert (await case.verify(token)).principal == "User:oidc-alice"
    head, claims, signature = token.split(".")
    wrong = base64.urlsafe_b64encode(bytes(len(signature) * 3 // 4)).decode().rstrip("=")
    assert "signature is wrong" in await case.refusal(f"{head}.{claims}.{wrong}")


async def test_key_of_jwks_is_for_its_own_algorithm(case: Case) -> None:
    case.far.keys = [jwk("one", rsa_key(), alg="PS256")]
    assert "no such key" in await case.refusal(case.token(algorithm="RS256"))
    assert (await case.verify(case.token(algorithm="PS256"))).principal == "User:oidc-alice"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"iss": "https://other.example"}, "another issuer"),
        ({"iss": None}, "no claim 'iss'"),
        ({"aud": "other"}, "another audience"),
        ({"aud": [AUDIENCE[:-1]]}, "another audience"),
        ({"aud": None}, "no claim 'aud'"),
        ({"exp": None}, "no claim 'exp'"),
        ({"exp": "soon"}, "is not a time"),
        ({"exp": True}, "is not a time"),
        ({"exp": float("nan")}, "is not a time"),
        ({"exp": 1e300}, "is not a time"),
        ({"lives_s": 0}, "has expired"),
        ({"lives_s": -1}, "has expired"),
        ({"nbf": NOW_S + 31}, "not valid yet"),
        ({"sub": None}, "'sub' is missing, empty or not a string"),
        ({"sub": ""}, "'sub' is missing, empty or not a string"),
        ({"sub": "a\nb"}, "not a name that a token may have"),
        ({"sub": "a" * 300}, "not a name that a token may have"),
    ],
)
async def test_token_with_wrong_claims_is_refused(
    case: Case, claims: dict[str, Any], why: str
) -> None:
    assert why in await case.refusal(case.token(**claims))
    assert sum(case.failures.values()) == 1


async def test_audience_may_be_one_of_several_and_nbf_little_ahead(case: Case) -> None:
    token = case.token(aud=["other", AUDIENCE], nbf=NOW_S + 30, iat=NOW_S + 1000)
    assert (await case.verify(token)).principal == "User:oidc-alice"


async def test_no_algorithm_but_those_with_public_keys(case: Case) -> None:
    """`none`, and HS256 with the public key as its secret."""
    public = rsa_key().public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    claims = jwt.decode(case.token(), options={"verify_signature": False})
    forged = [jwt.encode(claims, None, algorithm="none", headers={"kid": "one"})]
    for secret in (pem, json.dumps(case.far.keys[0]).encode()):
        head = _b64({"alg": "HS256", "kid": "one"})
        signing = f"{head}.{_b64(claims)}".encode()
        mac = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
        signed = base64.urlsafe_b64encode(mac.sign(signing, secret)).rstrip(b"=")
        forged.append(f"{signing.decode()}.{signed.decode()}")
    await case.verify(case.token())
    for token in forged:
        assert "its algorithm is not one of ES256, EdDSA, PS256, RS256" in await case.refusal(token)
    for name in ("NONE", "nOnE", ["RS256"], {}, 7, None, "RS512", "ES384"):
        head, rest = _b64({"alg": name, "kid": "one"}), case.token().split(".", 1)[1]
        assert "invalid token" in await case.refusal(f"{head}.{rest}")


def _b64(data: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "token",
    [
        *("..", "aaaa.bbbb.cccc", "é.b.c", "e30.e30."),
        _b64({"alg": "RS256", "kid": 7}) + ".e30.AA",
        _b64({"alg": "RS256", "kid": ["one"]}) + ".e30.AA",
        base64.urlsafe_b64encode(b"[" * 5000).decode() + ".e30.AA",
        base64.urlsafe_b64encode(b"[]").decode() + ".e30.AA",
    ],
)
async def test_text_that_is_no_token_is_refused(case: Case, token: str) -> None:
    assert (await case.refusal(token)).startswith("invalid token: ")
    assert case.failures["token"] == 1


async def test_critical_extension_is_refused(case: Case) -> None:
    """PyJWT below 2.12 ignores it."""
    token = case.token(headers={"crit": ["x"], "x": 1})
    assert "malformed" in await case.refusal(token)


async def test_keys_that_must_not_verify_are_passed_over(case: Case) -> None:
    own = key_for("ES384")
    secret = base64.urlsafe_b64encode(b"s" * 32).decode().rstrip("=")
    private = jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key(5), as_dict=True)
    case.far.keys = [
        jwk("two", rsa_key(), use="enc"),
        {"kty": "oct", "k": secret, "kid": "three"},
        {"kty": "oct", "k": secret, "kid": "three", "alg": "RS256"},
        jwk("four", own),
        jwk("four", own, alg="ES256"),
        {**private, "kid": "five"},
        {"kty": "RSA", "n": "!", "e": "AQAB", "kid": "six"},
        {"kty": ["RSA"]},
        7,
        jwk("one", rsa_key()),
    ]
    await case.verify(case.token())
    assert {key_id for key_id, _ in case.issuer._keys} == {"one"}


async def test_short_rsa_key_verifies_nothing(case: Case) -> None:
    short = rsa_key(9, 1024)
    case.far.keys = [jwk("one", short)]
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = case.token(key=short)
    assert "too short" in await case.refusal(token)


# -- names


@pytest.mark.parametrize(
    ("settings", "claims", "principal"),
    [
        ({"oidc_principal_prefix": ""}, {}, "User:alice"),
        ({"oidc_principal_prefix": "corp#"}, {}, "User:corp#alice"),
        ({"oidc_principal_claim": "https://x/name"}, {"https://x/name": "b"}, "User:oidc-b"),
        ({"oidc_principal_claim": "email"}, {"email": "a@b"}, "User:oidc-a@b"),
        ({}, {"sub": "*"}, "User:oidc-*"),
        ({}, {"sub": "admin"}, "User:oidc-admin"),
    ],
)
async def test_claim_and_prefix_make_principal(
    far: FakeIssuer, settings: dict[str, Any], claims: dict[str, Any], principal: str
) -> None:
    case = Case(far, **settings)
    assert (await case.verify(case.token(**claims))).principal == principal


@pytest.mark.parametrize("name", ["admin", "*"])
async def test_no_token_is_admin_whatever_prefix(far: FakeIssuer, name: str) -> None:
    case = Case(far, oidc_principal_prefix="")
    assert "not a name that a token may have" in await case.refusal(case.token(sub=name))
    part = Case(far, oidc_principal_prefix=name[:1])
    assert "no" in await part.refusal(part.token(sub=name[1:]))


async def test_email_that_is_not_verified_is_no_name(far: FakeIssuer) -> None:
    case = Case(far, oidc_principal_claim="email")
    token = case.token(email="a@b", email_verified=False)
    assert "not verified" in await case.refusal(token)


# -- keys of the issuer


async def test_unknown_key_ids_ask_issuer_once_in_while(case: Case) -> None:
    await case.verify(case.token())
    case.far.asked.clear()
    for second in range(120):
        tokens = [case.token(key_id=f"{second}-{number}") for number in range(2)]
        refusals = await asyncio.gather(*(case.refusal(token) for token in tokens))
        assert set(refusals) == {"invalid token: the issuer has no such key"}
        case.clock.advance(1.0)
    assert case.far.asked.count("/jwks") <= 120 / FETCH_EACH_S


async def test_new_key_is_found_by_its_id(case: Case) -> None:
    first = await case.verify(case.token())
    case.far.keys.append(jwk("two", rsa_key(1)))
    token = case.token(key=rsa_key(1), key_id="two")
    assert "no such key" in await case.refusal(token)  # the issuer was asked just now
    case.clock.advance(FETCH_EACH_S)
    second = await case.verify(token)
    assert first.thumbprint != second.thumbprint
    assert (await case.verify(case.token())).thumbprint == first.thumbprint


@pytest.mark.parametrize(("key_id", "why"), [("two", "no such key"), ("one", "signature is wrong")])
async def test_key_that_issuer_withdraws_or_replaces_verifies_no_more(
    case: Case, key_id: str, why: str
) -> None:
    """Also a token that was verified before: its caller is cached."""
    token = await case.verify(case.token())
    case.far.keys = [jwk(key_id, rsa_key(1))]
    case.clock.advance(REFRESH_S + 1)
    assert case.issuer.trusts(token.thumbprint)  # and fetches
    await case.fetch()
    assert not case.issuer.trusts(token.thumbprint)
    assert why in await case.refusal(case.token())


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (oidc.DISCOVERY, (500, b"", {})),
        (oidc.DISCOVERY, (200, b"[]", {})),
        (oidc.DISCOVERY, (200, b"{}", {})),
        (oidc.DISCOVERY, (200, b"<html>", {})),
        (oidc.DISCOVERY, (200, b"\xff", {})),
        (oidc.DISCOVERY, (200, b"[" * 100_000, {})),
        (oidc.DISCOVERY, (302, b"", {"location": "/other"})),
        ("/jwks", (200, b"{}", {})),
        ("/jwks", (200, b'{"keys":[]}', {})),
        ("/jwks", (200, b'{"keys":7}', {})),
        ("/jwks", (200, b" " * (oidc.JWKS_BYTES_MAX + 1), {})),
        ("/jwks", (307, b"", {"location": "http://127.0.0.1:1/jwks"})),
    ],
)
async def test_failing_issuer_keeps_old_keys_for_while(
    case: Case, path: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    token = await case.verify(case.token())
    case.far.answers[path] = answer
    for _ in range(3):
        case.clock.advance(REFRESH_S + 1)
        await case.fetch()
        assert case.issuer.trusts(token.thumbprint)
    lines = [record.getMessage() for record in caplog.records if record.name == "tidelog"]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"keys of the issuer {case.far.url} cannot be fetched: ")
    case.clock.advance(KEPT_S)
    assert not case.issuer.trusts(token.thumbprint)
    now_s = case.clock.now_ms() // 1000
    await case.fetch()
    with pytest.raises(Unavailable, match="cannot be fetched"):
        await case.verify(case.token(now_s=now_s))
    case.far.answers.clear()
    case.clock.advance(FETCH_EACH_S)
    assert (await case.verify(case.token(now_s=now_s))).principal == "User:oidc-alice"


async def test_keys_of_another_issuer_are_not_taken(case: Case) -> None:
    about = {"issuer": "https://evil.test", "jwks_uri": f"{case.far.url}/jwks"}
    case.far.answers[oidc.DISCOVERY] = (200, json.dumps(about).encode(), {})
    with pytest.raises(Unavailable):
        await case.verify(case.token())
    about = {"issuer": case.far.url, "jwks_uri": "http://keys.example/jwks"}
    case.far.answers[oidc.DISCOVERY] = (200, json.dumps(about).encode(), {})
    case.clock.advance(FETCH_EACH_S)
    with pytest.raises(Unavailable):
        await case.verify(case.token())
    assert "/jwks" not in case.far.asked


async def test_jwks_url_needs_no_discovery(far: FakeIssuer) -> None:
    case = Case(far, oidc_jwks_url=f"{far.url}/jwks")
    await case.verify(case.token())
    assert far.asked == ["/jwks"]


async def test_issuer_that_is_down_is_asked_once_in_while(case: Case) -> None:
    case.far.answers[oidc.DISCOVERY] = (503, b"", {})
    for _ in range(50):
        with pytest.raises(Unavailable, match="cannot be fetched: retry"):
            await case.verify(case.token())
    assert case.far.asked == [oidc.DISCOVERY]


async def test_requests_wait_for_same_fetch_and_may_go_away(case: Case) -> None:
    case.far.may_answer.clear()
    waiting = [asyncio.create_task(case.verify(case.token())) for _ in range(5)]
    assert await asyncio.to_thread(case.far.was_asked.wait, 60)
    waiting[0].cancel()
    case.far.may_answer.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert all(token.principal == "User:oidc-alice" for token in outcomes[1:])
    assert case.far.asked.count("/jwks") == 1


# -- settings


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"oidc_audience": "a"}, "need oidc_issuer"),
        ({"oidc_issuer": "https://a.example"}, "needs oidc_audience"),
        ({"oidc_issuer": "http://a.example", "oidc_audience": "a"}, "oidc_issuer: 'http:"),
        ({"oidc_issuer": "a.example", "oidc_audience": "a"}, "is not an https URL"),
        ({"oidc_issuer": "https://", "oidc_audience": "a"}, "is not an https URL"),
        ({"oidc_issuer": "http://[::1", "oidc_audience": "a"}, "is not an https URL"),
        (
            {"oidc_issuer": "https://a", "oidc_audience": "a", "oidc_jwks_url": "http://a"},
            "oidc_jwks_url",
        ),
        (
            {"oidc_issuer": "https://a", "oidc_audience": "a", "oidc_principal_claim": ""},
            "oidc_principal_claim is empty",
        ),
        (
            {"oidc_issuer": "https://a", "oidc_audience": "a", "oidc_principal_prefix": "\n"},
            "oidc_principal_prefix",
        ),
        (
            {"security": "off", "oidc_issuer": "https://a", "oidc_audience": "a"},
            "needs security=keys",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSettings, match=why):
        Settings(**{"security": "keys", **values})


def test_http_is_for_this_machine_alone() -> None:
    for url in ("http://localhost:1", "http://127.1.2.3/a", "http://[::1]:80", "https://a.b/c"):
        Settings(security="keys", oidc_issuer=url, oidc_audience="a")
