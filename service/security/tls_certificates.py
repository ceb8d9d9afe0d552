"""TLS certificates from files: loaded, checked, and loaded again when the files change.

The broker checks the files by a handshake in memory, with the TLS contexts that connections get. So
an expired certificate, or a certificate that other brokers would refuse, ends the start with an
error. (The broker cannot check which names and CAs its clients accept.) If the files change, the
broker replaces both contexts together; open connections keep the old ones. If changed files cannot
be used, the broker logs and counts the failure, and the old certificate stays in use.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tidelog.service.secret_files import why_exposed, why_not_read
from tidelog.service.settings.tls import TlsSettings
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import Clock

log = logging.getLogger("tidelog.tls")

LOOK_S = 10.0
"""Time between two checks of the files."""
WARN_S = 7 * 24 * 3600
WARN_AGAIN_S = 24 * 3600
EXPIRED, NOT_YET = 10, 9
WRONG_NAMES = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH. EXPIRED and NOT_YET are also
OpenSSL's codes."""


class TlsFiles(NamedTuple):
    """The files of one port. `setting` is the prefix of the names of their settings."""

    setting: str
    cert: str
    key: str
    ca: str = ""
    """For the port for peers: both sides need a certificate that one of these CAs has signed."""
    host: str = ""
    """For the port for peers: the host name or address at which other brokers reach this one."""


class _Loaded(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    ends_s: float


class ServerCertificate:
    """The certificate of one port. Owned by one event loop."""

    def __init__(self, files: TlsFiles, clock: Clock) -> None:
        """Raises LogError if the files cannot be used."""
        self._files = files
        self._clock = clock
        self._seen = _versions(files)
        self._loaded = _load(files)
        self._warned_s = 0.0
        self.failures = 0
        self._warn()

    @property
    def ends_s(self) -> float:
        """Unix time at which the certificate in use expires."""
        return self._loaded.ends_s

    def server(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now."""
        return self._loaded.server

    def client(self) -> ssl.SSLContext:
        """Return the context for a new connection to another broker."""
        return self._loaded.client

    async def look(self) -> None:
        """If the files have changed, load them for connections that begin from now on."""
        versions = await asyncio.to_thread(_versions, self._files)
        if versions != self._seen:
            self._seen = versions  # read before the files, so the next call sees a later change
            try:
                self._loaded = await asyncio.to_thread(_load, self._files)
            except (LogError, OSError) as error:  # OSError: a file was removed after the first read
                self.failures += 1
                log.warning("the old certificate stays in use: %s", error)
            else:
                self._warned_s = 0.0
                log.info("loaded the changed certificate %s", self._files.cert)
        self._warn()

    def _warn(self) -> None:
        now_s = self._clock.now_ms() / 1000
        if self.ends_s - now_s < WARN_S and now_s - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = now_s
            hours = (self.ends_s - now_s) / 3600
            log.warning("the certificate in %s expires in %.0f hours", self._files.cert, hours)


class Certificates(NamedTuple):
    """The certificates of a broker; None where the port has no TLS."""

    clients: ServerCertificate | None
    peers: ServerCertificate | None

    async def watch(self) -> None:
        """Check the files each LOOK_S until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for certificate in self.by_port().values():
                await certificate.look()

    def by_port(self) -> dict[str, ServerCertificate]:
        ports = (("clients", self.clients), ("peers", self.peers))
        return {port: certificate for port, certificate in ports if certificate is not None}


NO_CERTIFICATES = Certificates(None, None)


def certificates(settings: TlsSettings, peer_host: str, clock: Clock) -> Certificates:
    """Return the certificates that the settings name.

    `peer_host` is the host name or address at which other brokers reach this one. Raises LogError.
    """
    clients = peers = None
    own = TlsFiles("tls", settings.tls_cert_file, settings.tls_key_file)
    if own.cert:
        clients = ServerCertificate(own, clock)
    if settings.peer_tls:
        if settings.peer_tls_cert_file:
            own = TlsFiles("peer_tls", settings.peer_tls_cert_file, settings.peer_tls_key_file)
        own = own._replace(ca=settings.tls_ca_file, host=peer_host)
        peers = ServerCertificate(own, clock)
    return Certificates(clients, peers)


def _paths(files: TlsFiles) -> Iterable[tuple[str, str]]:
    yield f"{files.setting}_cert_file", files.cert
    yield f"{files.setting}_key_file", files.key
    if files.ca:
        yield "tls_ca_file", files.ca


def _versions(files: TlsFiles) -> list[tuple[int, ...]]:
    """Return inode, size and times of each file.

    They also change if a link to a file changes (Kubernetes).
    """
    versions: list[tuple[int, ...]] = []
    for _, path in _paths(files):
        try:
            file_stat = os.stat(path)
        except OSError:
            versions.append(())
        else:
            versions.append(
                (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns)
            )
    return versions


def _load(files: TlsFiles) -> _Loaded:
    """Read and check the files. Raises LogError with the names of the setting and of the file."""
    for name, path in _paths(files):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise LogError(f"{name}: cannot read {path}: {why_not_read(error)}") from None
    if why := why_exposed(Path(files.key)):
        raise LogError(f"{files.setting}_key_file: {why}")
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
    _read_pair(server, files)
    if files.ca:
        server.verify_mode = ssl.CERT_REQUIRED
        server.options |= ssl.OP_NO_TICKET  # a ticket would stay valid after its CA is removed
        server.num_tickets = 0
        _read_pair(client, files)
        for context in (server, client):
            _trust(context, "tls_ca_file", files.ca)
    else:  # `client` is for the handshake in memory only: it trusts this certificate
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(client, f"{files.setting}_cert_file", files.cert)
    return _Loaded(server, client, _ends_s(server, client, files))


def _read_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    names = f"{files.setting}_cert_file {files.cert} and {files.setting}_key_file {files.key}"
    try:
        # Without a password argument, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise LogError(f"{names}: the key does not fit the certificate") from None
        raise LogError(
            f"{names}: not PEM files of a certificate and its key, or the key has a password "
            f"({error.reason or error})"
        ) from None


def _trust(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise LogError(f"{name}: not a PEM file of certificates: {path} ({error.reason})") from None


def _ends_s(server: ssl.SSLContext, client: ssl.SSLContext, files: TlsFiles) -> float:
    """Make a handshake in memory. Return the Unix time at which the certificate expires.

    Raises LogError if a side does not accept the certificate.
    """
    name = f"{files.setting}_cert_file: the certificate in {files.cert}"
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    host = files.host or None
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    try:
        for _ in range(10):
            for end in list(waiting):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                waiting.remove(end)
            if not waiting:
                break
    except ssl.SSLCertVerificationError as error:
        match error.verify_code:
            case code if code == EXPIRED:
                why = "has expired: renew it"
            case code if code == NOT_YET:
                why = "is not valid yet: check the clock of this machine"
            case code if code in WRONG_NAMES:
                why = (
                    f"is not valid for {files.host}, where other brokers reach this one: add the "
                    "name to the certificate, or set peer_address"
                )
            case _:
                why = f"is not accepted: {error.verify_message}"
        raise LogError(f"{name} {why}") from None
    except ssl.SSLError as error:
        raise LogError(f"{name} cannot be used: {error.reason or error}") from None
    certificate = ends[0].getpeercert()
    if waiting or not certificate:
        raise LogError(f"{name} cannot be used: the TLS handshake did not end")
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))
