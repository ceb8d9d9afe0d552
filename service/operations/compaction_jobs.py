"""The compactions that clients start at a broker: at most one at a time, with progress and result.

A job continues if its client disconnects. A broker keeps its last JOBS_MAX jobs, in memory. One
broker asks the others for their jobs (service.peers).

**On a crash**: the job ends, and the tables are whole, as after a killed `tidelog compact`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from tidelog.service.telemetry.rates import Ask, answers, no_answers
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import InvalidRequest, LogError
from tidelog.storage.runtime.tasks import TASK_ENDS

log = logging.getLogger("tidelog.compact")

JOBS_MAX = 20
ROWS_MAX = 1_000
"""Rows of a result (I10). A job that merges a large topic has more rows; it keeps the first ones,
and says that there are more."""
RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"


class CompactionBusy(InvalidRequest):
    """The broker runs a compaction already."""

    status = 409
    code = 40904


class CompactionJob(msgspec.Struct):
    """One compaction of a topic.

    Times are in ms since 1970; `ended_ms` is None until the end. `rows_read` counts the rows that
    were read so far, some of them twice. `results` has the merges and compactions, one object each,
    as `tidelog compact --json` prints them; with `is_dry_run` those that are due.
    """

    job_id: str
    broker: str
    broker_id: int
    topic: str
    is_dry_run: bool
    is_forced: bool
    started_ms: int
    state: str = RUNNING
    ended_ms: int | None = None
    rows_read: int = 0
    error: str = ""
    results: list[dict[str, Any]] = []
    has_more_results: bool = False


Compact: TypeAlias = Callable[
    [CompactionJob, Callable[[int], None]], Awaitable[Sequence[dict[str, Any]]]
]
"""Do the work of a job, and call the function with the rows of each step. Return the results.
Raises LogError."""


async def no_store(job: CompactionJob, on_rows: Callable[[int], None]) -> Sequence[dict[str, Any]]:
    """Refuse each job: the work of a broker whose store is in memory."""
    raise InvalidRequest(f"topic {job.topic!r} cannot be compacted: the store is in memory")


class Compactions:
    """The compactions of one broker and, through `ask`, of its peers. Owned by one event loop."""

    def __init__(self, broker: Broker, work: Compact = no_store, ask: Ask = no_answers) -> None:
        self._broker = broker
        self._work = work
        self._ask = ask
        self._jobs: deque[CompactionJob] = deque(maxlen=JOBS_MAX)
        self._task: asyncio.Task[None] | None = None

    def start(self, topic: str, *, is_dry_run: bool, is_forced: bool) -> CompactionJob:
        """Start a compaction and return its job. Raises CompactionBusy."""
        me, clock = self._broker.cluster.members().me, self._broker.clock
        if self._task is not None and not self._task.done():
            running = self._jobs[0]
            raise CompactionBusy(
                f"broker {me.name} compacts topic {running.topic!r} (job {running.job_id}): wait "
                "for its end, or ask another broker"
            )
        job = CompactionJob(
            clock.new_id().hex(),
            me.name,
            me.number,
            topic,
            is_dry_run,
            is_forced,
            clock.now_ms(),
        )
        self._jobs.appendleft(job)
        self._task = asyncio.create_task(self._run(job), name="tidelog-compaction")
        return job

    async def close(self, wait_s: float) -> None:
        """Stop the running job, and wait for its end, at most `wait_s`."""
        if self._task is not None and self._task.cancel():
            await asyncio.wait({self._task}, timeout=wait_s)

    async def encoded(self) -> bytes:
        """Return the jobs of this broker as its peers decode them."""
        return msgspec.msgpack.encode(list(self._jobs))

    async def all(self) -> list[CompactionJob]:
        """Return the jobs of every broker that answers in time, the newest first."""
        all_jobs = list(self._jobs)
        for jobs in answers(await self._ask(), list[CompactionJob]):
            all_jobs += jobs
        return sorted(all_jobs, key=lambda job: (-job.started_ms, job.job_id))

    async def _run(self, job: CompactionJob) -> None:
        def on_rows(rows: int) -> None:
            job.rows_read += rows

        try:
            results = await self._work(job, on_rows)
            job.results = list(results[:ROWS_MAX])
            job.has_more_results = len(results) > ROWS_MAX
            is_damaged = any(result.get("is_damaged") for result in results)
            job.state = FAILED if is_damaged else DONE
            job.error = "a partition is damaged: see the results" if is_damaged else ""
        except (LogError, OSError) as error:
            job.state, job.error = FAILED, str(error)
            log.warning("compaction of topic %s failed: %s", job.topic, error)
        except TASK_ENDS:
            job.state, job.error = STOPPED, "the broker stopped"
            raise
        except BaseException:  # no caller handles it: log a bug, or a panic of deltalake
            job.state, job.error = FAILED, "internal error: the broker's log has the details"
            log.exception("compaction of topic %s failed", job.topic)
        finally:
            job.ended_ms = self._broker.clock.now_ms()
