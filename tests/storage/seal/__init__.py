"""Tests of storage/seal/."""
