"""The pace of commits: PUTs, their price a month, and the time of an ack, by brokers and settings.

The real code in virtual time, with the latencies of S3 Standard (bench.simulated_load).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench.report import Table, number
from tests.tools.bench.simulated_load import MB, Load, Measured, simulate
from tidelog.storage.core.log_settings import PaceSettings

COLUMNS = ("cluster", "PUT/s", "GET/s", "a month", "ack p50 / p99 s", "most")
BUDGET = PaceSettings()
SPENT = BUDGET._replace(commits_burst=1)
"""The default budget, after a load has spent what it had saved."""
QUARTER = PaceSettings(flush_interval_ms=250)
SECONDS, QUICK_S = 20.0, 6.0


class Case(NamedTuple):
    """Brokers, each with its part of `requests_s` requests of `request_bytes`, and their pace.

    `dollars_max` and `acks_s_max` (p50, p99) are targets.
    """

    title: str
    brokers: int
    requests_s: float
    request_bytes: int
    pace: PaceSettings
    dollars_max: float | None = None
    acks_s_max: tuple[float, float] | None = None


CASES: Sequence[Case] = (
    Case("1 broker, 50 requests/s, the budget's saved commits", 1, 50, 100, BUDGET),
    Case("1 broker, 50 requests/s, the budget is spent", 1, 50, 100, SPENT, 30.0),
    Case("1 broker, a request a second", 1, 1, 100, SPENT._replace(commits_burst=40), 30.0),
    Case("3 brokers, 50 requests/s, the budget is spent", 3, 50, 100, SPENT, 30.0),
    Case("3 brokers, 10 MB/s, the budget is spent", 3, 100, 100_000, SPENT, 30.0),
    Case("3 brokers, 10 MB/s, 250 ms", 3, 100, 100_000, QUARTER, 56.0, (0.23, 0.41)),
    Case("10 brokers, 10 MB/s, 250 ms", 10, 100, 100_000, QUARTER, 60.0, (0.23, 0.41)),
    Case("10 brokers, 0.5 MB/s, 250 ms", 10, 50, 10_000, QUARTER, 60.0),
    Case("40 brokers, 400 requests/s, the budget is spent", 40, 400, 100, SPENT, 30.0),
)


def measure(folder: Path, *, is_quick: bool) -> Table:
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        measured = simulated(case, QUICK_S if is_quick else SECONDS)
        most = "" if case.dollars_max is None else f"${case.dollars_max:g}"
        if case.acks_s_max is not None:
            most += f", {case.acks_s_max[0]:g} / {case.acks_s_max[1]:g} s"
        dollars = f"${measured.usd_a_month:,.2f}"
        acks = f"{measured.ack_p50_s:.2f} / {measured.ack_p99_s:.2f}"
        rates = number(measured.commits_s + measured.uploads_s), number(measured.reads_s)
        rows.append((case.title, *rates, dollars, acks, most))
    how = "simulated; PUT p50 / p99 30 / 150 ms, GET 15 / 80 ms, 80 MB/s a PUT"
    return Table(COLUMNS, rows, how)


def simulated(case: Case, seconds: float) -> Measured:
    mb_s = case.requests_s * case.request_bytes / MB
    load = Load(
        case.brokers,
        mb_s,
        seconds=seconds,
        request_bytes=case.request_bytes,
        pace=case.pace,
    )
    return simulate(load)
