"""The outcome of a delivery: whether the member has received the last response with records.

A response is sent, and then it has arrived or is lost. Until this is decided, its records are
neither committed nor passed over: the member's next read, commit or departure decides. If the
member names the last read that it has, this decides, else the caller's `AnswerArrival`. Without a
proof, the records are read again, because they may not be passed over. So delivery is at least
once.

A member that commits an offset has the records before it, of this partition and in whichever
response (Rejected: the whole response has arrived then. The member may know the offset from an
earlier response, or from another coordinator).

**On a crash** of the coordinator: an undecided response is not committed, so its records are read
again.
"""

import asyncio
import logging

from tidelog.storage.groups.rest_members import Instance

log = logging.getLogger("tidelog.groups")

SENDING_S = 10.0
"""Longest wait of a request until the previous response is sent or lost (I10). Brokers confirm
an arrival to each other in less time (service/peers/forwarding.py)."""


async def until_sent(instance: Instance) -> None:
    """Wait for a response under way. A response whose client reads is soon sent or lost."""
    if instance.sending is not None:
        await asyncio.wait([instance.sending], timeout=SENDING_S)


async def decide(instance: Instance, read_id: str | None = None) -> None:
    """Mark the records of the last response as delivered, or return to the first of them.

    `read_id` is the last read whose response the member has, None if the member does not say.
    """
    sent, positions = instance.sent, instance.positions
    if sent is None or not positions.has_undelivered:
        has_arrived = True
    elif read_id is not None:
        has_arrived = read_id == sent.read_id
    else:
        has_arrived = sent.arrival is None or await sent.arrival.has_arrived()
    if instance.sent is not sent:
        return  # another request of the member has decided
    instance.sent = None
    if has_arrived or sent is None:
        positions.acknowledge()
    else:
        log.info("a response with %d records was lost: they are read again", sent.records)
        positions.rewind()


async def acknowledge(instance: Instance) -> None:
    """Decide about the last response, after a short wait for a response under way."""
    await until_sent(instance)
    await decide(instance)
