"""The chain of WAL entries."""
