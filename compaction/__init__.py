"""Maintenance of stored data: retention, merging, key compaction, collection, verification, repair,
backup.

Of tidelog's packages, this one imports only storage. The commands on a store (service/cli)
and brokers (service/server/maintenance.py) run it.
"""
