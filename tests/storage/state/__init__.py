"""Tests of storage/state/."""
