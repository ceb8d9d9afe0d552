"""One Delta table per topic: the manifest of its Parquet segments.

manifest     the manifest as the log uses it: protocol, versions, index
memory       a manifest in memory
delta        the manifest in a Delta table; alone imports deltalake
delta_log    the files of Delta's log, through the store
doubt        whether a version is what the log put there; which one readers use
delta_json   the JSON of Delta's log
open_tables  the open manifests of a broker
segment      Parquet segments: bytes, footers, row groups
"""
