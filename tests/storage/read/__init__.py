"""Tests of storage/read/."""
