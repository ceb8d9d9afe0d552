"""Brokers as real processes: killed, filled up, started wrongly; on folders and on a real S3."""
