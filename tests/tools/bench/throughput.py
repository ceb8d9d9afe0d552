"""The most MB/s that one and three brokers take, and what 10 MB/s cost, simulated.

The store's latencies are those of S3 Standard. No CPU time is in it: the part `sustained` has that.
"""

from pathlib import Path

from tests.tools.bench.report import Row
from tests.tools.bench.simulated_load import Load, Measured, simulate

MOST = (Load(brokers=1, mb_s=150), Load(brokers=3, mb_s=480))
"""More than the brokers must take: their answers are late if they do not take it."""
LITTLE = tuple(
    Load(brokers, mb_s=10, interval_ms=interval_ms)
    for brokers in (1, 3)
    for interval_ms in (0, 250)
)
MB_S = {1: 120.0, 3: 450.0}
"""Targets by the number of brokers."""
ACK_P50_S = 0.35


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    seconds = 4.0 if is_quick else 20.0
    rows: list[Row] = []
    for load in MOST:
        rows += most(load, simulate(load._replace(seconds=seconds)))
    return rows + [little(load, simulate(load._replace(seconds=seconds))) for load in LITTLE]


def most(load: Load, measured: Measured) -> list[Row]:
    name = f"{_brokers(load)}, {load.mb_s:.0f} MB/s offered"
    chunks = f"{measured.entries_s:.1f} entries/s, {measured.chunks_s:.0f} chunks/s"
    return [
        Row("throughput", name, measured.mb_s, "MB/s", MB_S[load.brokers], note=_price(measured)),
        Row(
            "throughput",
            f"{name}: ack p50",
            measured.ack_p50_s,
            "s",
            ACK_P50_S,
            note=f"p99 {measured.ack_p99_s:.2f} s, {chunks}, {measured.failed} refused",
            is_smaller_better=True,
        ),
    ]


def little(load: Load, measured: Measured) -> Row:
    name = f"{_brokers(load)}, {load.mb_s:.0f} MB/s, `flush_interval_ms={load.interval_ms}`"
    acks = f"ack p50 {measured.ack_p50_s:.2f} s, p99 {measured.ack_p99_s:.2f} s"
    price = f"{_price(measured)}, ${measured.usd_a_month:.0f} a month"
    return Row("throughput", f"{name}: PUTs", measured.puts_a_gb, "a GB", note=f"{acks}, {price}")


def _brokers(load: Load) -> str:
    return f"{load.brokers} broker{'s'[: load.brokers > 1]}"


def _price(measured: Measured) -> str:
    return f"{measured.puts_a_gb:.0f} PUTs and ${measured.usd_a_gb:.4f} a GB"
