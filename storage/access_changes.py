"""Changes of a cluster's access: API keys, sessions, ACLs and quotas."""

import base64

from tidelog.storage.core.actions import AccessAction, CreateKey
from tidelog.storage.log_engine import Log
from tidelog.storage.state.access import Key, digest

SECRET_PREFIX = "tl_"
"""Lets secret scanners recognise a leaked key."""
KEY_ID_BYTES = 8


class ClusterAccess:
    """The keys and permissions of a cluster. A view has them as `state.access`."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def create_key(
        self, principal: str, *, expires_ms: int = 0, note: str = "", key_id: str = ""
    ) -> tuple[Key, str]:
        """Create an API key.

        Return it with its secret, which is not stored. Raises the errors of `change`.
        """
        clock = self._log.clock
        drawn = clock.new_id() + clock.new_id()
        secret = SECRET_PREFIX + base64.urlsafe_b64encode(drawn).decode().rstrip("=")
        secret_digest = digest(secret.encode())
        key_id = key_id or clock.new_id()[:KEY_ID_BYTES].hex()
        await self.change(CreateKey(key_id, principal, secret_digest, expires_ms, note))
        created = Key(key_id, principal, secret_digest, clock.now_ms(), expires_ms, note)
        return self._log.state.access.keys.get(key_id, created), secret

    async def change(self, *actions: AccessAction) -> None:
        """Apply all actions or none (I4). Raises InvalidRequest, Unavailable, CommitUnknown."""
        for action in actions:
            # Check here too: text that is not valid UTF-8 must not get into an entry.
            if (refusal := self._log.state.access.check(action)) is not None:
                raise refusal
        await self._log.submit(*actions)
