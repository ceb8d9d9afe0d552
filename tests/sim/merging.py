"""Brokers that merge small segments, as `service.server.merges` has them do it."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tests.sim import faults
from tidelog.compaction.in_process_engine import InProcess
from tidelog.service.server.merges import Merges
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import CommitUnknown, LogError, Unavailable
from tidelog.storage.runtime.threads import CpuTime
from tidelog.storage.store.object_store import ObjectStore

P = ParamSpec("P")
T = TypeVar("T")
CHECK_S = 0.5


class NoCpuTime(CpuTime):
    """Virtual time passes in no computation."""

    def of(self, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return call(*arguments, **keywords)


async def merge_for_ever(
    broker: Broker,
    store: ObjectStore,
    after_s: float,
    on_merges: Callable[[int], None],
    on_error: Callable[[LogError], None],
) -> None:
    """Merge what is due in the broker's topics.

    `on_merges` gets the number of merges of each check, `on_error` an error that is no failure of
    the store.
    """
    counters = MaintenanceCounters()
    rewriter = InProcess(store, broker.clock, cpu_time=NoCpuTime())
    merges = Merges(broker, rewriter, counters, after_s=after_s, cpu_share=1.0)
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await merges.merge_due()
        except (Unavailable, CommitUnknown):
            pass  # the next check goes on
        except LogError as error:
            on_error(error)
        except faults.KINDS as error:
            if not str(error).startswith(faults.INJECTED):
                raise
        on_merges(counters.merges)
        counters.merges = 0
