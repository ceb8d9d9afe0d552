"""Tests of storage/groups/."""
