"""The console at /ui.

files         its static files (static/)
api           data that only the console needs
topic_layout  where a topic's records are stored
wal_entries   the newest WAL entries
"""
