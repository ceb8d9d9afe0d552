"""Reads of both tiers: the tail (WAL) and the table (segments)."""
