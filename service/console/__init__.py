"""The console at /ui.

files          its static files (static/)
api            data that only the console needs
kafka_clients  the connected Kafka clients
topic_layout   where a topic's records are stored
wal_entries    the newest WAL entries
"""
