"""Tests of storage/cluster/."""
