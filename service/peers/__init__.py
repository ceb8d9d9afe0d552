"""Requests between brokers.

listener      the port for other brokers
client        connections to other brokers
forwarding    consumer requests, forwarded to the group's coordinator
held_members  the held members of a group, from its coordinator
"""
