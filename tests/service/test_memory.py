"""Memory goes back to the kernel when a peak is over, and not before."""

import resource

from tidelog.service.server.return_memory import PEAK_BYTES_MIN, PeakWatch
from tidelog.storage.runtime.malloc import keep_freed, return_freed

MIB = 1024 * 1024


def watched(*looks: tuple[int, int]) -> list[bool]:
    """Return the result of `is_over` for each (buffered, flushed so far) in MiB."""
    watch = PeakWatch()
    return [watch.is_over(buffered * MIB, flushed * MIB) for buffered, flushed in looks]


def test_a_buffer_that_an_outage_filled_is_returned_once_under_load() -> None:
    looks = [(8, 100), (256, 100), (256, 100), (200, 400), (8, 900), (8, 1500), (8, 2100)]
    assert watched(*looks) == [False, False, False, False, True, False, False]


def test_steady_load_keeps_its_memory() -> None:
    assert watched(*((8, 100 * n) for n in range(50))) == [False] * 50


def test_a_broker_that_becomes_idle_returns_it_once() -> None:
    assert watched((8, 500), (0, 501), (0, 501), (0, 502)) == [False, True, False, False]


def test_a_broker_that_did_little_keeps_it() -> None:
    assert PEAK_BYTES_MIN == 64 * MIB
    assert watched((1, 10), (0, 10), (0, 11)) == [False] * 3


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
