"""Operations on access: ACLs, keys and quotas.

Each change adds a line about it to the audit log and to the log of access.
"""

import hashlib

import msgspec

from tidelog.service.operations.change_request import Change, begin
from tidelog.service.operations.rights import ALTER_ACCESS, ALTER_DEFAULTS, DESCRIBE_CLUSTER
from tidelog.service.security.audit import note
from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import sliced
from tidelog.storage.access_changes import KEY_ID_BYTES
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import Acl, AclFilter
from tidelog.storage.core.actions import CreateAcls, DeleteAcls, DeleteKey, SetQuotas
from tidelog.storage.core.errors import IdempotencyMismatch
from tidelog.storage.state.access import Key

REPEAT_MS_MAX = 600_000
"""A later creation with the same Idempotency-Key is no repetition, and the broker refuses it."""


class AccessOperations:
    """Stateless."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    # -- ACLs

    async def acls(self, rights: CallerRights, acl_filter: AclFilter) -> list[Acl]:
        """Return the ACLs that match a filter. Raises Forbidden."""
        await rights.check(DESCRIBE_CLUSTER)
        await self._broker.refresh()
        return await self._matching(acl_filter)

    async def create_acls(self, change: Change, acls: list[Acl]) -> None:
        """Create ACLs, all or none.

        Raises Forbidden, QuotaExceeded, InvalidRequest, and the errors of a commit.
        """
        await begin(self._broker, change, ALTER_ACCESS)
        await change.commit("ACLs", self._broker.access.change(CreateAcls(acls)))
        await _note_acls(change.rights, "added", acls)

    async def delete_acls(self, change: Change, acl_filter: AclFilter) -> list[Acl]:
        """Delete the ACLs that match a filter, and return them.

        Raises Forbidden, QuotaExceeded, and the errors of a commit.
        """
        await begin(self._broker, change, ALTER_ACCESS)
        acls = await self._matching(acl_filter)
        if acls:
            await change.commit("ACLs", self._broker.access.change(DeleteAcls(acls)))
            await _note_acls(change.rights, "removed", acls)
        return acls

    async def _matching(self, acl_filter: AclFilter) -> list[Acl]:
        acls = list(self._broker.state.access.acls)
        return [acl async for acl in sliced(acls) if acl_filter.matches(acl)]

    # -- keys

    async def create_key(
        self, change: Change, principal: str, ttl_s: int | None, text: str, repeat_key: str | None
    ) -> tuple[Key, str]:
        """Create a key of a principal; return it with its secret.

        `text` is its note. A request with the same `repeat_key` within REPEAT_MS_MAX replaces the
        key of the first one. Raises Forbidden, QuotaExceeded, InvalidRequest, IdempotencyMismatch,
        and the errors of a commit.
        """
        await begin(self._broker, change, ALTER_ACCESS)
        rights, now_ms = change.rights, self._broker.clock.now_ms()
        expires_ms = 0 if ttl_s is None else now_ms + ttl_s * 1000
        key_id = ""
        if repeat_key is not None:
            named = f"{rights.principal}\0{repeat_key}".encode()
            key_id = hashlib.sha256(named).hexdigest()[: 2 * KEY_ID_BYTES]
            if (old_key := self._broker.state.access.keys.get(key_id)) is not None:
                content = principal, text, bool(expires_ms)
                _check_repetition(old_key, content, now_ms)
                # If the process ends after this commit, the next repetition creates the key.
                await change.commit(key_id, self._broker.access.change(DeleteKey(key_id)))
                note("%s replaces key %s of %s", rights.principal, key_id, old_key.principal)
        creation = self._broker.access.create_key(
            principal, expires_ms=expires_ms, note=text, key_id=key_id
        )
        key, secret = await change.commit(f"a key of {principal}", creation)
        note("%s created key %s of %s", rights.principal, key.key_id, key.principal)
        return key, secret

    async def delete_key(self, change: Change, key_id: str) -> Key | None:
        """Delete a key and its sessions.

        Return the key, or None if there is no such key. Raises Forbidden, QuotaExceeded, and the
        errors of a commit.
        """
        await begin(self._broker, change, ALTER_ACCESS)
        key = self._broker.state.access.keys.get(key_id)
        if key is not None:
            await change.commit(key_id, self._broker.access.change(DeleteKey(key_id)))
            note("%s deleted key %s of %s", change.rights.principal, key_id, key.principal)
        return key

    # -- quotas

    async def set_quotas(
        self, change: Change, principal: str, quotas: dict[str, int | None]
    ) -> dict[str, int]:
        """Set quotas of a principal, None to remove one.

        Return its quotas. Raises Forbidden, QuotaExceeded, InvalidRequest, and the errors of a
        commit.
        """
        await begin(self._broker, change, ALTER_DEFAULTS)
        await change.commit(principal, self._broker.access.change(SetQuotas(principal, quotas)))
        note("%s set quotas of %s: %s", change.rights.principal, principal, quotas)
        return self._broker.state.access.quotas.get(principal, {})

    async def delete_quotas(self, change: Change, principal: str) -> bool:
        """Remove the quotas of a principal.

        Return whether it had any. Raises Forbidden, QuotaExceeded, and the errors of a commit.
        """
        await begin(self._broker, change, ALTER_DEFAULTS)
        quotas = self._broker.state.access.quotas.get(principal)
        if quotas is None:
            return False
        removal = SetQuotas(principal, dict.fromkeys(quotas))
        await change.commit(principal, self._broker.access.change(removal))
        note("%s removed the quotas of %s", change.rights.principal, principal)
        return True


async def _note_acls(rights: CallerRights, verb: str, acls: list[Acl]) -> None:
    async for acl in sliced(acls):
        note("%s %s ACL %s", rights.principal, verb, " ".join(msgspec.structs.astuple(acl)))


def _check_repetition(old_key: Key, content: tuple[str, str, bool], now_ms: int) -> None:
    """Raise IdempotencyMismatch unless a request repeats the one that created the key.

    Its `content` is its principal, its note, and whether it has an expiry.
    """
    if (old_key.principal, old_key.note, bool(old_key.expires_ms)) != content:
        raise IdempotencyMismatch(
            f"the Idempotency-Key was used for key {old_key.key_id} of {old_key.principal} with "
            "other content: use a new Idempotency-Key"
        )
    if now_ms - old_key.created_ms > REPEAT_MS_MAX:
        raise IdempotencyMismatch(
            f"the Idempotency-Key was used for key {old_key.key_id} more than "
            f"{REPEAT_MS_MAX // 60_000} minutes ago: use a new Idempotency-Key"
        )
