"""Tests of storage/core/."""
