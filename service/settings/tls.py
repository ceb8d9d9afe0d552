"""Settings of the certificates for clients and between brokers."""

import dataclasses
from collections.abc import Iterator

from tidelog.service.settings.fields import setting
from tidelog.service.settings.listeners import ListenerSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings(ListenerSettings):
    """The files of certificates, keys and CAs."""

    tls_cert_file: str = setting(
        "PEM file with the certificate of the port for clients, followed by the certificates of its chain. If it is set, the port serves only https. A broker loads a changed file without a restart"
    )
    tls_key_file: str = setting(
        "PEM file with the key of `tls_cert_file`, without a password; other users must not be able to read the file"
    )
    peer_tls: bool = setting(
        "use TLS between brokers, which verify each other's certificates with `tls_ca_file`. Set `peer_tls` for all brokers or for none",
        default=False,
    )
    tls_ca_file: str = setting(
        "PEM file with the CAs that sign the certificates of brokers; needs `peer_tls`"
    )
    peer_tls_cert_file: str = setting(
        "PEM file with the certificate that this broker presents to other brokers, as a server and as a client; it must be valid for the host of `peer_address`. If it is empty, the broker presents `tls_cert_file`"
    )
    peer_tls_key_file: str = setting("PEM file with the key of `peer_tls_cert_file`")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, cert, key in (
            ("tls", self.tls_cert_file, self.tls_key_file),
            ("peer_tls", self.peer_tls_cert_file, self.peer_tls_key_file),
        ):
            if bool(cert) != bool(key):
                yield f"{name}_cert_file and {name}_key_file: give both or neither"
        if self.peer_tls:
            yield from self._problems_of_peer_tls()
        elif self.tls_ca_file or self.peer_tls_cert_file:
            yield "tls_ca_file and peer_tls_cert_file need peer_tls: set peer_tls, or remove both"

    def _problems_of_peer_tls(self) -> Iterator[str]:
        if not self.tls_ca_file:
            yield "peer_tls needs tls_ca_file, with which brokers verify each other"
        if not (self.peer_tls_cert_file or self.tls_cert_file):
            yield "peer_tls needs peer_tls_cert_file or tls_cert_file"
        if self.peer_address and not self.peer_address.startswith("https://"):
            yield f"peer_address: {self.peer_address!r} is not https://, but peer_tls is on"
