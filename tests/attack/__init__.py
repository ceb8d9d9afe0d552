"""Attacks on real brokers, with the costs beside them.

attacks   what is sent, by the name of the attack
measure   memory, stalls and a neighbour during an attack
"""
