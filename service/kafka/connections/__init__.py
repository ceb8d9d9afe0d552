"""Connections of Kafka clients: bytes in, requests to handlers, answers out.

frame       frames of bytes within bounds, and the memory of requests; pure
outbox      answers on their way to sockets, and the memory of these
server      the parts that the connections of a listener share; an unanswered request
handshake   ApiVersions and SASL PLAIN
connection  one connection: requests in, answers out in the same order
listener    sockets with and without TLS, clocks, drain
"""
