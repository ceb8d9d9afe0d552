"""Memory goes back to the kernel when a peak is over, and not before."""

import resource

import pytest

from tidelog.service.server.return_memory import PEAK_BYTES_MIN, PeakWatch
from tidelog.storage.runtime.malloc import keep_freed, return_freed

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("looks", "is_over"),
    [
        (
            [(8, 100), (256, 100), (256, 100), (200, 400), (8, 900), (8, 1500), (8, 2100)],
            [False, False, False, False, True, False, False],
        ),
        ([(8, 100 * n) for n in range(50)], [False] * 50),
        ([(8, 500), (0, 501), (0, 501), (0, 502)], [False, True, False, False]),
        ([(1, 10), (0, 10), (0, 11)], [False] * 3),
    ],
    ids=["an outage filled the buffer", "steady load", "a broker becomes idle", "it did little"],
)
def test_memory_is_returned_once_after_a_peak(
    looks: list[tuple[int, int]], is_over: list[bool]
) -> None:
    """The bytes that are buffered, and those flushed so far, in MiB."""
    assert PEAK_BYTES_MIN == 64 * MIB
    watch = PeakWatch()
    assert [watch.is_over(buffered * MIB, flushed * MIB) for buffered, flushed in looks] == is_over


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_freed_memory_goes_back() -> None:
    if not keep_freed():
        return  # not glibc
    blocks = [bytes(100_000) + b"x" for _ in range(2000)]
    pins = [bytes(40) for _ in range(2000)]
    full = rss_bytes()
    blocks.clear()
    return_freed()
    assert pins
    assert full - rss_bytes() > 150 * MIB
