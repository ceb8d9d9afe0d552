"""Requests between brokers.

listener      the port for other brokers
client        connections to other brokers
forwarding    forwards the requests of consumer instances to the group's coordinator
held_members  asks a group's coordinator for its held members: clients whose joins must wait
"""
