"""Tests of storage/runtime/."""
