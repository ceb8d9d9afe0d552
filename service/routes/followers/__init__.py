"""Followers: streams of records as they are committed, until the client goes.

topic  all partitions of a topic in one stream
"""
