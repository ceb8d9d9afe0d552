"""A running broker.

serve          the composition root: opens the parts, serves, closes
drain          what a broker does from SIGTERM until its port may close
banner         the lines that a broker logs when it listens: addresses, store, next command
kafka          the listener for Kafka's protocol: ports, node id, start and stop
workers        several broker processes that share a port
router         the table of routes; serves the hot routes
app            the FastAPI application, which serves the other routes
maintenance    retention, collection and checks of tables, beside serving
open_cluster   the cluster of a store, opened for maintenance by brokers and commands
broker_files   the folder of the hot log, and who may read a folder store
open_files     the limit of open files, and the numbers of connections that it allows
return_memory  after a peak, returns freed memory to the kernel
log_lines      log lines, as text or JSON
tracing        OpenTelemetry traces
"""
