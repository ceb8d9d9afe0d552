"""Tests of storage/io/."""
