"""Followers: streams of records as they are committed, until the client disconnects.

topic  all partitions of a topic in one stream
"""
