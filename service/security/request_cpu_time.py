"""The CPU time of a principal's requests, for its quota `request_percentage`.

A request's time is the CPU time of the threads that work for it: of the event loop between the
handler's waits, which is measured here, and of its slices (service.codec_threads). Wall time would
also count waits for a CPU and for the interpreter's lock, which requests of other principals cause.
Work for several principals together (flushes, commits, seals) is not counted.

A measurement costs two reads of the thread's clock (system calls of ~0.5 us) for each wait. So only
requests of principals with this quota are measured. For other principals, the check for the quota
costs ~0.4 us.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tidelog.service.codec_threads import PERCENT
from tidelog.service.security.caller import CallerRights
from tidelog.storage.runtime.tasks import Steps
from tidelog.storage.state.access import REQUEST_PERCENTAGE

T = TypeVar("T")


def measured(rights: CallerRights, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return `work` as a coroutine that charges the CPU time of each of its steps.

    If the principal does not have the quota, return `work` unchanged. If the quota is removed
    later, nothing is charged.
    """
    if not rights.has_quota(REQUEST_PERCENTAGE):
        return work

    def charged(call: Callable[..., Any], *arguments: Any) -> Any:
        began_s = time.thread_time()
        try:
            return call(*arguments)
        finally:
            rights.record(REQUEST_PERCENTAGE, (time.thread_time() - began_s) * PERCENT)

    return Steps(work, charged)
