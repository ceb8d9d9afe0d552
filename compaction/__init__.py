"""Maintenance of stored data: retention, merging, key compaction, collection, verification.

This package imports only storage. The command line (service/cli/maintenance.py) and brokers
(service/server/maintenance.py) run it.

plan            what retention, merging and compaction would do to a partition; pure
garbage         which objects may be deleted; pure
session         WAL, tables and the store's clock, for maintenance beside the brokers
retention       moves log starts, removes the records below from tables; delete-records
newest_per_key  the newest record of each key
rewrite         segments in, one segment out: the body of every merge and compaction
engine          rewrites and their commits: the interface of executors, the one in this process
spark_engine    the executor of rewrites in Spark tasks
compact         merges small segments, keeps the newest record per key
collect         deletes objects that nothing names
repair_tables   restores or adopts tables in doubt
upgrade         raises the level of the format; sets bounds; live brokers of older levels
backups         copies of a running cluster, and new clusters from them
repair_wal      drops entries behind damage, gives up lost records, deletes strays
scrub_checks    conditions that hold for a partition and for a segment; pure
scrub_wal       the chain of the WAL, applied and verified
scrub           checks the invariants on the stored data
"""
