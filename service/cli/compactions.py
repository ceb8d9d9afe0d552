"""`tidelog compactions`: the compactions that brokers run."""

from typing import TYPE_CHECKING, Any

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.compact import JOBS, job_fields

if TYPE_CHECKING:
    pass


def compactions(command: ClientCommand) -> None:
    """List the last compactions that clients have started at the brokers.

    A broker keeps its last 20 until it stops.
    """
    jobs = [job_fields(job) for job in command.request("GET", JOBS)["data"]]
    columns = ("topic", "state", "broker", "dry run", "rows read", "seconds", "results", "error")
    rows = []
    for job in jobs:
        texts = {"dry run": "yes" if job["is_dry_run"] else "no", "seconds": _seconds(job)}
        shown = {**job, **texts, "rows read": job["rows_read"]}
        rows.append([shown[name] for name in columns])
    command.show_rows(jobs, columns, rows)


def _seconds(job: dict[str, Any]) -> str:
    """Return how long an ended job took."""
    ended_ms = job["ended_ms"]
    return "" if ended_ms is None else f"{(ended_ms - job['started_ms']) / 1000:.1f}"
