"""Tests, by determinism: unit, contract, golden, sim, service, system; support is theirs alone."""
