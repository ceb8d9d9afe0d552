"""Tests of storage/store/."""
