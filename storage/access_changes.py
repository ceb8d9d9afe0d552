"""Changes of who may do what, as requests of the write path.

And if we die here? As with any request (storage.writer), there is the whole change or nothing of
it; a key whose answer was lost has a secret that nobody knows, and is listed to be deleted.
"""

import base64

from storage.access import Key, digest
from storage.clock import Clock
from storage.entry import AccessAction, CreateKey
from storage.hot import Request
from storage.writer import Acks, Writer

SECRET_PREFIX = "tl_"
"""So that scanners of code know a secret that was left there."""
KEY_ID_BYTES = 8


class AccessChanges:
    """A part of the deep interface: `Log.access`. All of it is acks=all."""

    def __init__(self, writer: Writer, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock

    async def create_key(
        self, principal: str, *, expires_ms: int = 0, note: str = ""
    ) -> tuple[Key, str]:
        """A new key and its secret, which nobody is ever told again. Raises InvalidRequest."""
        drawn = self._clock.new_id() + self._clock.new_id()
        secret = SECRET_PREFIX + base64.urlsafe_b64encode(drawn).decode().rstrip("=")
        held = digest(secret.encode())
        key_id = self._clock.new_id()[:KEY_ID_BYTES].hex()
        await self.submit(CreateKey(key_id, principal, held, expires_ms, note))
        made = Key(key_id, principal, held, self._clock.now_ms(), expires_ms, note)
        return self._writer.wal.state.access.keys.get(key_id, made), secret

    async def submit(self, *actions: AccessAction) -> None:
        """All of them or nothing (I4). Raises InvalidRequest, Unavailable, CommitUnknown."""
        for action in actions:
            # Once more here: text that is no UTF-8 must not come as far as an entry's bytes.
            if (refusal := self._writer.wal.state.access.check(action)) is not None:
                raise refusal
        await self._writer.append(Request(self._clock.new_id(), (), 0, actions=actions), Acks.ALL)
