"""Maintenance of stored data: retention, merging, key compaction, collection, verification, repair,
backup.

Of tidelog's packages, this one imports only storage. Commands (service/cli/stores/maintenance.py,
service/cli/stores/repair.py) and brokers (service/server/maintenance.py) run it.

plan            what retention, merging and compaction would do to a partition; pure
garbage         which objects may be deleted; pure
session         a cluster that is opened for maintenance: WAL, tables, the store's clock
retention       moves log starts, removes the records below them from tables; delete-records
expiry          what retention would delete after a change of configs
newest_per_key  finds the newest record of each key
rewrite         segments in, one segment out: the body of every merge and compaction
engine          the interface of engines, which run rewrites; the engine in this process; the commit
spark_engine    the engine that runs rewrites in Spark tasks
compact         merges small segments, keeps the newest record per key
collect         deletes objects that nothing names
repair_tables   restores or adopts tables in doubt
upgrade         raises the level of the format; sets bounds; finds live brokers of older levels
backups         copies of a running cluster, and new clusters from them
repair_wal      drops entries behind damage, gives up lost records, deletes strays
scrub_checks    what a scrub checks on a partition and on a segment; pure
scrub_wal       the chain of the WAL, applied and verified
scrub           checks the invariants on stored data: the WAL by scrub_wal, then tables and tails
"""
