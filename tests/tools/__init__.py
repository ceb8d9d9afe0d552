"""Programs that `make` runs beside the tests: benchmarks, attacks, fuzzers, more tests.

These tests need clients or stores that PyPI does not have.
"""
