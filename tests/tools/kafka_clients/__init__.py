"""Kafka clients that PyPI does not have: `make test-kafka`."""
