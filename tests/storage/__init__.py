"""Tests of storage/: whole logs here, parts in the folders."""
