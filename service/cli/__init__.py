"""The commands of `tidelog`.

main             the application, serve, status; the commands of the other modules
client           requests to a broker: retries, errors
requests         options of client commands; commands of one request
results          error lines, JSON, tables, progress, confirmation
topics           topics, seal
groups           groups: list, describe, lag, reset, delete
access           keys, acls, quotas
produce_consume  produce, consume: their options and checks
positions        positions and times in options
store_options    --store and --master, and the settings that follow
records          the work of produce and consume: lines to records, batches, group members
maintenance      retain, delete-records, compact, collect, scrub, maintain; runs work on a store
repair           repair, upgrade, bounds, backup, restore
engines          the engine of a compaction
replay           history to files, with Spark
"""
