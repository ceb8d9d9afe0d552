"""Followers: streams of records as they are committed, until the client disconnects."""
