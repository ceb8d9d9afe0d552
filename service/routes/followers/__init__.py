"""Followers: streams of records as they are committed, until the client disconnects.

topic   all partitions of a topic in one stream
bounds  how many followers a principal may have, and of how many partitions
"""
