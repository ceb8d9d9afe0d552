"""An OIDC issuer on 127.0.0.1, whose keys a test makes: discovery, JWKS and tokens."""

import functools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "tidelog"
LIVES_S = 600


def rsa_key(number: int = 0, bits: int = 2048) -> rsa.RSAPrivateKey:
    """The key with this number, made once: it takes a tenth of a second."""
    return _rsa_key(number, bits)


@functools.cache
def _rsa_key(_: int, bits: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def key_for(algorithm: str) -> Any:
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "ES384":
        return ec.generate_private_key(ec.SECP384R1())
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa_key()


def jwk(key_id: str, key: Any, **more: Any) -> dict[str, Any]:
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        fields = jwt.algorithms.RSAAlgorithm.to_jwk(public, as_dict=True)
    elif isinstance(public, ec.EllipticCurvePublicKey):
        fields = jwt.algorithms.ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        fields = jwt.algorithms.OKPAlgorithm.to_jwk(public, as_dict=True)
    return {**fields, "kid": key_id, "use": "sig", **more}


class FakeIssuer:
    """The keys of the server, and the paths that it was asked for.

    `answers` has the status, the body and the headers by path, in place of the right answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: list[dict[str, Any]] = [jwk("one", rsa_key())]
        self.asked: list[str] = []
        self.was_asked = threading.Event()
        self.answers: dict[str, tuple[int, bytes, Mapping[str, str]]] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def settings(self) -> dict[str, Any]:
        return {"oidc_issuer": self.url, "oidc_audience": AUDIENCE}

    def answer(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        self.asked.append(path)
        self.was_asked.set()
        if path in self.answers:
            return self.answers[path]
        if path == "/.well-known/openid-configuration":
            document: Any = {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"}
        elif path == "/jwks":
            document = {"keys": self.keys}
        else:
            return 404, b"", {}
        return 200, json.dumps(document).encode(), {}

    def token(
        self,
        *,
        key: Any = None,
        algorithm: str = "RS256",
        key_id: str | None = "one",
        headers: Mapping[str, Any] | None = None,
        now_s: float | None = None,
        lives_s: float = LIVES_S,
        **claims: Any,
    ) -> str:
        """A token of alice. A claim of None is left out."""
        now_s = time.time() if now_s is None else now_s
        all_claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "alice",
            "iat": int(now_s),
            "exp": now_s + lives_s,
            **claims,
        }
        payload = {name: value for name, value in all_claims.items() if value is not None}
        head = {} if key_id is None else {"kid": key_id}
        signer = key_for(algorithm) if key is None else key
        return jwt.encode(payload, signer, algorithm=algorithm, headers={**head, **(headers or {})})


@contextmanager
def running_issuer() -> Iterator[FakeIssuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = issuer.answer(self.path)
            issuer.may_answer.wait(60)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer = FakeIssuer(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield issuer
        finally:
            issuer.may_answer.set()
            server.shutdown()
            thread.join()
