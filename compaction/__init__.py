"""Maintenance of stored data: retention, merging, key compaction, collection, verification, repair,
backup.

Of tidelog's packages, this one imports only storage. Commands (service/cli/stores/maintenance.py,
service/cli/stores/repair.py) and brokers (service/server/maintenance.py) run it.
"""
