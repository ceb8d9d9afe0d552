"""The senders of announcements end with their broker."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tidelog.storage.cluster.announcer import Announcer
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import EntryAnnouncement
from tidelog.storage.runtime.clock import SystemClock

PEER = Member("p", "peer", "http://peer", "token", 1)


async def test_a_closed_announcer_begins_no_task() -> None:
    membership: Any = SimpleNamespace(others=[PEER])
    announcer = Announcer(membership, SystemClock(), transport=None, timeout_s=1.0)  # type: ignore[arg-type]
    await announcer.close()
    before = asyncio.all_tasks()
    announcer.announce(EntryAnnouncement(1))
    announcer.suspect(PEER, "no answer")
    assert asyncio.all_tasks() == before
