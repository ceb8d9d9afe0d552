"""Who may do what, as a part of the cluster state: keys, access control lists, quotas.

Pure, folded by `apply` (I4), and the same on every broker; whether any of it is asked is each
broker's setting. A key's secret is never here: its SHA-256 is, of 32 random bytes, which nobody
finds by trying. At the bounds (I10) the change is refused.
"""

import hashlib
from typing import TypeAlias

import msgspec

from storage import acls
from storage.acls import Acl, Acls
from storage.entry import AccessAction, CreateAcls, CreateKey, DeleteAcls, DeleteKey, SetQuotas
from storage.errors import InvalidRequest

KEYS_MAX = 10_000
ACLS_MAX = 20_000
QUOTAS_MAX = 10_000
"""Principals with quotas of their own."""
NOTE_BYTES_MAX = 255
ACLS_AT_ONCE_MAX = 5_000
DIGEST_BYTES = 32

PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE = "producer_byte_rate", "consumer_byte_rate"
QUOTAS = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)
"""Kafka's names; bytes a second of each broker."""
DEFAULT = "<default>"
"""Whoever has no quota of that name."""
RATE_MAX = 2**53
"""What any JSON reader takes for the same number."""


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whoever shows the secret with this digest is the principal. `expires_ms` 0 is never."""

    key_id: str
    principal: str
    digest: bytes
    created_ms: int
    expires_ms: int = 0
    note: str = ""


Quotas: TypeAlias = dict[str, dict[str, int]]
"""Rates by name, by principal or DEFAULT."""


class KeptAccess(msgspec.Struct, array_like=True):
    """All of it as checkpoints carry it: keys and bindings in the order in which they came."""

    keys: list[Key]
    acls: list[Acl]
    quotas: Quotas


def digest(secret: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret).digest()


class Access:
    """Part of the cluster state, owned by it: others look."""

    def __init__(self, kept: KeptAccess | None = None) -> None:
        self.version = 0
        """Grows with every change: whoever derives something from this looks at it."""
        self.keys: dict[str, Key] = {}
        self.acls = Acls()
        self.quotas: Quotas = {}
        self._by_digest: dict[bytes, Key] = {}
        if kept is not None:
            for key in kept.keys:
                self._keep(key)
            for acl in kept.acls:
                self.acls.add(acl)
            self.quotas = kept.quotas

    def key_of_digest(self, held: bytes) -> Key | None:
        return self._by_digest.get(held)

    def quota(self, name: str, principal: str) -> int | None:
        """The principal's rate; None is no bound."""
        own = self.quotas.get(principal, {}).get(name)
        return self.quotas.get(DEFAULT, {}).get(name) if own is None else own

    def check(self, action: AccessAction) -> InvalidRequest | None:
        """Why it cannot be done."""
        match action:
            case CreateKey():
                return self._check_key(action)
            case CreateAcls(wanted):
                if len(wanted) > ACLS_AT_ONCE_MAX:
                    return InvalidRequest(f"{len(wanted)} ACLs at once: {ACLS_AT_ONCE_MAX} at most")
                new = sum(acl not in self.acls for acl in wanted)
                if len(self.acls) + new > ACLS_MAX:
                    return InvalidRequest(
                        f"there are {len(self.acls)} ACLs, and {ACLS_MAX} at most"
                    )
                return next((why for acl in wanted if (why := acls.check(acl))), None)
            case SetQuotas(principal, rates):
                return self._check_quotas(principal, rates)
            case DeleteKey() | DeleteAcls():
                return None

    def do(self, action: AccessAction, now_ms: int) -> None:
        """Checked before."""
        self.version += 1
        match action:
            case CreateKey(key_id, principal, held, expires_ms, note):
                self._keep(Key(key_id, principal, held, now_ms, expires_ms, note))
            case DeleteKey(key_id):
                gone = self.keys.pop(key_id, None)
                if gone is not None:
                    del self._by_digest[gone.digest]
            case CreateAcls(wanted):
                for acl in wanted:
                    self.acls.add(acl)
            case DeleteAcls(unwanted):
                for acl in unwanted:
                    self.acls.remove(acl)
            case SetQuotas(principal, rates):
                after = {**self.quotas.get(principal, {}), **rates}
                self._set(principal, {name: rate for name, rate in after.items() if rate})

    def kept(self) -> KeptAccess | None:
        """All of it; None when there is nothing."""
        if not (self.keys or self.acls or self.quotas):
            return None
        return KeptAccess(list(self.keys.values()), list(self.acls), self.quotas)

    def _keep(self, key: Key) -> None:
        self.keys[key.key_id] = key
        self._by_digest[key.digest] = key

    def _set(self, principal: str, rates: dict[str, int]) -> None:
        if rates:
            self.quotas[principal] = rates
        else:
            self.quotas.pop(principal, None)

    def _check_key(self, action: CreateKey) -> InvalidRequest | None:
        if len(self.keys) >= KEYS_MAX:
            return InvalidRequest(f"there are {len(self.keys)} keys, and {KEYS_MAX} at most")
        if action.key_id in self.keys or action.digest in self._by_digest:
            return InvalidRequest(f"key {action.key_id!r} exists")
        if not 1 <= len(action.key_id.encode()) <= NOTE_BYTES_MAX:
            return InvalidRequest("a key has an id")
        if len(action.digest) != DIGEST_BYTES:
            return InvalidRequest(f"a key's digest has {DIGEST_BYTES} bytes")
        if not action.note.isprintable() or len(action.note.encode()) > NOTE_BYTES_MAX:
            return InvalidRequest(f"a key's note has {NOTE_BYTES_MAX} printable bytes at most")
        if not 0 <= action.expires_ms <= RATE_MAX:
            return InvalidRequest(f"a key cannot expire at {action.expires_ms} ms")
        if action.principal == acls.EVERYBODY:
            return InvalidRequest("a key is somebody's: User:* is everybody")
        return acls.check_principal(action.principal)

    def _check_quotas(self, principal: str, rates: dict[str, int | None]) -> InvalidRequest | None:
        for name, rate in rates.items():
            if name not in QUOTAS:
                return InvalidRequest(f"quota {name[:99]!r} is none of {', '.join(QUOTAS)}")
            if rate is not None and not 1 <= rate <= RATE_MAX:
                return InvalidRequest(f"{name} is 1 to {RATE_MAX} bytes a second, not {rate}")
        if principal not in self.quotas and len(self.quotas) >= QUOTAS_MAX:
            return InvalidRequest(f"{len(self.quotas)} principals have quotas: no more can")
        return None if principal == DEFAULT else acls.check_principal(principal)
