"""The broker: HTTP on top of storage/. Keeps nothing that must survive it.

settings   every setting with unit, default and reason; alone reads the environment
main       the composition root: settings in, a running broker out
app        the routes and the life of the application
wire       JSON dialects to columns and back
errors     one table: our error, its HTTP status and code
produce    records in
fetch      records out, with long polls
topics     topics, partitions and offsets, in our own dialect
admin_v3   the same in the dialect of Confluent's REST v3
telemetry  metrics, logs, health
cli        `tidelog`: serve, and a client for the rest
demo       a real data set through a real broker and Spark
"""
