"""The brokers that are attacked: one without security, and one with principals."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.broker import Broker
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.tls_client import client_context
from tests.tools.attack.measure import VICTIM
from tests.tools.attack.probes import NEIGHBOUR, TYPE

BIG = "big"
RSA_BITS = 2048
ADMIN_KEY = "an-administrators-key-of-many-characters"


class Principal(NamedTuple):
    """A user of a secured broker, and the secret of its key."""

    user: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}


class AttackedBroker(Broker):
    """A broker of the checkout `tree`; None is this checkout."""

    def __init__(self, folder: Path, tree: Path | None = None, **settings: Any) -> None:
        super().__init__(folder, is_fresh=True, kafka_port=free_port(), **settings)
        self.tree = tree

    @property
    def program(self) -> Sequence[str]:
        if self.tree is None:
            return super().program
        return (str(self.tree / ".venv/bin/tidelog"),)

    @property
    def neighbour(self) -> Principal | None:
        """The principal of the neighbour's requests; None without security."""
        return None

    def asked(self, method: str, path: str, **keywords: Any) -> httpx.Response:
        """Send a request with all rights. Raises for an answer above 400."""
        url = f"{self.base_url}{path}"
        answer = httpx.request(method, url, timeout=60, verify=client_context(), **keywords)
        return answer.raise_for_status()

    @cached_property
    def cluster_path(self) -> str:
        """The path of the cluster in the v3 dialect."""
        (cluster,) = self.asked("GET", "/v3/clusters").json()["data"]
        return f"/v3/clusters/{cluster['cluster_id']}"

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        named = {key.replace("_", "."): value for key, value in configs.items()}
        body = {"topic_name": name, "partitions_count": partitions, "configs": named}
        self.asked("POST", "/admin/topics", json=body)

    def prepare(self) -> None:
        """Make the topics of the attacks and of the neighbour."""
        for topic in (VICTIM, BIG, NEIGHBOUR):
            self.create_topic(topic)
        body = '{"records":[{"value":"%s"}]}' % ("x" * (1 << 19))
        for _ in range(4):
            self.asked("POST", f"/topics/{BIG}", content=body, headers=TYPE)
        small_body = b'{"records":[{"value":1}]}'
        self.asked("POST", f"/topics/{NEIGHBOUR}", content=small_body, headers=TYPE)


class SecuredBroker(AttackedBroker):
    """A broker with `security=keys`. The neighbour may write and read its own topic alone."""

    def __init__(self, folder: Path, tree: Path | None = None, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "admin.key"
        file.touch(mode=0o600)
        file.write_text(ADMIN_KEY)
        secured = {"security": "keys", "admin_key": f"@{file}", **settings}
        super().__init__(folder, tree, **secured)
        self._principals: dict[str, Principal] = {}

    @property
    def neighbour(self) -> Principal:
        return self.principal(NEIGHBOUR)

    def asked(self, method: str, path: str, **keywords: Any) -> httpx.Response:
        headers = Principal("admin", ADMIN_KEY).headers | keywords.pop("headers", {})
        return super().asked(method, path, headers=headers, **keywords)

    def principal(self, user: str) -> Principal:
        """Return the principal, which has no right until `allow`."""
        if user not in self._principals:
            body = {"principal": f"User:{user}"}
            key = self.asked("POST", "/tidelog/v1/keys", json=body).json()
            self._principals[user] = Principal(user, key["secret"])
        return self._principals[user]

    def allow(
        self, user: str, operation: str, kind: str, name: str, pattern: str = "LITERAL"
    ) -> None:
        """Give a right on a resource, for example WRITE on a TOPIC."""
        rule = {
            "resource_type": kind,
            "resource_name": name,
            "pattern_type": pattern,
            "principal": f"User:{user}",
            "host": "*",
            "operation": operation,
            "permission": "ALLOW",
        }
        self.asked("POST", f"{self.cluster_path}/acls", json=rule)

    def prepare(self) -> None:
        super().prepare()
        self.principal(NEIGHBOUR)
        for operation in ("READ", "WRITE"):
            self.allow(NEIGHBOUR, operation, "TOPIC", NEIGHBOUR)


class TlsBroker(AttackedBroker):
    """A broker whose ports have TLS, with an RSA key, which costs more than others."""

    def __init__(self, folder: Path, tree: Path | None = None, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pair = Authority(folder).pair("broker", rsa_bits=RSA_BITS)
        super().__init__(folder, tree, tls_cert_file=pair.cert, tls_key_file=pair.key, **settings)

    @property
    def ports(self) -> dict[str, int]:
        return {"http": self.port, "kafka": int(str(self.settings["kafka_port"]))}


@contextmanager
def fresh_broker(
    folder: Path, tree: Path | None, kind: type[AttackedBroker] = AttackedBroker
) -> Iterator[AttackedBroker]:
    """Start a broker of this kind, with its topics."""
    broker = kind(folder, tree)
    broker.start()
    try:
        broker.prepare()
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)
