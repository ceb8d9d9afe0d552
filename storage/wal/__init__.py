"""The chain of WAL entries.

wal_objects          the objects of the WAL in the store: reading, creation, verification
view                 one broker's view of the chain: it commits, follows, expires, calls subscribers
entry_put            the PUT of an entry and its three outcomes
copy_fence           the hashes of this process's entries, which show whether a copy of it runs
freshness            the age of a view, by the boot clock and the store's
store_time           the wall time of this machine, within bounds of the store's clock
checkpoint_schedule  when a broker writes a checkpoint; the task that writes it
announced            headers and chunks of entries that other brokers announced
"""
