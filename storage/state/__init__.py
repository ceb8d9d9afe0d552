"""The cluster state: the result of applying all WAL entries in order.

It is pure and the same on every broker (I4).
"""
