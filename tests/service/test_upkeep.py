"""Compactions that clients start at a broker: one at a time, bounded, stopped with the broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tests.service.conftest import Broker
from tidelog.service.operations import compaction_jobs
from tidelog.service.operations.compaction_jobs import (
    JOBS_MAX,
    ROWS_MAX,
    CompactionBusy,
    CompactionJob,
    Compactions,
)
from tidelog.storage.core.errors import Unavailable


class Held:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.results: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    async def __call__(
        self, job: CompactionJob, on_rows: Callable[[int], None]
    ) -> Sequence[dict[str, Any]]:
        on_rows(7)
        await self.may_end.wait()
        on_rows(5)
        if self.error is not None:
            raise self.error
        return self.results


@pytest.fixture
def work() -> Held:
    return Held()


@pytest.fixture
async def jobs(broker: Broker, work: Held) -> AsyncIterator[Compactions]:
    jobs = Compactions(broker.log, work)
    yield jobs
    await jobs.close(1.0)


async def ended(job: CompactionJob) -> CompactionJob:
    while job.ended_ms is None:  # noqa: ASYNC110 - a job has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # its task ends
    return job


async def test_one_at_time_with_progress_and_result(work: Held, jobs: Compactions) -> None:
    job = jobs.start("t", is_dry_run=False, is_forced=True)
    await asyncio.sleep(0)
    with pytest.raises(CompactionBusy, match=f"'t' .job {job.job_id}"):
        jobs.start("u", is_dry_run=False, is_forced=False)
    assert (job.state, job.rows_read, job.ended_ms) == ("running", 7, None)
    work.results = [{"is_damaged": False}] * (ROWS_MAX + 1)
    work.may_end.set()
    done = await ended(job)
    assert (done.state, done.rows_read, len(done.results)) == ("done", 12, ROWS_MAX)
    assert done.has_more_results
    assert done.ended_ms is not None


async def test_failure_is_kept(work: Held, jobs: Compactions) -> None:
    work.may_end.set()
    for error, words in (
        (Unavailable("no answer"), "no answer"),
        (ZeroDivisionError(), "internal"),
    ):
        work.error = error
        job = await ended(jobs.start("t", is_dry_run=True, is_forced=False))
        assert job.state == "failed"
        assert words in job.error
    work.error, work.results = None, [{"is_damaged": True}]
    job = await ended(jobs.start("t", is_dry_run=True, is_forced=False))
    assert job.state == "failed"


async def test_last_jobs_are_kept(work: Held, jobs: Compactions) -> None:
    work.may_end.set()
    for _ in range(JOBS_MAX + 3):
        await ended(jobs.start("t", is_dry_run=True, is_forced=False))
    assert len(await jobs.all()) == JOBS_MAX


async def test_job_ends_with_its_broker(work: Held, jobs: Compactions) -> None:
    job = jobs.start("t", is_dry_run=False, is_forced=False)
    await asyncio.sleep(0)
    await jobs.close(5.0)
    assert (job.state, job.error) == ("stopped", "the broker stopped")


async def test_jobs_of_peers_are_listed_and_other_versions_are_left_out(broker: Broker) -> None:
    own = Compactions(broker.log)
    own.start("mine", is_dry_run=True, is_forced=False)
    answer = await own.encoded()

    async def ask() -> Sequence[bytes]:
        return [answer, b"\xc1", b""]

    assert [job.topic for job in await Compactions(broker.log, ask=ask).all()] == ["mine"]


async def test_store_in_memory_is_not_compacted(broker: Broker) -> None:
    jobs = Compactions(broker.log, compaction_jobs.no_store)
    job = await ended(jobs.start("t", is_dry_run=True, is_forced=False))
    assert "the store is in memory" in job.error


async def test_routes_of_topic_that_is_not_there(broker: Broker) -> None:
    for path, body in (
        ("records:delete", {"partitions": [{"partition_id": 0, "offset": 0}]}),
        ("compactions", {}),
    ):
        answer = await broker.http.post(f"/tidelog/v1/topics/nope/{path}", json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (404, 40401)


async def test_wrong_deletions_change_nothing(broker: Broker) -> None:
    await broker.log.topics.create("t", 2, {})
    partition = {"partition_id": 0, "offset": 0}
    for partitions, status in (
        ([], 422),
        ([partition, partition], 400),
        ([{**partition, "offset": 1}], 400),
        ([{**partition, "offset": -2}], 422),
        ([partition, {**partition, "partition_id": 2}], 404),
    ):
        path = "/tidelog/v1/topics/t/records:delete"
        answer = await broker.http.post(path, json={"partitions": partitions})
        assert answer.status_code == status, answer.text
