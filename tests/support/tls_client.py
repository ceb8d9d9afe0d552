"""A client of TLS 1.3 that sends what Python's ssl cannot: KeyUpdates, and records of any size.

Python's ssl does the handshake; then this module seals the records, with the secret of the client.
"""

import contextlib
import hashlib
import hmac
import ssl
import struct
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DATA, HANDSHAKE = 23, 22
KEY_UPDATE = b"\x18\x00\x00\x01\x00"
HASH_BYTES = 48
"""Of SHA-384, the hash of the cipher suite that OpenSSL prefers."""


def client_context() -> ssl.SSLContext:
    """Return a context that trusts any broker."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsClient:
    """One connection, without a socket."""

    def __init__(self) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._context = client_context()
        self._folder = tempfile.TemporaryDirectory(prefix="tidelog-tls-")
        self._file = Path(self._folder.name) / "keys"
        self._context.keylog_filename = str(self._file)
        self._tls = self._context.wrap_bio(self._incoming, self._outgoing)
        self._secret = b""
        self._sealed = 0

    def close(self) -> None:
        """Give up a handshake that is not done."""
        self._folder.cleanup()

    @property
    def is_open(self) -> bool:
        return bool(self._secret)

    def handshake(self, received: bytes = b"") -> bytes:
        """Return the bytes to send: the ClientHello first, then the answer to `received`."""
        self._incoming.write(received)
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            assert (self._tls.cipher() or ("",))[0] == "TLS_AES_256_GCM_SHA384"
            lines = self._file.read_text().splitlines()
            (line,) = [line for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0")]
            self._secret = bytes.fromhex(line.split()[2])
            self._folder.cleanup()
        return self._outgoing.read()

    def data(self, content: bytes) -> bytes:
        """Return a record with data."""
        return self._record(content, DATA)

    def key_updates(self, count: int) -> bytes:
        """Return KeyUpdates, which ask for no answer."""
        return b"".join(self._key_update() for _ in range(count))

    def _key_update(self) -> bytes:
        sealed = self._record(KEY_UPDATE, HANDSHAKE)
        self._secret = self._derived(b"traffic upd", HASH_BYTES)
        self._sealed = 0
        return sealed

    def _record(self, content: bytes, kind: int) -> bytes:
        key, vector = self._derived(b"key", 32), self._derived(b"iv", 12)
        nonce = int.from_bytes(vector, "big") ^ self._sealed
        self._sealed += 1
        head = struct.pack(">BHH", DATA, 0x0303, len(content) + 1 + 16)
        return head + AESGCM(key).encrypt(nonce.to_bytes(12, "big"), content + bytes([kind]), head)

    def _derived(self, label: bytes, size: int) -> bytes:
        """HKDF-Expand-Label (RFC 8446, 7.1) of the secret, with one block."""
        name = b"tls13 " + label
        info = struct.pack(">HB", size, len(name)) + name + b"\x00\x01"
        return hmac.new(self._secret, info, hashlib.sha384).digest()[:size]
