"""Rates and latencies of one broker: produce, fetch, acks, sustained load, sealing, partitions."""
