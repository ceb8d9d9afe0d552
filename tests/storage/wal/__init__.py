"""Tests of storage/wal/."""
