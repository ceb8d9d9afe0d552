"""The console at /ui.

files          its static files (static/)
api            data that only the console needs
groups         the list of groups with their lag
cluster_health  whether the cluster is well, and if not, why
kafka_clients  the connected Kafka clients
topic_layout   where a topic's records are stored
wal_entries    the newest WAL entries
"""
