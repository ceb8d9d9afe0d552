"""Merging, key compaction and retention, beside what others do with the same files."""
