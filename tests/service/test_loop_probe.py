"""The probe of the event loop, with clocks that the test sets."""

from types import SimpleNamespace

import pytest

from tidelog.service.telemetry import loop_probe
from tidelog.service.telemetry.loop_probe import HELD_S, PERIOD_S, LoopProbe
from tidelog.storage.core.histogram import Histogram


@pytest.mark.parametrize(
    ("late_s", "cpu_s", "held_s"),
    [(0.0, PERIOD_S, 0.0), (0.3, 0.3, 0.3), (0.3, 0.03, 0.03), (-0.001, 0.001, 0.0)],
    ids=["on time", "held", "waited for a CPU", "early"],
)
async def test_what_counts_as_held(
    monkeypatch: pytest.MonkeyPatch, late_s: float, cpu_s: float, held_s: float
) -> None:
    now = {"wall": 5.0, "cpu": 1.0}
    clocks = SimpleNamespace(perf_counter=lambda: now["wall"], thread_time=lambda: now["cpu"])
    monkeypatch.setattr(loop_probe, "time", clocks)
    histogram = Histogram(HELD_S)
    probe = LoopProbe(histogram)
    probe.start()
    probe.stop()
    now["wall"] += PERIOD_S + late_s
    now["cpu"] += cpu_s
    probe._measure()
    probe.stop()
    assert sum(histogram.counts) == 1
    assert histogram.total == pytest.approx(held_s)
