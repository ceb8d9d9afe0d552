"""One Delta table per topic: the manifest of its Parquet segments.

manifest      Table, the interface of a topic's manifest; its versions; its segments by offset
memory        a manifest in memory
delta         the manifest in a Delta table
delta_change  a commit to a Delta table, as deltalake's actions
delta_log     reads Delta's log through the store; finds damaged commits; fsync in a folder
doubt         tables that another program changed, or that do not fit the WAL; what readers use then
delta_json    the JSON lines of Delta's log: pure
open_tables   the open manifests of a broker
segment       Parquet segments: bytes, footers, row groups
"""
