"""The care of what is written: Spark jobs beside the brokers, on top of storage/. Nothing yet.

It will hold retention (whole segments below a new log start), key compaction (the newest record per
key), the merge of small segments, collection (deleting in three steps what nothing can name) and a
scrub that checks the invariants on what lies in the store. Brokers never import it, and it never
imports them: both meet in object storage alone.
"""
