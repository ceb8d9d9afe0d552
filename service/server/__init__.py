"""A running broker.

serve          the composition root: opens the parts, serves, closes
workers        several broker processes that share a port
router         the table of routes; serves the hot ones
app            the FastAPI application, which serves the others
maintenance    retention and collection beside serving
open_cluster   the cluster of a store, opened for maintenance by brokers and commands
open_files     how many connections the limit of open files allows
return_memory  memory of a peak goes back to the kernel
log_lines      log lines, as text or JSON
tracing        OpenTelemetry traces
"""
