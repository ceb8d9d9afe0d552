"""Copies of a running cluster, and new clusters from them (DESIGN 8)."""
