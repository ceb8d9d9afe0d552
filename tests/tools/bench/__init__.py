"""Benchmarks: `make bench`, `make limits`, `make bench-peers`.

Ratios and medians of one run on one machine. `make test` runs some of them for a second, and does
not look at their numbers.
"""
