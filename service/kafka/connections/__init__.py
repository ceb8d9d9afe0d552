"""Connections of Kafka clients: bytes in, requests to handlers, answers out."""
