"""Benchmarks: `make bench`. Ratios and medians of one run on one machine; never part of the
tests."""
