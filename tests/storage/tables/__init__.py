"""Tests of storage/tables/."""
