"""Kafka's own protocol.

messages  the messages of Kafka's protocol, to and from bytes
"""
