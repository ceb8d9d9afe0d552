"""Attacks on real brokers, and what each attack costs the broker and its other clients.

attacks         the requests of each attack
body_attacks    bodies that a broker parses on its event loop
follow_attacks  many followers of topics with many partitions
forward_attacks reads that another broker coordinates, and that clients take slowly
tls_attacks     handshakes and KeyUpdates without a login
name_attacks    long names, words that errors quote, logins that wait behind others
offset_attacks  small requests for all committed offsets of groups
chunk_attacks   records spread over many partitions
measure         an attack and its limits
probes          memory, stalls and the requests of a neighbour (another client) during an attack
"""
