"""API keys, access control lists and quotas: a part of the cluster state.

Pure, changed by `apply` (I4), the same on every broker. A setting of each broker decides whether
the broker enforces access. The state has the SHA-256 of a key's secret, never the secret. A secret
has 32 random bytes, too many to guess. If a change would exceed a bound (I10), `apply` refuses it.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from tidelog.storage.core import acls, format_levels
from tidelog.storage.core.acls import DEFAULT, Acl, Acls
from tidelog.storage.core.actions import (
    AccessAction,
    AnyAction,
    Chunk,
    CreateAcls,
    CreateKey,
    DeleteAcls,
    DeleteKey,
    SetQuotas,
)
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.principal_shares import Need, Shares

KEYS_MAX = 10_000
ACLS_MAX = 20_000
QUOTAS_MAX = 10_000
"""Bound of the principals that have quotas."""
NOTE_BYTES_MAX = 255
ACLS_AT_ONCE_MAX = 5_000
DIGEST_BYTES = 32

PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE = "producer_byte_rate", "consumer_byte_rate"
MUTATION_RATE, REQUEST_RATE = "mutation_rate", "request_rate"
REQUEST_PERCENTAGE = "request_percentage"
BYTE_RATES = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)
"""Kafka's names; values are bytes per second on each broker."""
QUOTAS = (*BYTE_RATES, MUTATION_RATE, REQUEST_RATE, REQUEST_PERCENTAGE, *rules.NAMES)
"""All quotas. MUTATION_RATE and REQUEST_RATE are requests per second on each broker.
REQUEST_PERCENTAGE is CPU time on each broker: 100 is all time of one thread. A quota with the name
of a bound is a share of this bound of the cluster state. Below level 3 only BYTE_RATES exist;
CLIENT_BYTES exists from level 4 on."""
PERCENTAGE_MAX = 100
RATE_MAX = 2**53
"""Every JSON parser reads integers up to this value exactly."""


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """An API key.

    The secret with this digest authenticates `principal`. If `expires_ms` is 0, the key never
    expires.
    """

    key_id: str
    principal: str
    digest: bytes
    created_ms: int
    expires_ms: int = 0
    note: str = ""


Quotas: TypeAlias = dict[str, dict[str, int]]
"""By principal (or DEFAULT): the values by quota name."""


class AccessCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Access in a checkpoint. Keys and ACLs are in the order of their commits."""

    keys: list[Key]
    acls: list[Acl]
    quotas: Quotas


def digest(secret: bytes) -> bytes:
    """Return the SHA-256 of a secret, which the state stores in place of the secret."""
    return hashlib.sha256(secret).digest()


class Access:
    """Keys, ACLs and quotas. Owned by the cluster state; read-only for other modules."""

    def __init__(
        self, checkpoint: AccessCheckpoint | None = None, shares: Shares | None = None
    ) -> None:
        self.version = 0
        """Increases with every change, so that caches of derived data can detect the change."""
        self.keys: dict[str, Key] = {}
        self.acls = Acls()
        self.quotas: Quotas = {}
        self._by_digest: dict[bytes, Key] = {}
        self._shares = shares or Shares()
        if checkpoint is not None:
            for key in checkpoint.keys:
                self._keep(key)
            for acl in checkpoint.acls:
                self.acls.add(acl)
            self.quotas = checkpoint.quotas

    def key_of_digest(self, secret_digest: bytes) -> Key | None:
        return self._by_digest.get(secret_digest)

    def quota(self, name: str, principal: str) -> int | None:
        """Return the principal's quota of this name, else DEFAULT's quota, else None."""
        own = self.quotas.get(principal, {}).get(name)
        return self.quotas.get(DEFAULT, {}).get(name) if own is None else own

    def needs(self, action: AnyAction, _: str, __: Sequence[Chunk]) -> list[Need]:
        """Return what the action adds to the use of a bound by the principal of a new key."""
        if not isinstance(action, CreateKey):
            return []
        return [Need(rules.KEYS, action.principal, 1, KEYS_MAX)]

    def check(
        self, action: AccessAction, level: int = format_levels.NEWEST
    ) -> InvalidRequest | None:
        """Return the reason to refuse the action, or None."""
        match action:
            case CreateKey():
                return self._check_key(action)
            case CreateAcls(new_acls):
                if len(new_acls) > ACLS_AT_ONCE_MAX:
                    return InvalidRequest(
                        f"{len(new_acls)} ACLs at once: {ACLS_AT_ONCE_MAX} at most"
                    )
                new = sum(acl not in self.acls for acl in new_acls)
                if len(self.acls) + new > ACLS_MAX:
                    return InvalidRequest(f"there are {len(self.acls)} ACLs: {ACLS_MAX} at most")
                return next((why for acl in new_acls if (why := acls.check(acl))), None)
            case SetQuotas(principal, rates):
                return self._check_quotas(principal, rates, level)
            case DeleteKey() | DeleteAcls():
                return None

    def do(self, action: AccessAction, now_ms: int) -> None:
        """Apply the action, after `check`."""
        self.version += 1
        match action:
            case CreateKey(key_id, principal, secret_digest, expires_ms, note):
                self._keep(Key(key_id, principal, secret_digest, now_ms, expires_ms, note))
            case DeleteKey(key_id):
                key = self.keys.pop(key_id, None)
                if key is not None:
                    self._by_digest.pop(key.digest, None)
                    self._shares.add(rules.KEYS, key.principal, -1)
            case CreateAcls(new_acls):
                for acl in new_acls:
                    self.acls.add(acl)
            case DeleteAcls(unwanted):
                for acl in unwanted:
                    self.acls.remove(acl)
            case SetQuotas(principal, rates):
                new_rates = {**self.quotas.get(principal, {}), **rates}
                self._set(principal, {name: rate for name, rate in new_rates.items() if rate})

    def kept(self) -> AccessCheckpoint | None:
        """Return access as part of a checkpoint, or None if there is nothing to store."""
        if not (self.keys or self.acls or self.quotas):
            return None
        return AccessCheckpoint(list(self.keys.values()), list(self.acls), self.quotas)

    def _keep(self, key: Key) -> None:
        old_key = self.keys.get(key.key_id)
        if old_key is not None:  # an earlier action of the same commit created it
            self._by_digest.pop(old_key.digest, None)
            self._shares.add(rules.KEYS, old_key.principal, -1)
        self.keys[key.key_id] = key
        self._by_digest[key.digest] = key
        self._shares.add(rules.KEYS, key.principal, 1)

    def _set(self, principal: str, rates: dict[str, int]) -> None:
        if rates:
            self.quotas[principal] = rates
        else:
            self.quotas.pop(principal, None)

    def _check_key(self, action: CreateKey) -> InvalidRequest | None:
        if len(self.keys) >= KEYS_MAX:
            return InvalidRequest(f"there are {len(self.keys)} keys: {KEYS_MAX} at most")
        if action.key_id in self.keys or action.digest in self._by_digest:
            return InvalidRequest(f"key {action.key_id!r} exists")
        if not 1 <= len(action.key_id.encode()) <= NOTE_BYTES_MAX:
            return InvalidRequest("the key's id is empty or too long")
        if len(action.digest) != DIGEST_BYTES:
            return InvalidRequest(f"a key's digest must have {DIGEST_BYTES} bytes")
        if not action.note.isprintable() or len(action.note.encode()) > NOTE_BYTES_MAX:
            return InvalidRequest(f"a key's note has {NOTE_BYTES_MAX} printable bytes at most")
        if not 0 <= action.expires_ms <= RATE_MAX:
            return InvalidRequest(f"a key cannot expire at {action.expires_ms} ms")
        if action.principal == acls.EVERYBODY:
            return InvalidRequest("User:* stands for all principals: a key needs one principal")
        return acls.check_principal(action.principal)

    def _check_quotas(
        self, principal: str, rates: dict[str, int | None], level: int
    ) -> InvalidRequest | None:
        names = [name for name in QUOTAS if _level_of(name) <= level]
        for name, rate in rates.items():
            if name not in names:
                advice = ""
                if name in QUOTAS:
                    needed = _level_of(name)
                    advice = f": it needs level {needed} of the format, see `tidelog upgrade`"
                return InvalidRequest(f"quota {name[:99]!r} is none of {', '.join(names)}{advice}")
            most = PERCENTAGE_MAX if name == REQUEST_PERCENTAGE else RATE_MAX
            if rate is not None and not 1 <= rate <= most:
                unit = " bytes per second" if name in BYTE_RATES else ""
                return InvalidRequest(f"{name} is 1 to {most}{unit}, not {rate}")
        if principal not in self.quotas and len(self.quotas) >= QUOTAS_MAX:
            return InvalidRequest(f"{len(self.quotas)} principals have quotas: no more are allowed")
        return None if principal == DEFAULT else acls.check_principal(principal)


def _level_of(quota: str) -> int:
    """Return the level of the format from which the quota exists."""
    if quota in BYTE_RATES:
        return format_levels.FIRST
    return format_levels.KAFKA if quota == rules.CLIENT_BYTES else rules.LEVEL


TopicFilter: TypeAlias = Callable[[Access, str, str], bool]
"""A function of (access, principal, topic): whether the principal may describe the topic."""


def all_topics(access: Access, principal: str, topic: str) -> bool:
    """Return True: without security, all principals may describe all topics."""
    return True
