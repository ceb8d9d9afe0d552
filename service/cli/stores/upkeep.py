"""`tidelog delete-records --server`, `tidelog compact --server` and `tidelog compactions`: a broker
does the work, so the caller needs no rights on the store."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from tidelog.service.cli.requests import (
    JsonOption,
    ServerOption,
    missing_is,
    no_topic,
    quoted,
    request,
)
from tidelog.service.cli.results import (
    BadUsage,
    SlowProgress,
    Unreachable,
    show_json,
    show_line,
    show_rows,
    warn,
)
from tidelog.service.cli.stores.on_store import DRY_RUN, table
from tidelog.service.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tidelog.service.cli.client import CommandConnection

JOBS = "/tidelog/v1/compactions"
RUNNING, DONE = "running", "done"
ASK_EVERY_S = 0.3
UNSEEN_MAX = 20
"""The command fails after more than this number of answers in a row without the job. Then the job's
broker has stopped, or the broker that answers cannot reach it."""


def delete_records(
    ctx: typer.Context,
    server: str | None,
    topic: str,
    offsets: Mapping[int, int],
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the records before the offsets, by partition; -1 is the end."""
    partitions = [{"partition_id": number, "offset": end} for number, end in offsets.items()]
    moved = request(
        ctx,
        server,
        "POST",
        f"/tidelog/v1/topics/{quoted(topic)}/records:delete",
        json={"partitions": partitions, "validate_only": not yes},
    )["partitions"]
    rows = [
        {
            "topic": topic,
            "partition": partition["partition_id"],
            "was": partition["was"],
            "log_start_offset": partition["log_start_offset"],
        }
        for partition in moved
    ]
    if as_json:
        show_json({"is_dry": not yes, "moved": rows})
        return
    show_rows(rows, ("topic", "partition", "log start", "moves to"), as_json=False)
    if not yes:
        show_line(DRY_RUN)


def compact(
    ctx: typer.Context,
    server: str | None,
    topics: Sequence[str] | None,
    *,
    yes: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Compact the topics, one after the other, and wait for the end of each."""
    if not topics:
        raise BadUsage("--server needs the names of the topics to compact")
    from tidelog.service.cli.client import CommandConnection, with_client

    body = {"validate_only": not yes, "is_forced": force}

    async def work(client: CommandConnection) -> list[dict[str, Any]]:
        jobs = []
        for topic in topics:
            path = f"/tidelog/v1/topics/{quoted(topic)}/compactions"
            with missing_is(no_topic(topic)):
                started = client.json_of(await client.post(path, json=body))
            jobs.append(await _ended(client, started))
        return jobs

    jobs = with_client(ctx, server, work)
    results = [result for job in jobs for result in job["results"]]
    if as_json:
        show_json({"is_dry": not yes, "compacted": results, "jobs": [_short(job) for job in jobs]})
    else:
        show_compacted(results)
        if any(job["has_more_results"] for job in jobs):
            show_line("there are more: a broker keeps the first 1,000 of each job")
        if not yes:
            show_line(DRY_RUN)
    failed = [job for job in jobs if job["state"] != DONE]
    for job in failed:
        warn(f"{job['topic']}: {job['state']} at broker {job['broker']}: {job['error']}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def list_compactions(
    ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the last compactions that clients have started at the brokers.

    A broker keeps its last 20 until it stops.
    """
    jobs = [_short(job) for job in request(ctx, server, "GET", JOBS)["data"]]
    columns = ("topic", "state", "broker", "dry run", "rows read", "seconds", "results", "error")
    rows = [
        (
            job["topic"],
            job["state"],
            job["broker"],
            "yes" if job["is_dry_run"] else "no",
            job["rows_read"],
            _seconds(job),
            job["results"],
            job["error"],
        )
        for job in jobs
    ]
    show_rows(jobs, columns, rows, as_json=as_json)


async def _ended(client: "CommandConnection", job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a job. Any broker may answer, because each asks the others."""
    unseen = 0
    with SlowProgress(f"compacting {job['topic']}") as progress:
        while job["state"] == RUNNING:
            await asyncio.sleep(ASK_EVERY_S)
            jobs = (await client.get_json(JOBS))["data"]
            now = next(
                (listed_job for listed_job in jobs if listed_job["job_id"] == job["job_id"]), None
            )
            unseen = unseen + 1 if now is None else 0
            if unseen > UNSEEN_MAX:
                raise Unreachable(
                    f"the compaction of {job['topic']} is not in the answers any more: broker "
                    f"{job['broker']} has stopped or cannot be reached; run the command again"
                )
            job = now or job
            progress.show(job["rows_read"])
    return job


def _seconds(job: dict[str, Any]) -> str:
    """Return how long an ended job took."""
    ended_ms = job["ended_ms"]
    return "" if ended_ms is None else f"{(ended_ms - job['started_ms']) / 1000:.1f}"


def _short(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job with the number of its results."""
    return {**job, "results": len(job["results"])}


def show_compacted(results: Sequence[Mapping[str, Any]]) -> None:
    """Print merges and compactions, each as the fields of `Compacted`, as a table."""
    fields = ("topic", "partition", "what", "why", "segments", "rows", "size")
    rows = [(*(result[name] for name in fields), _becomes(result)) for result in results]
    columns = ("topic", "partition", "what", "why", "segments", "rows", "bytes", "becomes")
    table("nothing to compact", columns, rows)


def _becomes(result: Mapping[str, Any]) -> str:
    if result["is_damaged"]:
        return "DAMAGED: unchanged"
    if result["is_lost"]:
        return "another run was faster: unchanged"
    if result["segments_after"] < 0:
        return ""
    return (
        f"{result['segments_after']:,} with {result['rows_after']:,} rows, "
        f"{result['size_after']:,} bytes"
    )
