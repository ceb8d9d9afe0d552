"""Kafka's own protocol: a listener for unchanged Kafka clients, on the same broker as HTTP."""
