"""Programs that `make` runs beside the tests: benchmarks, attacks, fuzzers, and the tests that need
clients or stores which PyPI does not have."""
