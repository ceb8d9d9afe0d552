"""Tests of storage/write/."""
