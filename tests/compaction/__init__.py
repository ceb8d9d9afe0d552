"""Tests of compaction/."""
