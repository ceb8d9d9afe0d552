"""Maintenance of stored data: retention, compaction, collection, checks, repair, backup.

Of tidelog's packages, this one imports only storage. The commands on a store (service/cli)
and brokers (service/server/maintenance.py) run it.
"""
