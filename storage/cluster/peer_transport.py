"""The way of messages to other brokers, which `service.peers` and the simulator implement."""

from typing import Protocol

from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import ForwardRefused
from tidelog.storage.core.model import Part


class PeerTransport(Protocol):
    """Sender of messages to brokers. The methods raise LogError if a peer cannot be reached."""

    async def forward(self, peer: Member, message: bytes) -> bytes:
        """Forward a draft; return the response.

        Raises ForwardRefused if the peer certainly did not take the draft, ForwardOutcomeUnknown if
        the peer may have taken it.
        """

    async def announce(self, peer: Member, message: bytes) -> bytes:
        """Send announcements of committed entries, or a beat; return the answer to a beat.

        The answer is empty if there was no beat, and from a broker of a version that has no beats.
        """

    async def read_object(self, peer: Member, message: bytes) -> Part:
        """Ask for bytes of an object (`ObjectRange`); return them."""


class _NoPeers:
    """The transport of a broker without peers."""

    async def forward(self, peer: Member, message: bytes) -> bytes:
        raise ForwardRefused("this broker has no peers")

    async def announce(self, peer: Member, message: bytes) -> bytes:
        raise ForwardRefused("this broker has no peers")

    async def read_object(self, peer: Member, message: bytes) -> Part:
        raise ForwardRefused("this broker has no peers")


NO_PEERS: PeerTransport = _NoPeers()
